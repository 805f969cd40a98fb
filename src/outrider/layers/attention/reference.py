"""Paged attention in plain torch, on any device: the reference other back ends are tested against.

A request's rows are cut into pieces, pieces of like padded size are grouped, and each group is one batched attention
call, so there is no loop over rows. How a request is cut and padded is a function of that request alone, never of the
others in the pass; padding is masked out. Grouped-query attention folds the query heads that share a key head into the
query rows, so keys and values are gathered once and never repeated.

Shape legend: N rows, R pieces of a group, L padded query rows per piece, S padded context positions, T = S plus block
rows, Hq/Hkv query/key heads, G = Hq / Hkv, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.layers.attention.interface import BlockMetadata, CausalMetadata, LayerKV
from outrider.layers.attention.masked import masked_attention

_PIECE_ROWS = 128  # a long prefill is cut so that early rows do not pay for positions only late ones see
_GROUP_POSITIONS = 8192  # keys gathered per call: bounds the copies that a large batch needs at once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive rows of one request, with as much context as the last of them sees."""

    request: int
    first_row: int
    rows: int
    length: int  # positions visible to the last row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Pieces that share padded sizes, with everything that does not change from layer to layer."""

    rows_RL: Tensor  # int64: query rows, padded by repeating the piece's last row
    slots_RS: Tensor  # int64: context slots, padded by repeating the piece's last slot
    mask_R1LT: Tensor  # bool: True where a query row may look
    out_rows_X: Tensor  # int64 [X]: rows to write, padding left out
    out_index_X: Tensor  # int64 [X]: where they lie in the flattened [R * L]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The groups of one pass, shared by its layers, with the values they were made from.

    Values are compared, not objects: a captured runner refreshes its static metadata in place.
    """

    key: tuple[object, ...]
    block_tables_RB: Tensor
    groups: list[_Group]

    def is_for(self, key: tuple[object, ...], block_tables_RB: Tensor) -> bool:
        return self.key == key and torch.equal(self.block_tables_RB, block_tables_RB)


class ReferenceAttention:
    """``AttentionBackend`` in torch; see the module docstring."""

    def __init__(self) -> None:
        self._plan = _Plan((), torch.empty(0, 0), [])

    def write_kv(self, kv: LayerKV, *, key_NHD: Tensor, value_NHD: Tensor, slot_mapping_N: Tensor) -> None:
        real_N = slot_mapping_N >= 0
        if not bool(real_N.all()):
            slot_mapping_N, key_NHD, value_NHD = slot_mapping_N[real_N], key_NHD[real_N], value_NHD[real_N]
        kv.key_SHD.index_copy_(0, slot_mapping_N, key_NHD)
        kv.value_SHD.index_copy_(0, slot_mapping_N, value_NHD)

    def causal(self, query_NHD: Tensor, kv: LayerKV, metadata: CausalMetadata, *, scale: float) -> Tensor:
        out_NHD = torch.zeros_like(query_NHD)
        for group in self._causal_groups(metadata):
            key_RSHD, value_RSHD = _gather(kv.key_SHD, group.slots_RS), _gather(kv.value_SHD, group.slots_RS)
            _attend(query_NHD, key_RSHD, value_RSHD, group, scale=scale, out_NHD=out_NHD)
        return out_NHD

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
        out_NHD = torch.zeros_like(query_NHD)
        for group in self._block_groups(metadata):
            key_RTHD = torch.cat((_gather(kv.key_SHD, group.slots_RS), _gather(key_NHD, group.rows_RL)), dim=1)
            value_RTHD = torch.cat((_gather(kv.value_SHD, group.slots_RS), _gather(value_NHD, group.rows_RL)), dim=1)
            _attend(query_NHD, key_RTHD, value_RTHD, group, scale=scale, out_NHD=out_NHD)
        return out_NHD

    def _causal_groups(self, metadata: CausalMetadata) -> list[_Group]:
        starts, lengths = metadata.query_start_loc_R1.tolist(), metadata.seq_lens_R.tolist()
        kv_block_size = metadata.kv_block_size
        tables_RB = _reached(metadata.block_tables_RB, lengths, kv_block_size)
        key = ("causal", starts, lengths, kv_block_size)
        if not self._plan.is_for(key, tables_RB):
            self._plan = _Plan(key, tables_RB.clone(), _plan_causal(starts, lengths, tables_RB, kv_block_size))
        return self._plan.groups

    def _block_groups(self, metadata: BlockMetadata) -> list[_Group]:
        contexts, width = metadata.context_lens_R.tolist(), metadata.block_width
        kv_block_size = metadata.kv_block_size
        tables_RB = _reached(metadata.block_tables_RB, contexts, kv_block_size)
        key = ("block", contexts, width, kv_block_size)
        if not self._plan.is_for(key, tables_RB):
            groups = _plan_block(contexts, tables_RB, kv_block_size=kv_block_size, width=width)
            self._plan = _Plan(key, tables_RB.clone(), groups)
        return self._plan.groups


def _reached(block_tables_RB: Tensor, lengths: list[int], kv_block_size: int) -> Tensor:
    """The columns that any length reaches: static tables are as wide as the context limit, and are compared."""
    return block_tables_RB[:, : -(-max(lengths, default=0) // kv_block_size)]


def _gather(rows_XHD: Tensor, index_RS: Tensor) -> Tensor:
    """``rows_XHD[index_RS]`` by whole rows, which on a CPU is twice as fast: [R, S, H, D]."""
    return rows_XHD.index_select(0, index_RS.flatten()).view(*index_RS.shape, *rows_XHD.shape[1:])


def _attend(
    query_NHD: Tensor, key_RTHD: Tensor, value_RTHD: Tensor, group: _Group, *, scale: float, out_NHD: Tensor
) -> None:
    """One group's attention, written to its rows of ``out_NHD``."""
    requests, rows = group.rows_RL.shape
    heads, kv_heads, head_dim = query_NHD.shape[1], key_RTHD.shape[2], query_NHD.shape[2]
    share = heads // kv_heads
    query = _gather(query_NHD, group.rows_RL).view(requests, rows, kv_heads, share, head_dim)
    query = query.permute(0, 2, 3, 1, 4).reshape(requests, kv_heads, share * rows, head_dim)  # [R, Hkv, G * L, D]
    mask = group.mask_R1LT.expand(-1, share, -1, -1).reshape(requests, 1, share * rows, -1)  # [R, 1, G * L, T]
    attention = masked_attention(query, key_RTHD.transpose(1, 2), value_RTHD.transpose(1, 2), mask, scale=scale)
    attention = attention.view(requests, kv_heads, share, rows, head_dim).permute(0, 3, 1, 2, 4)
    out_NHD[group.out_rows_X] = attention.reshape(requests * rows, heads, head_dim)[group.out_index_X]


