"""GGUF tensors under the names, and in the layout, of HF checkpoints.

The llama architecture stores the rows of each q and k head interleaved, for a rotation of adjacent pairs; they are put
back in half-split order. The qwen3 architecture stores them half-split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import CheckpointError
from outrider.models.gguf_file import GGUFFile

_GLOBAL_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def iterate_gguf(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in fp32 with its HF name (without ``model.``); a name unknown here passes through as it is."""
    for gguf_name, weight in file.tensors():
        name = hf_name(gguf_name)
        if config.architecture == "LlamaForCausalLM" and ".self_attn.q_proj." in name:
            yield name, half_split_rows(weight, num_heads=config.num_heads)
        elif config.architecture == "LlamaForCausalLM" and ".self_attn.k_proj." in name:
            yield name, half_split_rows(weight, num_heads=config.num_kv_heads)
        else:
            yield name, weight


def hf_name(gguf_name: str) -> str:
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match and match[2] in _LAYER_NAMES:
        return f"layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return gguf_name


def half_split_rows(weight: Tensor, *, num_heads: int) -> Tensor:
    """Rows of each head from the order 0, D/2, 1, D/2 + 1, ... back to 0, 1, ..., D - 1."""
    if weight.shape[0] % (2 * num_heads):
        raise CheckpointError(f"attention tensor with {weight.shape[0]} rows does not divide into {num_heads} heads")
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [heads, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)
