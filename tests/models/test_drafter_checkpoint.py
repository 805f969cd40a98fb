"""Loading and saving drafters: the faults of case T10, both directions of every format, and the drafts themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import fixtures
from tests.fixtures import TensorDict
from tests.models.drafter_module import ModuleDrafter, load_for
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget, reference_loop

from outrider.config import DrafterConfig
from outrider.errors import CheckpointError, ConfigError
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.drafter_checkpoint import check_num_speculative_tokens, load_drafter, resolve_drafter
from outrider.models.drafter_checkpoint_config import read_drafter_config
from outrider.models.drafter_checkpoint_save import save_drafter
from outrider.models.model_config import from_hf

ConfigDict = dict[str, Any]
Fault = Callable[[ConfigDict, TensorDict], None]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> ReferenceTarget:
    return ReferenceTarget(fixtures.make_cycle_target(tmp_path_factory.mktemp("cycle")))


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> ReferenceTarget:
    return ReferenceTarget(fixtures.make_rand_target(tmp_path_factory.mktemp("rand")))


def _edit(path: Path, fault: Fault) -> Path:
    """Rewrite the checkpoint at ``path`` after ``fault`` changed its config and tensors."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(path / "model.safetensors")
    fault(config, tensors)
    return fixtures.write_checkpoint(path, config, tensors)


def _accepted_length(path: Path, target: ReferenceTarget) -> float:
    drafter = ModuleDrafter(load_for(path, target))
    return reference_loop(target, drafter, fixtures.orbit_prompt(15), max_tokens=65, gamma=7).accepted_length


# ------------------------------------------------------------------------------------------- T10 a-g: refused


def _without_markov_w1(config: ConfigDict, tensors: TensorDict) -> None:
    del tensors["markov_head.markov_w1.weight"]


def _without_mask_id(config: ConfigDict, tensors: TensorDict) -> None:
    del config["mask_token_id"]


def _mask_id_beyond_vocab(config: ConfigDict, tensors: TensorDict) -> None:
    config["mask_token_id"] = 64


def _tap_beyond_target(config: ConfigDict, tensors: TensorDict) -> None:
    config["target_layer_ids"] = [0, 4]


def _hidden_size_48(config: ConfigDict, tensors: TensorDict) -> None:
    config["hidden_size"] = 48


def _markov_rank_0(config: ConfigDict, tensors: TensorDict) -> None:
    config["markov_rank"] = 0


