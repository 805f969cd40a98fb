"""Paged attention in plain torch, on any device: the reference other back ends are tested against.

Requests are grouped by padded size, and each group is one batched attention call, so there is no loop over rows. The
padded size of a request is a function of that request alone (its lengths rounded up to a bucket), never of the others
in the pass; padding is masked out. Grouped-query attention folds the query heads that share a key head into the query
rows, so keys and values are gathered once and never repeated.

Shape legend: N rows, R requests of a group, L padded query rows per request, S padded context positions, T = S plus
block rows, Hq/Hkv query/key heads, G = Hq / Hkv, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.layers.attention.interface import BlockMetadata, CausalMetadata, LayerKV


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Requests that share padded sizes, with everything that does not change from layer to layer."""

    rows_RL: Tensor  # int64: query rows, padded by repeating the request's last row
    slots_RS: Tensor  # int64: context slots, padded with slots that the mask excludes
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
            key_RSHD, value_RSHD = kv.key_SHD[group.slots_RS], kv.value_SHD[group.slots_RS]
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
            key_RTHD = torch.cat((kv.key_SHD[group.slots_RS], key_NHD[group.rows_RL]), dim=1)
            value_RTHD = torch.cat((kv.value_SHD[group.slots_RS], value_NHD[group.rows_RL]), dim=1)
            _attend(query_NHD, key_RTHD, value_RTHD, group, scale=scale, out_NHD=out_NHD)
        return out_NHD

    def _causal_groups(self, metadata: CausalMetadata) -> list[_Group]:
        starts, lengths = metadata.query_start_loc_R1.tolist(), metadata.seq_lens_R.tolist()
        tables_RB, kv_block_size = metadata.block_tables_RB, metadata.kv_block_size
        key = ("causal", starts, lengths, kv_block_size)
        if not self._plan.is_for(key, tables_RB):
            self._plan = _Plan(key, tables_RB.clone(), _plan_causal(starts, lengths, tables_RB, kv_block_size))
        return self._plan.groups

    def _block_groups(self, metadata: BlockMetadata) -> list[_Group]:
        contexts, width = metadata.context_lens_R.tolist(), metadata.block_width
        tables_RB, kv_block_size = metadata.block_tables_RB, metadata.kv_block_size
        key = ("block", contexts, width, kv_block_size)
        if not self._plan.is_for(key, tables_RB):
            groups = _plan_block(contexts, tables_RB, kv_block_size=kv_block_size, width=width)
            self._plan = _Plan(key, tables_RB.clone(), groups)
        return self._plan.groups


def _attend(
    query_NHD: Tensor, key_RTHD: Tensor, value_RTHD: Tensor, group: _Group, *, scale: float, out_NHD: Tensor
) -> None:
    """One group's attention, written to its rows of ``out_NHD``."""
    requests, rows = group.rows_RL.shape
    heads, kv_heads, head_dim = query_NHD.shape[1], key_RTHD.shape[2], query_NHD.shape[2]
    share = heads // kv_heads
    query = query_NHD[group.rows_RL].view(requests, rows, kv_heads, share, head_dim)
    query = query.permute(0, 2, 3, 1, 4).reshape(requests, kv_heads, share * rows, head_dim)  # [R, Hkv, G * L, D]
    mask = group.mask_R1LT.expand(-1, share, -1, -1).reshape(requests, 1, share * rows, -1)  # [R, 1, G * L, T]
    attention = F.scaled_dot_product_attention(
        query, key_RTHD.transpose(1, 2), value_RTHD.transpose(1, 2), attn_mask=mask, scale=scale
    )
    attention = attention.view(requests, kv_heads, share, rows, head_dim).permute(0, 3, 1, 2, 4)
    out_NHD[group.out_rows_X] = attention.reshape(requests * rows, heads, head_dim)[group.out_index_X]


