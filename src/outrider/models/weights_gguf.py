"""GGUF checkpoints: metadata, tensor shapes, and a stream of dequantised tensors under HF names.

Files are memory-mapped and one tensor at a time is dequantised to fp32. The llama architecture stores q and k with the
rows of each head interleaved for adjacent-pair rotation; they are put back in half-split order. Anything wrong with the
file is a ``CheckpointError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from outrider.config import ModelConfig
from outrider.errors import CheckpointError

_MAGIC = b"GGUF"
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


class GGUFFile:
    """An opened GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
            if magic != _MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it starts with {magic!r}, not {_MAGIC!r})")
            # The reader builds numpy views of whatever offsets the header holds: a damaged file can fail in any way.
            self._reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: _value(field) for name, field in self._reader.fields.items()}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path}: malformed or truncated GGUF file ({error})") from error
        self.tensor_shapes: dict[str, tuple[int, ...]] = {}  # row-major
        for tensor in self._reader.tensors:
            if tensor.name in self.tensor_shapes:
                raise CheckpointError(f"{path}: tensor {tensor.name!r} appears more than once")
            self.tensor_shapes[tensor.name] = tuple(int(size) for size in reversed(tensor.shape))

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in fp32 with its HF name (without ``model.``); unknown names pass through as they are."""
        for tensor in self._reader.tensors:
            name = hf_name(tensor.name)
            weight = self._dequantised(tensor)
            if config.architecture == "LlamaForCausalLM" and ".self_attn." in name:
                if ".q_proj." in name:
                    weight = half_split_rows(weight, num_heads=config.num_heads)
                elif ".k_proj." in name:
                    weight = half_split_rows(weight, num_heads=config.num_kv_heads)
            yield name, weight

    def _dequantised(self, tensor: ReaderTensor) -> Tensor:
        try:
            array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            return torch.from_numpy(array.copy()).reshape(self.tensor_shapes[tensor.name])
        except (ValueError, NotImplementedError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} of type {tensor.tensor_type.name} cannot be read ({error})"
            ) from error


def hf_name(gguf_name: str) -> str:
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match and match[2] in _LAYER_NAMES:
        return f"layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return gguf_name


def half_split_rows(weight: Tensor, *, num_heads: int) -> Tensor:
    """Rows of each head from pairs (0, D/2, 1, D/2 + 1, ...) back to (0, 1, ..., D - 1)."""
    if weight.shape[0] % (2 * num_heads):
        raise CheckpointError(f"attention tensor with {weight.shape[0]} rows does not divide into {num_heads} heads")
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])  # [heads, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _value(field: Any) -> Any:
    """A field's contents as Python values."""
    if field.types and field.types[0] == GGUFValueType.ARRAY and field.types[-1] == GGUFValueType.STRING:
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]
    return field.contents()
