"""Reading and writing ``config.json`` of drafters: defaults, traps, rotary settings, and arbitrary damage."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import fixtures
from transformers import Qwen3Config

from outrider.config import DrafterConfig, RopeConfig
from outrider.errors import CheckpointError
from outrider.models import drafter_checkpoint_config
from outrider.models.drafter_checkpoint_config import DrafterFormat, drafter_config_to_json, read_drafter_config

FORMATS: tuple[DrafterFormat, ...] = ("deepspec", "speculators", "specforge")


def _speculators_config(**changes: Any) -> dict[str, Any]:
    layers = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=32,  # the class default, which to_diff_dict leaves out
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=5e5,
    )
    return {
        "speculators_model_type": "dspark",
        "block_size": 7,
        "aux_hidden_state_layer_ids": [0, 1, 3],
        "mask_token_id": 62,
        "draft_vocab_size": 64,
        "transformer_layer_config": layers.to_diff_dict(),
        **changes,
    }


def test_speculators_defaults_and_numbering() -> None:
    config = read_drafter_config(_speculators_config())
    assert config.source_format == "speculators"
    assert config.sample_from_anchor  # absent means true for DSpark
    assert config.num_speculative_tokens == config.block_width == 7
    assert config.target_layer_ids == (-1, 0, 2)  # counted from the embedding there
    assert config.markov_rank == 256
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov
    assert config.decoder.num_heads == 32
    assert config.decoder.rope.theta == 5e5


def test_speculators_block_size_counts_an_unused_slot_0() -> None:
    config = read_drafter_config(_speculators_config(sample_from_anchor=False))
    assert config.num_speculative_tokens == 6
    assert config.block_width == 7


def test_specforge_fields_are_found_prefixed_then_nested_then_at_the_top() -> None:
    raw = fixtures.drafter_config(
        dflash_config={"mask_token_id": 5, "target_layer_ids": [1], "projector_type": "dspark", "markov_rank": 8},
        dspark_mask_token_id=6,
    )
    config = read_drafter_config(raw)
    assert config.source_format == "specforge"
    assert config.mask_token_id == 6
    assert config.target_layer_ids == (1,)
    assert config.markov_rank == 8
    assert config.num_speculative_tokens == 7


def test_specforge_confidence_defaults_follow_its_loss_weight() -> None:
    raw = fixtures.drafter_config(dflash_config={"projector_type": "dspark"})
    del raw["enable_confidence_head"], raw["confidence_head_with_markov"]
    assert not read_drafter_config(raw).enable_confidence_head
    raw["dflash_config"]["confidence_head_alpha"] = 1.0
    config = read_drafter_config(raw)
    assert config.enable_confidence_head
    assert not config.confidence_head_with_markov


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "eagle3"}, ["speculators_model_type='eagle3'", "dspark"]),
        ({"dflash_config": {"projector_type": "dflash"}}, ["projector_type='dflash'"]),
        ({"dflash_config": {"causal": True}}, ["causal=True"]),
        ({"dflash_config": {"shift_label": True}}, ["shift_label=True"]),
        ({"attention_mode": "mha"}, ["attention_mode='mha'", "num_key_value_heads=2"]),
        ({"target_hidden_size": 128}, ["target_hidden_size=128", "hidden_size=64"]),
        ({"target_layer_ids": [0, 0]}, ["target_layer_ids", "twice"]),
        ({"target_layer_ids": [-2]}, ["target_layer_ids", "-1"]),
        ({"target_layer_ids": []}, ["target_layer_ids is empty"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers=2"]),
        ({"block_size": 0}, ["num_speculative_tokens=0"]),
        ({"block_size": "7"}, ["block_size='7'", "integer"]),
        ({"enable_confidence_head": 1}, ["enable_confidence_head=1", "true or false"]),
        ({"model_type": "gemma4"}, ["model_type='gemma4'", "qwen3"]),
        ({"markov_rank": -1}, ["markov_rank=-1"]),
        ({"draft_vocab_size": 65}, ["draft_vocab_size=65", "vocab_size=64"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_drafter_config(fixtures.drafter_config(**changes))
    for word in words:
        assert word in str(caught.value)


def test_a_dflash_drafter_is_not_taken_for_dspark() -> None:
    raw = fixtures.drafter_config(architectures=["DFlashDraftModel"], dflash_config={"mask_token_id": 3})
    del raw["markov_rank"]
    with pytest.raises(CheckpointError, match="DFlash drafter"):
        read_drafter_config(raw)


def test_proposal_methods_may_ask_for_fewer_tokens_but_not_for_more() -> None:
    for tokens, accepted in ((3, True), (7, True), (8, False)):
        raw = _speculators_config(speculators_config={"proposal_methods": [{"speculative_tokens": tokens}]})
        if accepted:
            assert read_drafter_config(raw).num_speculative_tokens == 7
        else:
            with pytest.raises(CheckpointError, match="speculative_tokens=8"):
                read_drafter_config(raw)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e5, original_max_position_embeddings=1024),
        RopeConfig(theta=1e4, rope_type="linear", factor=4.0, original_max_position_embeddings=1024),
        RopeConfig(theta=1e4, rope_type="dynamic", factor=2.0, original_max_position_embeddings=1024),
        RopeConfig(
            theta=5e5,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
        RopeConfig(
            theta=1e6,
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=256,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.1,
            truncate=False,
        ),
    ],
    ids=lambda rope: rope.rope_type,
)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_layer_shapes_survive_every_format(rope: RopeConfig, fmt: DrafterFormat, qk_norm: bool) -> None:
    config = read_drafter_config(fixtures.drafter_config())
    architecture = "Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"
    decoder = replace(
        config.decoder, rope=rope, qk_norm=qk_norm, architecture=architecture, attention_bias=True,
        attention_output_bias=True, bos_token_id=1, eos_token_ids=(2, 3), rms_norm_eps=1e-5,
    )  # fmt: skip
    config = replace(config, decoder=decoder, source_format=fmt)
    assert read_drafter_config(drafter_config_to_json(config, fmt, dtype="float32")) == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {*fixtures.drafter_config(), "dflash_config", "speculators_model_type", "rope_scaling", "rope_parameters",
     "draft_vocab_size", "sample_from_anchor", "quantization_config", "transformer_layer_config"}
)  # fmt: skip


@settings(max_examples=150)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=2))
def test_arbitrary_damage_is_either_read_or_a_clear_error(changes: dict[str, Any]) -> None:
    _read_or_refuse(fixtures.drafter_config() | changes)


@settings(max_examples=40)
@given(key=st.sampled_from([*_speculators_config(), "speculators_config", "markov_rank"]), value=JSON)
def test_arbitrary_damage_to_speculators_configs(key: str, value: Any) -> None:
    _read_or_refuse(_speculators_config() | {key: value})


def _read_or_refuse(raw: dict[str, Any]) -> None:
    with suppress(CheckpointError):
        assert isinstance(read_drafter_config(raw), DrafterConfig)


def test_a_complete_config_needs_no_defaults_of_transformers() -> None:
    """The bundled drafter's says all that is read, so a start does without transformers; the result is equal."""
    directory = Path(drafter_checkpoint_config.__file__).parents[1] / "drafters" / "smollm2-135m"
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    shape = raw["transformer_layer_config"]
    filled = drafter_checkpoint_config._with_class_defaults(shape)
    assert read_drafter_config(raw) == read_drafter_config({**raw, "transformer_layer_config": filled})
    read = f"from outrider.models.drafter_checkpoint_config import read_drafter_config as r; r({str(directory)!r})"
    code = f"import sys; {read}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