def _plan_causal(starts: list[int], lengths: list[int], block_tables_RB: Tensor, kv_block_size: int) -> list[_Group]:
    members: dict[tuple[int, int], list[int]] = {}
    for request, length in enumerate(lengths):
        rows = starts[request + 1] - starts[request]
        if rows:
            assert rows <= length, f"request {request}: {rows} query rows but only {length} positions"
            members.setdefault((_query_bucket(rows), _context_bucket(length)), []).append(request)
    device = block_tables_RB.device
    groups = []
    for (padded_rows, padded_length), requests in members.items():
        first_R1 = torch.tensor([starts[r] for r in requests], device=device)[:, None]
        rows_R1 = torch.tensor([starts[r + 1] - starts[r] for r in requests], device=device)[:, None]
        length_R1 = torch.tensor([lengths[r] for r in requests], device=device)[:, None]
        row_L = torch.arange(padded_rows, device=device)[None]
        row_RL = torch.minimum(row_L, rows_R1 - 1)
        last_seen_RL1 = (length_R1 - rows_R1 + row_RL)[:, :, None]
        mask_RLS = torch.arange(padded_length, device=device) <= last_seen_RL1
        groups.append(
            _make_group(
                rows_RL=first_R1 + row_RL,
                real_RL=row_L < rows_R1,
                slots_RS=_context_slots(
                    block_tables_RB,
                    requests,
                    length_R1=length_R1,
                    padded_length=padded_length,
                    kv_block_size=kv_block_size,
                ),
                mask_RLT=mask_RLS,
            )
        )
    return groups


def _plan_block(contexts: list[int], block_tables_RB: Tensor, *, kv_block_size: int, width: int) -> list[_Group]:
    members: dict[int, list[int]] = {}
    for request, context in enumerate(contexts):
        members.setdefault(_context_bucket(context) if context else 0, []).append(request)
    device = block_tables_RB.device
    groups = []
    for padded_context, requests in members.items():
        context_R1 = torch.tensor([contexts[r] for r in requests], device=device)[:, None]
        rows_RL = torch.tensor(requests, device=device)[:, None] * width + torch.arange(width, device=device)
        seen_RS = torch.arange(padded_context, device=device) < context_R1
        mask_RT = torch.cat((seen_RS, torch.ones_like(rows_RL, dtype=torch.bool)), dim=1)
        groups.append(
            _make_group(
                rows_RL=rows_RL,
                real_RL=torch.ones_like(rows_RL, dtype=torch.bool),
                slots_RS=_context_slots(
                    block_tables_RB,
                    requests,
                    length_R1=context_R1,
                    padded_length=padded_context,
                    kv_block_size=kv_block_size,
                ),
                mask_RLT=mask_RT[:, None, :].expand(-1, width, -1),
            )
        )
    return groups


def _make_group(*, rows_RL: Tensor, real_RL: Tensor, slots_RS: Tensor, mask_RLT: Tensor) -> _Group:
    out_index_X = real_RL.flatten().nonzero().squeeze(-1)
    return _Group(
        rows_RL=rows_RL,
        slots_RS=slots_RS,
        mask_R1LT=mask_RLT[:, None],
        out_rows_X=rows_RL.flatten()[out_index_X],
        out_index_X=out_index_X,
    )


def _context_slots(
    block_tables_RB: Tensor, requests: list[int], *, length_R1: Tensor, padded_length: int, kv_block_size: int
) -> Tensor:
    """Slots of positions 0..padded_length-1, padded by repeating the last one: [R, S].

    Repeating the request's own last position keeps other requests' contents, finite or not, out of the arithmetic.
    """
    position_RS = torch.minimum(torch.arange(padded_length, device=length_R1.device), length_R1 - 1)
    block_RS = block_tables_RB[requests].to(torch.int64).gather(1, position_RS // kv_block_size)
    return block_RS * kv_block_size + position_RS % kv_block_size


def _query_bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


def _context_bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, 128, ...: at most half of a bucket's positions more than asked for."""
    power = max(16, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power
