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


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's paged keys and values (post-norm, post-rotary)."""

    key_SHD: Tensor  # [S, Hkv, D]
    value_SHD: Tensor  # [S, Hkv, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalMetadata:
    """Ragged rows of the target: request r owns rows query_start_loc[r]..query_start_loc[r+1].

    Row j of request r sits at position seq_len[r] - query_len[r] + j and sees every KV position <= its own.
    The rows' own keys and values are in the pool before attention reads them (``write_kv`` first).
    """

    query_start_loc_R1: Tensor  # int32 [R + 1]
    seq_lens_R: Tensor  # int32 [R], KV length including this pass's rows
    block_tables_RB: Tensor  # int32 [R, B]
    slot_mapping_N: Tensor  # int64 [N]; -1 marks a padding row, which is never written
    kv_block_size: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMetadata:
    """The drafter's blocks: each of R requests owns ``block_width`` consecutive rows (N = R * block_width).

    Every row sees all context positions < context_len of its request (from the pool) and all rows of its own block,
    in both directions; nothing else. Block keys and values are passed to the call and never enter the pool.
    """

    context_lens_R: Tensor  # int32 [R]
    block_tables_RB: Tensor  # int32 [R, B]
    kv_block_size: int
    block_width: int
    max_context_len: int


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
