"""Case T10: malformed drafters are refused by name before weights load; harmless variants draft as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import fixtures
from tests.engine.zoo import Config, Fault, Zoo, edited, generate, greedy, tokens

from outrider.errors import CheckpointError, ConfigError, OutriderError


def drop_markov_tensor(config: Config, tensors: fixtures.TensorDict) -> None:
    del tensors["markov_head.markov_w2.weight"]


def drop_mask_id(config: Config, tensors: fixtures.TensorDict) -> None:
    del config["mask_token_id"]


def add_tensor(config: Config, tensors: fixtures.TensorDict) -> None:
    tensors["layers.1.self_attn.gate.weight"] = torch.zeros(2, 3)


def set_config(**changes: Any) -> Fault:
    def fault(config: Config, tensors: fixtures.TensorDict) -> None:
        config.update(changes)

    return fault


REFUSED: dict[str, tuple[Fault, list[str]]] = {
    "a": (drop_markov_tensor, ["missing", "markov_head.markov_w2.weight", "(64, 16)"]),
    "b, absent": (drop_mask_id, ["mask_token_id", "missing"]),
    "b, beyond": (set_config(mask_token_id=64), ["mask_token_id=64", "63"]),
    "c": (set_config(target_layer_ids=[0, 4]), ["target_layer_ids=[0, 4]", "num_layers=4"]),
    "d": (set_config(hidden_size=48), ["hidden_size=48", "hidden_size=64"]),
    "f": (set_config(markov_rank=0), ["markov_rank=0", "confidence_head_with_markov=true"]),
    "g": (add_tensor, ["unexpected", "layers.1.self_attn.gate.weight", "(2, 3)"]),
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded before the configuration was refused")

    monkeypatch.setattr("outrider.engine.quantization.load_model", refuse)
    monkeypatch.setattr("outrider.engine.quantization.load_drafter", refuse)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", REFUSED)
def test_t10_refused_before_weights_load(name: str, zoo: Zoo, tmp_path: Path) -> None:
    fault, words = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        zoo.llm("cycle", edited(tmp_path / "drafter", zoo.path("perfect"), fault))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_t10_e_more_drafts_than_trained_for(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=8 must lie in 1\.\.7"):
        zoo.llm("cycle", "perfect", 8)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("args", "words"), [
    ({"max_model_len": 1025}, ["max_model_len=1025", "max_position_embeddings=1024"]),
    ({"max_num_batched_tokens": 7}, ["max_num_batched_tokens=7", "8", "num_speculative_tokens=7"]),
    ({"kv_cache_memory_bytes": 100}, ["kv_cache_memory_bytes=100", "kv_block_size=16"]),
    ({"attention_backend": "imaginary"}, ["attention_backend", "imaginary"]),
    ({"max_model_len": 1}, ["max_model_len=1", "2"]),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, ["max_num_batched_tokens=512", "1024"]),
])  # fmt: skip
def test_options_that_cannot_run_are_refused_before_weights_load(
    args: dict[str, Any], words: list[str], zoo: Zoo
) -> None:
    with pytest.raises(OutriderError) as caught:
        zoo.llm("cycle", "perfect", **args)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_a_confidence_threshold_needs_a_confidence_head(zoo: Zoo, tmp_path: Path) -> None:
    headless = fixtures.make_perfect_drafter(tmp_path, enable_confidence_head=False, confidence_head_with_markov=False)
    for draft in ("none", "lookup", str(headless)):
        with pytest.raises(ConfigError, match=r"draft_confidence_threshold=0\.5 needs a drafter with a confidence"):
            zoo.llm("cycle", draft, draft_confidence_threshold=0.5)


def pad_vocabulary(config: Config, tensors: fixtures.TensorDict) -> None:
    """80 rows for the target's 64; the rows beyond would win every argmax if they could be drafted."""
    config["vocab_size"] = 80
    for name, filler in (("markov_w1", torch.ones(16, 16)), ("markov_w2", 1e3 * torch.eye(16))):
        key = f"markov_head.{name}.weight"
        tensors[key] = torch.cat((tensors[key], filler))


def add_model_prefix(config: Config, tensors: fixtures.TensorDict) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


LOADED: dict[str, Fault] = {
    "h": pad_vocabulary,
    "i": set_config(architectures=["DraftModel"]),
    "j": set_config(sliding_window=None),
    "k": add_model_prefix,
}


def t2_accepted_length(zoo: Zoo, draft: str) -> float:
    prompt = fixtures.orbit_prompt(17)
    output = generate(zoo.llm("cycle", draft), [prompt], greedy(65))[0]
    assert tokens(output) == fixtures.continuation(prompt, 65)
    return output.spec.accepted_length


@pytest.mark.parametrize("name", LOADED)
def test_t10_harmless_variants_draft_as_before(name: str, zoo: Zoo, tmp_path: Path) -> None:
    assert t2_accepted_length(zoo, edited(tmp_path / "drafter", zoo.path("perfect"), LOADED[name])) == 8


def test_t10_l_shards_in_reverse(zoo: Zoo, tmp_path: Path) -> None:
    drafter = zoo.path("perfect")
    tensors = load_file(drafter / "model.safetensors")
    names = sorted(tensors, reverse=True)
    shards = {"model-2.safetensors": names[:9], "model-1.safetensors": names[9:]}
    for file_name, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file_name)
    weight_map = {name: file_name for file_name, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (tmp_path / "config.json").write_bytes((drafter / "config.json").read_bytes())
    assert t2_accepted_length(zoo, str(tmp_path)) == 8