def _plan_causal(starts: list[int], lengths: list[int], block_tables_RB: Tensor, kv_block_size: int) -> list[_Group]:
    pieces: list[_Piece] = []
    for request, length in enumerate(lengths):
        rows = starts[request + 1] - starts[request]
        assert rows <= length or not rows, f"request {request}: {rows} query rows but only {length} positions"
        for offset in range(0, rows, _PIECE_ROWS):
            size = min(_PIECE_ROWS, rows - offset)
            seen = length - rows + offset + size
            pieces.append(_Piece(request=request, first_row=starts[request] + offset, rows=size, length=seen))
    device = block_tables_RB.device
    groups = []
    for padded_rows, padded_length, members in _grouped(pieces):
        first_R1, rows_R1, length_R1 = _columns(members, device)
        row_L = torch.arange(padded_rows, device=device)
        row_RL = torch.minimum(row_L, rows_R1 - 1)
        last_seen_RL1 = (length_R1 - rows_R1 + row_RL)[:, :, None]
        groups.append(
            _make_group(
                rows_RL=first_R1 + row_RL,
                real_RL=row_L < rows_R1,
                slots_RS=_context_slots(block_tables_RB, members, padded_length, kv_block_size),
                mask_RLT=torch.arange(padded_length, device=device) <= last_seen_RL1,
            )
        )
    return groups


def _plan_block(contexts: list[int], block_tables_RB: Tensor, *, kv_block_size: int, width: int) -> list[_Group]:
    pieces = [
        _Piece(request=request, first_row=request * width, rows=width, length=context)
        for request, context in enumerate(contexts)
    ]
    device = block_tables_RB.device
    groups = []
    for _, padded_context, members in _grouped(pieces):
        first_R1, _, context_R1 = _columns(members, device)
        rows_RL = first_R1 + torch.arange(width, device=device)
        own_RL = torch.ones_like(rows_RL, dtype=torch.bool)
        mask_RT = torch.cat((torch.arange(padded_context, device=device) < context_R1, own_RL), dim=1)
        groups.append(
            _make_group(
                rows_RL=rows_RL,
                real_RL=own_RL,
                slots_RS=_context_slots(block_tables_RB, members, padded_context, kv_block_size),
                mask_RLT=mask_RT[:, None, :].expand(-1, width, -1),
            )
        )
    return groups


def _grouped(pieces: list[_Piece]) -> Iterator[tuple[int, int, list[_Piece]]]:
    """Padded rows, padded length and the pieces that share them, as many as a call should take."""
    by_size: dict[tuple[int, int], list[_Piece]] = {}
    for piece in pieces:
        by_size.setdefault((_query_bucket(piece.rows), _context_bucket(piece.length)), []).append(piece)
    for (padded_rows, padded_length), members in by_size.items():
        count = max(1, _GROUP_POSITIONS // max(1, padded_length))
        for start in range(0, len(members), count):
            yield padded_rows, padded_length, members[start : start + count]


def _columns(pieces: list[_Piece], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First row, rows and length of the pieces, each int64 [R, 1]."""
    table_R3 = torch.tensor([(piece.first_row, piece.rows, piece.length) for piece in pieces], device=device)
    return table_R3[:, :1], table_R3[:, 1:2], table_R3[:, 2:]


def _make_group(*, rows_RL: Tensor, real_RL: Tensor, slots_RS: Tensor, mask_RLT: Tensor) -> _Group:
    out_index_X = real_RL.flatten().nonzero().squeeze(-1)
    return _Group(
        rows_RL=rows_RL,
        slots_RS=slots_RS,
        mask_R1LT=mask_RLT[:, None],
        out_rows_X=rows_RL.flatten()[out_index_X],
        out_index_X=out_index_X,
    )


def _context_slots(block_tables_RB: Tensor, pieces: list[_Piece], padded_length: int, kv_block_size: int) -> Tensor:
    """Slots of positions 0..padded_length-1, padded by repeating the last one: [R, S].

    Repeating the request's own last position keeps other requests' contents, finite or not, out of the arithmetic.
    """
    device = block_tables_RB.device
    _, _, length_R1 = _columns(pieces, device)
    tables_RB = block_tables_RB[[piece.request for piece in pieces]].to(torch.int64)
    position_RS = torch.minimum(torch.arange(padded_length, device=device), length_R1 - 1)
    return tables_RB.gather(1, position_RS // kv_block_size) * kv_block_size + position_RS % kv_block_size


def _query_bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


def _context_bucket(length: int) -> int:
    """0, or the next of 16, 24, 32, 48, 64, 96, 128, ...: at most half of a bucket's positions more than asked for."""
    if length == 0:
        return 0
    power = max(16, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power
