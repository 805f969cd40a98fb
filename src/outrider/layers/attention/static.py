"""Paged attention whose shapes come from the metadata's integers alone: what a captured pass on a GPU needs.

The same meaning as the reference. Nothing here reads a tensor on the host or makes a shape of a tensor's contents:
query rows are padded to ``max_query_len`` (``block_width``), contexts to ``max_seq_len`` (``max_context_len``), and
what is padding is masked. So it pays for the longest context that a captured pass may have, where the reference pays
for the real ones; it is for devices that a host read would stall, not for a CPU. Requests are taken a fixed number at
a time, which bounds the keys and values gathered at once.

A masked position is read at the request's own last one and set to zero: what lies in another request's slots, finite
or not, never enters the arithmetic.

Shape legend: N rows, R requests of a call, L padded query rows per request, S padded context positions, T = S plus
block rows, Hq/Hkv query/key heads, G = Hq / Hkv, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.layers.attention.interface import BlockMetadata, CausalMetadata, LayerKV
from outrider.layers.attention.masked import guarded_attention

_CALL_POSITIONS = 1 << 16  # context positions gathered per call
_CALL_SCORES = 1 << 26  # rows times positions of a call: back ends without a fused kernel for the mask keep them all


class StaticAttention:
    """``AttentionBackend`` with static shapes; see the module docstring. It keeps nothing from call to call."""

    def write_kv(self, kv: LayerKV, *, key_NHD: Tensor, value_NHD: Tensor, slot_mapping_N: Tensor) -> None:
        """A padding row writes the first real row once more; without a real row slot 0 is written as it is."""
        if not slot_mapping_N.shape[0]:
            return
        real_N = slot_mapping_N >= 0
        row_N = torch.arange(real_N.shape[0], device=real_N.device)
        row_N = torch.where(real_N, row_N, real_N.int().argmax(dim=0, keepdim=True))
        slot_N = slot_mapping_N.index_select(0, row_N).clamp(min=0)
        any_real = real_N.any()
        for pool_SHD, new_NHD in ((kv.key_SHD, key_NHD), (kv.value_SHD, value_NHD)):
            stored_NHD = torch.where(any_real, new_NHD.index_select(0, row_N), pool_SHD[:1])
            pool_SHD.index_copy_(0, slot_N, stored_NHD)

    def causal(self, query_NHD: Tensor, kv: LayerKV, metadata: CausalMetadata, *, scale: float) -> Tensor:
        width, positions = metadata.max_query_len, metadata.max_seq_len
        if not (width and metadata.seq_lens_R.shape[0] and query_NHD.shape[0]):
            return torch.zeros_like(query_NHD)
        start_R, length_R = metadata.query_start_loc_R1[:-1].long(), metadata.seq_lens_R.long()
        rows_R = metadata.query_start_loc_R1[1:].long() - start_R
        row_L = torch.arange(width, device=query_NHD.device)
        # Rows beyond a request's own repeat its last one, whose result is dropped; a request without rows reads any.
        row_RL = torch.minimum(row_L, rows_R[:, None] - 1).clamp(min=0)
        query_RLHD = _gather(query_NHD, (start_R[:, None] + row_RL).clamp(max=query_NHD.shape[0] - 1))
        last_seen_RL = (length_R - rows_R)[:, None] + row_RL
        out = []
        for part in _calls(length_R.shape[0], rows=width, positions=positions):
            key, value, known_RS = _context(
                kv, metadata.block_tables_RB[part], length_R[part], positions, metadata.kv_block_size
            )
            position_S = torch.arange(positions, device=known_RS.device)
            visible_RLS = known_RS[:, None] & (position_S <= last_seen_RL[part, :, None])
            out.append(_attend(query_RLHD[part], key, value, visible_RLS, scale=scale))
        return _unpadded(torch.cat(out), metadata.query_start_loc_R1, num_rows=query_NHD.shape[0])

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
        width, positions = metadata.block_width, metadata.max_context_len
        if not query_NHD.shape[0]:
            return torch.zeros_like(query_NHD)
        query_RLHD, own_key, own_value = (x.view(-1, width, *x.shape[1:]) for x in (query_NHD, key_NHD, value_NHD))
        length_R = metadata.context_lens_R.long()
        out = []
        for part in _calls(length_R.shape[0], rows=width, positions=positions + width):
            key, value, known_RS = _context(
                kv, metadata.block_tables_RB[part], length_R[part], positions, metadata.kv_block_size
            )
            visible_RT = F.pad(known_RS, (0, width), value=True)
            out.append(
                _attend(
                    query_RLHD[part],
                    torch.cat((key, own_key[part]), dim=1),
                    torch.cat((value, own_value[part]), dim=1),
                    visible_RT[:, None].expand(-1, width, -1),
                    scale=scale,
                )
            )
        return torch.cat(out).flatten(0, 1)


def _calls(requests: int, *, rows: int, positions: int) -> list[slice]:
    """Requests of each call, as many as its bounds allow; a function of shapes alone."""
    size = max(1, min(_CALL_POSITIONS // max(1, positions), _CALL_SCORES // max(1, rows * positions)))
    return [slice(start, start + size) for start in range(0, requests, size)]


def _gather(rows_XHD: Tensor, index_RS: Tensor) -> Tensor:
    """``rows_XHD[index_RS]``: [R, S, H, D]."""
    return rows_XHD.index_select(0, index_RS.flatten()).view(*index_RS.shape, *rows_XHD.shape[1:])


def _context(
    kv: LayerKV, block_tables_RB: Tensor, length_R: Tensor, positions: int, kv_block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [R, S, Hkv, D] of positions 0..S-1, zero where a request has none, and where it has: [R, S]."""
    position_S = torch.arange(positions, device=length_R.device)
    known_RS = position_S < length_R[:, None]
    if not positions:
        nothing = kv.key_SHD.new_empty(length_R.shape[0], 0, *kv.key_SHD.shape[1:])
        return nothing, nothing, known_RS
    position_RS = torch.minimum(position_S, length_R[:, None] - 1).clamp(min=0)
    block_RS = block_tables_RB.long().gather(1, position_RS // kv_block_size)
    slot_RS = block_RS * kv_block_size + position_RS % kv_block_size
    known_RS11 = known_RS[:, :, None, None]
    key, value = (torch.where(known_RS11, _gather(pool, slot_RS), 0.0) for pool in (kv.key_SHD, kv.value_SHD))
    return key, value, known_RS


def _attend(query_RLHD: Tensor, key_RTHD: Tensor, value_RTHD: Tensor, visible_RLT: Tensor, *, scale: float) -> Tensor:
    """[R, L, Hq, D], as the reference folds heads; a row that sees nothing is anything."""
    requests, rows, heads, head_dim = query_RLHD.shape
    kv_heads = key_RTHD.shape[2]
    share = heads // kv_heads
    query = query_RLHD.view(requests, rows, kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    mask = visible_RLT[:, None, None].expand(-1, -1, share, -1, -1).flatten(2, 3)  # [R, 1, G * L, T]
    attention = guarded_attention(
        query.reshape(requests, kv_heads, share * rows, head_dim),
        key_RTHD.transpose(1, 2),
        value_RTHD.transpose(1, 2),
        mask,
        scale=scale,
    )
    attention = attention.view(requests, kv_heads, share, rows, head_dim).permute(0, 3, 1, 2, 4)
    return attention.reshape(requests, rows, heads, head_dim)


def _unpadded(out_RLHD: Tensor, query_start_loc_R1: Tensor, *, num_rows: int) -> Tensor:
    """Each row's result from where its request has it; zero for rows of no request. [N, Hq, D]."""
    requests, width = out_RLHD.shape[:2]
    row_N = torch.arange(num_rows, device=out_RLHD.device)
    start_R1 = query_start_loc_R1.long()
    request_N = torch.searchsorted(start_R1[1:].contiguous(), row_N, right=True)
    owned_N = request_N < requests
    request_N = request_N.clamp(max=requests - 1)
    place_N = request_N * width + row_N - start_R1.index_select(0, request_N)
    rows_NHD = out_RLHD.flatten(0, 1).index_select(0, place_N.clamp(0, requests * width - 1))
    return torch.where(owned_N[:, None, None], rows_NHD, 0.0)
