"""Which rows see which slots: the part of a forward batch that attention reads. No Optional field.

Shape legend: N rows (tokens) of the pass, R requests, B blocks per request (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