def _extra_tensor(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["layers.0.self_attn.sink"] = torch.zeros(4)


def _transposed_fc(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()


def _other_target_depth(config: ConfigDict, tensors: TensorDict) -> None:
    config["num_target_layers"] = 36


def _smaller_vocab(config: ConfigDict, tensors: TensorDict) -> None:
    config["vocab_size"] = 63
    config["mask_token_id"] = 62


def _sliding_layer(config: ConfigDict, tensors: TensorDict) -> None:
    config["layer_types"] = ["full_attention", "sliding_attention"]


def _causal(config: ConfigDict, tensors: TensorDict) -> None:
    config["is_causal"] = True


def _confidence_switched_off(config: ConfigDict, tensors: TensorDict) -> None:
    config["enable_confidence_head"] = False


def _confidence_missing(config: ConfigDict, tensors: TensorDict) -> None:
    del tensors["confidence_head.proj.bias"]


def _unknown_head_type(config: ConfigDict, tensors: TensorDict) -> None:
    config["markov_head_type"] = "lstm"


def _rnn_with_unused_slot(config: ConfigDict, tensors: TensorDict) -> None:
    config |= {"markov_head_type": "rnn", "sample_from_anchor": False}


def _same_tensor_twice(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["model.fc.weight"] = tensors["fc.weight"].clone()


def _integer_weights(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int64)


def _deepseek_v4(config: ConfigDict, tensors: TensorDict) -> None:
    config["model_type"] = "deepseek_v4"


def _too_many_layers(config: ConfigDict, tensors: TensorDict) -> None:
    config["num_hidden_layers"] = 10**9
    del config["layer_types"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_without_markov_w1, ["missing", "markov_head.markov_w1.weight", "(64, 16)"]),
        (_without_mask_id, ["mask_token_id", "missing"]),
        (_mask_id_beyond_vocab, ["mask_token_id=64", "63"]),
        (_tap_beyond_target, ["target_layer_ids", "layer 4", "num_layers=4"]),
        (_hidden_size_48, ["hidden_size=48", "hidden_size=64"]),
        (_markov_rank_0, ["markov_rank=0", "confidence_head_with_markov"]),
        (_extra_tensor, ["unexpected", "layers.0.self_attn.sink", "(4,)"]),
        (_transposed_fc, ["fc.weight", "(128, 64)", "(64, 128)"]),
        (_other_target_depth, ["num_target_layers=36", "num_layers=4"]),
        (_smaller_vocab, ["vocab_size=63", "vocab_size=64"]),
        (_sliding_layer, ["sliding_attention"]),
        (_causal, ["is_causal"]),
        (_confidence_switched_off, ["unexpected", "confidence_head.proj.weight"]),
        (_confidence_missing, ["missing", "confidence_head.proj.bias"]),
        (_unknown_head_type, ["markov_head_type='lstm'", "vanilla"]),
        (_rnn_with_unused_slot, ["markov_head_type='rnn'", "sample_from_anchor=false"]),
        (_same_tensor_twice, ["fc.weight", "model.fc.weight", "same tensor"]),
        (_integer_weights, ["fc.weight", "I64"]),
        (_deepseek_v4, ["deepseek_v4", "not supported"]),
        (_too_many_layers, ["num_layers=1000000000", "bytes"]),
    ],
)
def test_broken_drafters_are_refused_by_name(
    fault: Fault, words: list[str], rand: ReferenceTarget, tmp_path: Path
) -> None:
    path = _edit(fixtures.make_random_drafter(tmp_path), fault)
    with pytest.raises(CheckpointError) as caught:
        load_for(path, rand)
    for word in words:
        assert word in str(caught.value)


def test_more_tokens_than_the_drafter_was_trained_for_are_refused(tmp_path: Path) -> None:
    config = read_drafter_config(fixtures.make_random_drafter(tmp_path))
    assert check_num_speculative_tokens(None, config) == 7
    assert check_num_speculative_tokens(3, config) == 3
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=8 must lie in 1\.\.7"):
        check_num_speculative_tokens(8, config)
    with pytest.raises(ConfigError, match="num_speculative_tokens=0"):
        check_num_speculative_tokens(0, config)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "qwen3"}'),
        ("model.safetensors", b""),
        ("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00garbage in header"),
        ("model.safetensors.index.json", b'{"weight_map": {"fc.weight": "../model.safetensors"}}'),
        ("card.json", b'{"target": "x", "selftest": {"prompts": []}}'),
        ("card.json", b"nothing"),
    ],
)
def test_malformed_files_are_clear_errors(name: str, content: bytes, rand: ReferenceTarget, tmp_path: Path) -> None:
    path = fixtures.make_random_drafter(tmp_path)
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.split(".")[0]):
        load_for(path, rand)


