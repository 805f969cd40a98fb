"""One rank's part of a model and what it computes: shared by tests on simulated and on real ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.paged import PagedSequences
from torch import Tensor

from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.decoder import Decoder
from outrider.models.model_config import from_hf
from outrider.models.registry import build_model
from outrider.models.weights import load_weights
from outrider.parallel.state import SINGLE_RANK, ParallelState

VOCAB = 48
TAPS = (-1, 0, 1)
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@dataclass(frozen=True, slots=True)
class Passes:
    """Of a prefill of two prompts and two decode steps of ragged width."""

    logits_KV: Tensor
    taps_NF: Tensor


def make_tensors(changes: Mapping[str, Any]) -> dict[str, Tensor]:
    """A random checkpoint of full tensors, norms and biases too."""
    views = checkpoint_views(new_model(SINGLE_RANK, changes))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, view in views.items():
        tensor = torch.randn(view.shape, generator=generator)
        scale = 0.3 if len(view.shape) == 1 or "embed" in name else view.shape[-1] ** -0.5
        tensors[f"model.{name}"] = tensor * scale + (1.0 if "norm" in name else 0.0)
    return tensors


def new_model(parallel: ParallelState, changes: Mapping[str, Any]) -> Decoder:
    config = from_hf({**SHAPE, **changes})
    parallel.topology.check_target(config)
    return build_model(
        config, parallel=parallel, backend=ReferenceAttention(), dtype=torch.float32, device="cpu"
    ).requires_grad_(False)


def load_part(parallel: ParallelState, changes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Decoder:
    model = new_model(parallel, changes)
    load_weights(model, tensors.items(), source="test", on_tensor=lambda: None)
    return model


def run_passes(parallel: ParallelState, changes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Passes:
    model = load_part(parallel, changes, tensors)
    sequences = PagedSequences(model, requests=2, max_len=24, tp_size=parallel.topology.tensor_parallel_size)
    logits, taps = [], []
    for new_tokens in (
        {0: list(range(1, 8)), 1: list(range(20, 33))},
        {0: [5], 1: [6, 7, 8]},
        {1: [9, 40], 0: [41, 2, 3]},
    ):
        result = sequences.run(new_tokens, taps=TAPS)
        logits += result.logits
        taps.append(result.output.taps_NF)
    return Passes(torch.cat(logits), torch.cat(taps))
