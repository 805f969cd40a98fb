"""The decoder against transformers: logits and taps, in one go, in chunks and token by token in ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.layers.test_rotary import ROPE_SETTINGS
from tests.paged import PagedSequences
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from outrider.layers.attention.reference import ReferenceAttention
from outrider.models.decoder import Decoder
from outrider.models.model_config import from_hf
from outrider.models.registry import build_model
from outrider.models.weights import load_weights
from outrider.models.weights_safetensors import iterate_safetensors
from outrider.parallel.state import SINGLE_RANK

VOCAB = 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
QWEN3_MOE: dict[str, Any] = {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 12}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mha": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 6, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-biases": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True, "attention_bias": True}),
    **{f"mixtral-top-{k}": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": k}) for k in (1, 2, 4)},
    **{
        f"qwen3-moe-top-{k}{'-normalised' if norm else ''}": (
            "qwen3_moe",
            {**QWEN3_MOE, "num_experts_per_tok": k, "norm_topk_prob": norm},
        )
        for k in (1, 2, 4)
        for norm in (True, False)
    },
    "qwen3-moe-every-second-layer": ("qwen3_moe", {**QWEN3_MOE, "num_experts_per_tok": 2, "decoder_sparse_step": 2}),
    "qwen3-moe-dense-layers": ("qwen3_moe", {**QWEN3_MOE, "num_experts_per_tok": 2, "mlp_only_layers": [0, 2]}),
    **{f"llama-rope-{i}-{r['rope_type']}": ("llama", {"rope_parameters": r}) for i, r in enumerate(ROPE_SETTINGS)},
}


def oracle(kind: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A random transformers model; norms and biases too, which its own initialisation leaves at one and zero."""
    torch.manual_seed(7)
    config_class, model_class = CLASSES[kind]
    model: PreTrainedModel = model_class(config_class(**{**SHAPE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name:
                parameter.add_(1.0)
    return model.eval()


def ours(theirs: PreTrainedModel, directory: Path) -> Decoder:
    """The same weights, through a checkpoint on disk."""
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")
    config = from_hf(theirs.config)
    model = build_model(config, parallel=SINGLE_RANK, backend=ReferenceAttention(), dtype=torch.float32, device="cpu")
    load_weights(model, iterate_safetensors(directory), source="test", on_tensor=lambda: None)
    return model


def expected(theirs: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [T, V] and hidden states, each [T, D]."""
    with torch.inference_mode():
        out = theirs(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], tuple(hidden[0] for hidden in out.hidden_states)


def prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_equal_transformers(variant: str, tmp_path: Path) -> None:
    theirs = oracle(*VARIANTS[variant])
    model = ours(theirs, tmp_path)
    tokens = prompt(21, seed=1)
    logits, hidden = expected(theirs, tokens)

    whole = PagedSequences(model, requests=1, max_len=24).run({0: tokens}, taps=(-1, 0, 1))
    torch.testing.assert_close(whole.logits[0], logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(whole.output.taps_NF, torch.cat(hidden[:3], dim=-1), rtol=0, atol=1e-4)

    chunked = PagedSequences(model, requests=1, max_len=24)
    parts = [chunked.run({0: tokens[a:b]}).logits[0] for a, b in ((0, 5), (5, 6), (6, 18), (18, 21))]
    torch.testing.assert_close(torch.cat(parts), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "mixtral-top-2", "qwen3-moe-top-4"])
def test_ragged_batches_through_the_pool(variant: str, tmp_path: Path) -> None:
    """Prefill, decode and verify rows of several requests share passes; every request equals its solo run."""
    theirs = oracle(*VARIANTS[variant])
    model = ours(theirs, tmp_path)
    prompts = [prompt(24, seed) for seed in range(4)]
    want = [expected(theirs, tokens)[0] for tokens in prompts]
    got: list[list[Tensor]] = [[], [], [], []]
    sequences = PagedSequences(model, requests=4, max_len=24)
    schedule = [{0: 7, 2: 1}, {2: 4, 0: 1, 1: 17}, {3: 24, 1: 1, 0: 1, 2: 1}, {0: 5, 1: 6, 2: 3}]
    for widths in schedule:
        pieces = {r: prompts[r][sequences.lengths[r] : sequences.lengths[r] + n] for r, n in widths.items()}
        result = sequences.run(pieces, padding_rows=3)
        for request, logits in zip(widths, result.logits, strict=True):
            got[request].append(logits)
    for request in range(4):
        together = torch.cat(got[request])
        torch.testing.assert_close(together, want[request][: len(together)], rtol=0, atol=1e-4)


def test_an_idle_rank_runs_the_same_pass(tmp_path: Path) -> None:
    model = ours(oracle("llama", {}), tmp_path)
    for padding_rows in (0, 2):
        result = PagedSequences(model, requests=1, max_len=4).run({}, taps=(0,), padding_rows=padding_rows)
        assert result.logits == []
        assert result.output.hidden_ND.shape == (padding_rows, SHAPE["hidden_size"])
        assert result.output.taps_NF.shape == (padding_rows, SHAPE["hidden_size"])


def test_taps_are_the_raw_residual_even_of_the_last_layer(tmp_path: Path) -> None:
    model = ours(oracle("llama", {}), tmp_path)
    output = PagedSequences(model, requests=1, max_len=8).run({0: prompt(8, seed=2)}, taps=(2,)).output
    torch.testing.assert_close(model.norm(output.taps_NF), output.hidden_ND)


def test_no_taps_and_their_order(tmp_path: Path) -> None:
    model = ours(oracle("llama", {}), tmp_path)
    tokens, width = prompt(5, seed=3), SHAPE["hidden_size"]
    none = PagedSequences(model, requests=1, max_len=8).run({0: tokens}).output
    assert none.taps_NF.shape == (5, 0)
    up = PagedSequences(model, requests=1, max_len=8).run({0: tokens}, taps=(0, 2)).output.taps_NF
    down = PagedSequences(model, requests=1, max_len=8).run({0: tokens}, taps=(2, 0)).output.taps_NF
    assert torch.equal(up, torch.cat((down[:, width:], down[:, :width]), dim=-1))


def test_bf16_stays_close_and_gives_fp32_logits(tmp_path: Path) -> None:
    theirs = oracle("qwen3", {})
    reference = ours(theirs, tmp_path)
    model = build_model(
        reference.config, parallel=SINGLE_RANK, backend=ReferenceAttention(), dtype=torch.bfloat16, device="cpu"
    )
    load_weights(model, iterate_safetensors(tmp_path), source="test", on_tensor=lambda: None)
    tokens = prompt(12, seed=4)
    sequences = PagedSequences(model, requests=1, max_len=12)
    sequences.pool = [type(kv)(kv.key_SHD.bfloat16(), kv.value_SHD.bfloat16()) for kv in sequences.pool]
    logits = sequences.run({0: tokens}).logits[0]
    want, _ = expected(theirs, tokens)
    assert logits.dtype == torch.float32
    assert float((logits - want).abs().mean() / want.abs().mean()) < 0.05