def test_truncated_weights_are_a_clear_error(rand: ReferenceTarget, tmp_path: Path) -> None:
    path = fixtures.make_random_drafter(tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_for(path, rand)


# ------------------------------------------------------------------------------------------- T10 h-l: loaded


def _pad_vocab(config: ConfigDict, tensors: TensorDict) -> None:
    """80 rows for the target's 64; the extra Markov rows would win every argmax if they could be drafted."""
    config["vocab_size"] = 80
    w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
    tensors["markov_head.markov_w1.weight"] = torch.cat((w1, torch.ones(16, 16)))
    tensors["markov_head.markov_w2.weight"] = torch.cat(
        (
            w2,
            torch.eye(16) * 1e3,
        )
    )
    tensors["embed_tokens.weight"] = torch.zeros(80, 64)
    tensors["lm_head.weight"] = torch.zeros(80, 64)


def _generic_architecture(config: ConfigDict, tensors: TensorDict) -> None:
    config["architectures"] = ["DraftModel"]


def _null_sliding_window(config: ConfigDict, tensors: TensorDict) -> None:
    config["sliding_window"] = None


def _model_prefix(config: ConfigDict, tensors: TensorDict) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def _rotary_tables_and_copies(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.embed_tokens.weight"] = torch.zeros(64, 64)
    tensors["lm_head.weight"] = torch.zeros(64, 64)


@pytest.mark.parametrize(
    "change", [_pad_vocab, _generic_architecture, _null_sliding_window, _model_prefix, _rotary_tables_and_copies]
)
def test_harmless_variants_load_and_draft_as_before(change: Fault, cycle: ReferenceTarget, tmp_path: Path) -> None:
    path = _edit(fixtures.make_perfect_drafter(tmp_path), change)
    assert _accepted_length(path, cycle) == 8.0


def test_shards_listed_in_reverse_load(cycle: ReferenceTarget, tmp_path: Path) -> None:
    path = fixtures.make_perfect_drafter(tmp_path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"b.safetensors": names[: len(names) // 2], "a.safetensors": names[len(names) // 2 :]}
    for file_name, held in shards.items():
        save_file({name: tensors[name] for name in held}, path / file_name)
    weight_map = {name: file_name for file_name, held in shards.items() for name in reversed(held)}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(reversed(weight_map.items()))}), encoding="utf-8")
    assert _accepted_length(path, cycle) == 8.0


def test_padding_rows_cannot_be_drafted(cycle: ReferenceTarget, tmp_path: Path) -> None:
    loaded = load_for(_edit(fixtures.make_perfect_drafter(tmp_path), _pad_vocab), cycle)
    assert loaded.config.decoder.vocab_size == loaded.config.draft_vocab_size == 64
    assert loaded.model.draft_to_target_V.tolist() == list(range(64))
    assert loaded.model.compute_base_logits(torch.zeros(1, 64)).shape == (1, 64)


# ------------------------------------------------------------------------------------------- drafts and round trips


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_loaded_drafters_draft_what_the_reference_drafts(head_type: str, rand: ReferenceTarget, tmp_path: Path) -> None:
    path = fixtures.make_random_drafter(tmp_path, markov_head_type=head_type)
    module, reference = ModuleDrafter(load_for(path, rand)), ReferenceDrafter.load(path, rand)
    for length in (1, 4, 5, 37):
        _, features = rand.run([(3 * i + length) % 64 for i in range(length)], fixtures.TARGET_LAYER_IDS)
        drafts, rows = module.propose(features, 11)
        expected_drafts, expected_rows = reference.propose(features, 11)
        assert drafts == expected_drafts
        torch.testing.assert_close(rows, expected_rows, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [8, 40, 200])
def test_context_drafter_takes_the_rounds_of_the_reference_loop(length: int, tmp_path: Path) -> None:
    target = ReferenceTarget(fixtures.make_layered_target(tmp_path / "target"))
    path = fixtures.make_context_drafter(tmp_path / "context")
    prompt = fixtures.orbit_prompt(length)
    run = reference_loop(target, ModuleDrafter(load_for(path, target)), prompt, max_tokens=65, gamma=7)
    assert run.accepted == [7] * 8


FORMATS: tuple[Literal["deepspec", "speculators", "specforge"], ...] = ("deepspec", "speculators", "specforge")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("confidence", ["off", "plain", "with_markov"])
def test_every_head_survives_every_format(
    fmt: Literal["deepspec", "speculators", "specforge"],
    head_type: str,
    confidence: str,
    rand: ReferenceTarget,
    tmp_path: Path,
) -> None:
    if (head_type, confidence) == ("none", "with_markov"):
        return  # refused, see test_broken_drafters_are_refused_by_name
    path = fixtures.make_random_drafter(
        tmp_path / "first",
        markov_rank=0 if head_type == "none" else 16,
        markov_head_type="vanilla" if head_type == "none" else head_type,
        enable_confidence_head=confidence != "off",
        confidence_head_with_markov=confidence == "with_markov",
    )
    _check_round_trip(path, rand, fmt=fmt, directory=tmp_path)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("own_head", [True, False])
def test_reduced_vocabulary_and_unused_slot_0_survive_speculators(
    sample_from_anchor: bool, own_head: bool, rand: ReferenceTarget, tmp_path: Path
) -> None:
    path = _make_reduced_drafter(tmp_path / "first", rand, sample_from_anchor=sample_from_anchor, own_head=own_head)
    loaded = load_for(path, rand)
    assert loaded.model.draft_to_target_V.tolist() == list(range(0, 64, 2))
    assert loaded.config.num_speculative_tokens == (7 if sample_from_anchor else 6)
    assert loaded.config.block_width == 7
    drafts = _drafts(path, rand)
    assert all(token_id % 2 == 0 for token_id in drafts)
    assert len(drafts) == loaded.config.num_speculative_tokens
    _check_round_trip(path, rand, fmt="speculators", directory=tmp_path)


def _make_reduced_drafter(
    path: Path, target: ReferenceTarget, *, sample_from_anchor: bool = True, own_head: bool = True
) -> Path:
    """speculators format, draft vocabulary of the 32 even target ids."""
    flat = fixtures.drafter_config()
    tensors = fixtures.random_drafter_tensors(flat, seed=9)
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:32]
    tensors["d2t"] = torch.arange(32)
    tensors["t2d"] = torch.arange(64) % 2 == 0
    if own_head:
        tensors["lm_head.weight"] = target.head_VD[::2] * 1.5
    shape_keys = {*fixtures.target_config(), "layer_types"} - {"architectures", "dtype"}
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": 7,
        "sample_from_anchor": sample_from_anchor,
        "aux_hidden_state_layer_ids": [i + 1 for i in fixtures.TARGET_LAYER_IDS],
        "mask_token_id": fixtures.MASK_ID,
        "markov_rank": 16,
        "draft_vocab_size": 32,
        "transformer_layer_config": {key: flat[key] for key in shape_keys if key in flat},
    }
    return fixtures.write_checkpoint(path, config, tensors)


