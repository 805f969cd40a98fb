"""What an attention back end must do. Three operations, two kinds of metadata, no Optional field.

Shape legend: N rows (tokens) of the pass, R requests, S slots of the pool, B blocks per request (padded),
Hq query heads, Hkv key/value heads, D head dimension.

Slots: a slot is one token's place in the paged pool; slot = block_id * kv_block_size + offset. Target layers and
drafter layers share slot numbers (and so block tables): evicted, shared, preempted and restored together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.batch.attention_metadata import BlockMetadata, CausalMetadata

__all__ = ["AttentionBackend", "BlockMetadata", "CausalMetadata", "LayerKV"]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's paged keys and values (post-norm, post-rotary)."""

    key_SHD: Tensor  # [S, Hkv, D]
    value_SHD: Tensor  # [S, Hkv, D]


class AttentionBackend(Protocol):
    """One implementation per device family. Rows are independent of what else shares the pass."""

    def write_kv(self, kv: LayerKV, *, key_NHD: Tensor, value_NHD: Tensor, slot_mapping_N: Tensor) -> None:
        """Store each row's key and value at its slot; rows with slot -1 are skipped."""
        ...

    def causal(self, query_NHD: Tensor, kv: LayerKV, metadata: CausalMetadata, *, scale: float) -> Tensor:
        """Causal paged attention; returns [N, Hq, D]."""
        ...

    def block(
        self,
        query_NHD: Tensor,
        kv: LayerKV,
        metadata: BlockMetadata,
        *,
        key_NHD: Tensor,
        value_NHD: Tensor,
        scale: float,
    ) -> Tensor:
        """Bidirectional block over paged context; returns [N, Hq, D]."""
        ...
