"""Frequencies of every rope type against transformers' own, and the dynamic type's independence of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.config import RopeConfig
from outrider.layers.rotary import RotaryEmbedding, RotaryPhase, apply_rotary
from outrider.models.model_config import from_hf

MAX_POSITIONS = 64
ROPE_SETTINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.25,
    },
]


def both(settings: dict[str, Any]) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    hf_config = LlamaConfig(
        hidden_size=96, num_attention_heads=4, max_position_embeddings=MAX_POSITIONS, rope_parameters=settings
    )
    config = from_hf(hf_config)
    ours = RotaryEmbedding(config.rope, head_dim=config.head_dim, max_position_embeddings=MAX_POSITIONS)
    return ours, LlamaRotaryEmbedding(hf_config)


@pytest.mark.parametrize("settings", ROPE_SETTINGS, ids=lambda s: s["rope_type"])
def test_phases_equal_transformers(settings: dict[str, Any]) -> None:
    ours, theirs = both(settings)
    positions = torch.arange(MAX_POSITIONS)
    phase = ours(positions)
    cos, sin = theirs(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    torch.testing.assert_close(phase.cos_NE, cos[0, :, :half], rtol=0, atol=1e-5)
    torch.testing.assert_close(phase.sin_NE, sin[0, :, :half], rtol=0, atol=1e-5)


def test_dynamic_beyond_the_limit_is_transformers_token_by_token() -> None:
    ours, theirs = both({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    positions = torch.arange(MAX_POSITIONS + 20)
    phase = ours(positions)
    for position in (MAX_POSITIONS - 1, MAX_POSITIONS, MAX_POSITIONS + 7, MAX_POSITIONS + 19):
        cos, _ = theirs(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(phase.cos_NE[position], cos[0, 0, : cos.shape[-1] // 2], rtol=0, atol=1e-4)


def test_a_phase_depends_on_its_own_position_alone() -> None:
    ours, _ = both({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    alone, together = ours(torch.tensor([70])), ours(torch.tensor([3, 70, 500]))
    assert torch.equal(alone.cos_NE[0], together.cos_NE[1])


def test_rotation_pairs_the_halves() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quarter_turn = RotaryPhase(torch.zeros(1, 2), torch.ones(1, 2))
    assert torch.equal(apply_rotary(x, quarter_turn), torch.tensor([[[-3.0, -4.0, 1.0, 2.0]]]))
    assert apply_rotary(x.bfloat16(), quarter_turn).dtype == torch.bfloat16


def test_yarn_ramp_of_no_width() -> None:
    rope = RopeConfig(
        theta=10000.0, rope_type="yarn", factor=2.0, original_max_position_embeddings=4, beta_fast=2.0, beta_slow=1.0
    )
    embedding = RotaryEmbedding(rope, head_dim=8, max_position_embeddings=8)
    assert bool(embedding(torch.arange(8)).cos_NE.isfinite().all())