def _check_round_trip(
    path: Path,
    target: ReferenceTarget,
    *,
    fmt: Literal["deepspec", "speculators", "specforge"],
    directory: Path,
) -> None:
    first = load_for(path, target)
    for vocabulary_tensors in (True, False):
        saved = directory / f"{fmt}-{vocabulary_tensors}"
        save_drafter(first.model, first.config, saved, fmt=fmt, vocabulary_tensors=vocabulary_tensors)
        second = load_for(saved, target)
        assert second.config == replace(first.config, source_format=fmt)
        before, after = checkpoint_views(first.model), checkpoint_views(second.model)
        if not vocabulary_tensors:
            del before["lm_head.weight"], after["lm_head.weight"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name].tensor, after[name].tensor) for name in before)
        if vocabulary_tensors:
            assert _drafts(saved, target) == _drafts(path, target)


def _drafts(path: Path, target: ReferenceTarget) -> list[int]:
    _, features = target.run([5, 9, 2, 40, 33], fixtures.TARGET_LAYER_IDS)
    return ModuleDrafter(load_for(path, target)).propose(features, 17)[0]


def _maps_beyond_vocab(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["d2t"] = tensors["d2t"] + 40


def _maps_all_to_one(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["d2t"] = -torch.arange(32)


def _without_map(config: ConfigDict, tensors: TensorDict) -> None:
    del tensors["d2t"]


def _other_flags(config: ConfigDict, tensors: TensorDict) -> None:
    tensors["t2d"] = torch.arange(64) % 2 == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_maps_beyond_vocab, ["draft id 12", "target id 64"]),
        (_maps_all_to_one, ["32 draft ids", "1 target ids"]),
        (_without_map, ["missing", "d2t"]),
        (_other_flags, ["t2d and d2t disagree"]),
    ],
)
def test_faulty_vocabulary_maps_are_refused(
    fault: Fault, words: list[str], rand: ReferenceTarget, tmp_path: Path
) -> None:
    path = _edit(_make_reduced_drafter(tmp_path, rand), fault)
    with pytest.raises(CheckpointError) as caught:
        load_for(path, rand)
    for word in words:
        assert word in str(caught.value)


def test_formats_without_a_word_for_it_refuse_to_save(rand: ReferenceTarget, tmp_path: Path) -> None:
    reduced = load_for(_make_reduced_drafter(tmp_path / "a", rand), rand)
    with pytest.raises(ConfigError, match="draft_vocab_size=32 below vocab_size=64"):
        save_drafter(reduced.model, reduced.config, tmp_path / "b", fmt="deepspec")
    shifted = load_for(fixtures.make_random_drafter(tmp_path / "c", sample_from_anchor=False), rand)
    with pytest.raises(ConfigError, match="sample_from_anchor=false"):
        save_drafter(shifted.model, shifted.config, tmp_path / "d", fmt="specforge")
    assert not (tmp_path / "b").exists()


def test_loading_shares_the_targets_embedding_and_head(rand: ReferenceTarget, tmp_path: Path) -> None:
    embedding, head = torch.nn.Parameter(rand.embedding_VD), torch.nn.Parameter(rand.head_VD)
    loaded = load_drafter(
        fixtures.make_random_drafter(tmp_path),
        target_config=from_hf(fixtures.target_config()),
        embed_weight=embedding,
        lm_head_weight=head,
    )
    assert loaded.model.embed_tokens.weight is embedding
    assert loaded.model.lm_head.weight is head
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_resolving_what_to_draft_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fixtures.make_random_drafter(tmp_path / "drafter")
    assert resolve_drafter("none", "smollm2-135m") is None
    assert resolve_drafter("lookup", "smollm2-135m") is None
    assert resolve_drafter(str(path), "whatever") == path
    assert resolve_drafter("auto", "no-such-model") is None
    assert resolve_drafter("auto", str(path)) is None
    package = tmp_path / "outrider"
    shutil.copytree(path, package / "drafters" / "some-model")
    monkeypatch.setattr("outrider.models.drafter_checkpoint_source.files", lambda name: tmp_path / name)
    assert resolve_drafter("auto", "some-model") == package / "drafters" / "some-model"
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_drafter(str(path / "config.json"), "some-model")


def test_an_unreachable_hub_id_says_what_was_tried() -> None:
    with pytest.raises(CheckpointError, match=r"Tried: .* hub id"):
        resolve_drafter("not a valid id/at/all", "m")


def test_config_type_is_frozen(tmp_path: Path) -> None:
    config = read_drafter_config(fixtures.make_random_drafter(tmp_path))
    assert isinstance(config, DrafterConfig)
    with pytest.raises(AttributeError):
        config.markov_rank = 3  # type: ignore[misc]
