"""One memory budget for all keys and values: the target's layers and the drafter's, which share slots.

A slot holds one token of every layer of both models, so the cost of a token is the sum of the two and nothing of the
drafter lives outside the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from outrider.config import DTypeName, ModelConfig
from outrider.errors import ConfigError
from outrider.layers.attention.interface import LayerKV
from outrider.models.weights import TORCH_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Bytes a token takes in the pool, and how many blocks the budget holds."""

    target_bytes_per_token: int
    drafter_bytes_per_token: int
    kv_block_size: int
    num_blocks: int

    @property
    def bytes_per_token(self) -> int:
        return self.target_bytes_per_token + self.drafter_bytes_per_token

    @property
    def total_bytes(self) -> int:
        return self.bytes_per_token * self.kv_block_size * self.num_blocks

    def describe(self) -> str:
        return (
            f"KV cache: {self.num_blocks} blocks of {self.kv_block_size} tokens, "
            f"{self.total_bytes / 2**20:.0f} MiB; bytes per token: target {self.target_bytes_per_token}, "
            f"drafter {self.drafter_bytes_per_token}"
        )


def kv_bytes_per_token(config: ModelConfig, dtype: DTypeName) -> int:
    """Keys and values of all layers of one model, for one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * TORCH_DTYPES[dtype].itemsize


def plan_kv_memory(
    *, budget_bytes: int, kv_block_size: int, target_bytes_per_token: int, drafter_bytes_per_token: int
) -> KVLayout:
    """How many blocks fit the budget; at least one, or the budget is refused."""
    block_bytes = (target_bytes_per_token + drafter_bytes_per_token) * kv_block_size
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget_bytes} is below one block of kv_block_size={kv_block_size} tokens, "
            f"which takes {block_bytes} bytes (target {target_bytes_per_token} and drafter {drafter_bytes_per_token} "
            "a token)"
        )
    return KVLayout(
        target_bytes_per_token=target_bytes_per_token,
        drafter_bytes_per_token=drafter_bytes_per_token,
        kv_block_size=kv_block_size,
        num_blocks=num_blocks,
    )


def allocate_kv(config: ModelConfig, layout: KVLayout, *, dtype: DTypeName, device: torch.device) -> list[LayerKV]:
    """Zeroed pools, one pair of buffers a layer: [S, Hkv, D]. On a CPU a page takes memory once a token lies in it."""
    shape = (layout.num_blocks * layout.kv_block_size, config.num_kv_heads, config.head_dim)
    return [
        LayerKV(
            key_SHD=_zeros(shape, TORCH_DTYPES[dtype], device),
            value_SHD=_zeros(shape, TORCH_DTYPES[dtype], device),
        )
        for _ in range(config.num_layers)
    ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; these come from the kernel, which zeroes them when they are first touched.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
