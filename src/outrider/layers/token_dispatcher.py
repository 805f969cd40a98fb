"""Rows to the experts and their results back, over the ranks that experts are spread on.

A dispatcher gets a rank's rows with their routing and a function that computes the part of the expert sum that this
rank holds; it returns the whole sum for its own rows. Two transports:

* ``AllGatherDispatcher``: every rank sees all rows and adds its share. Shapes follow from the plan alone (the largest
  ``padded_tokens``), so that a pass can be captured. Rows move to ranks that do not need them.
* ``AllToAllDispatcher``: a row goes to the ranks that own its experts, once to each. Shapes follow from the routing, so
  it needs counts on the host and never runs in a captured pass. Whole experts only.

Contract of both: all ranks of the world call them in the same order with the same ``padded_tokens``, idle ones with
zero rows; ranks of one attention-TP group bring the same rows and get the same bits. An expert id of -1 goes nowhere
and is never used as an index; such a row's result is zero. Which row is beside which, and what stands in rows that are
masked, changes no other row. With a world of one there is no collective. The worst fault would be a collective that
one rank leaves out because it has no rows: nothing here asks how many rows there are before a collective.

Shape legend: N own rows, M rows computed on, D hidden size, k experts per token, C rows of one attention-TP rank's
part, S rows sent, T rows received, W ranks of the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import MoEConfig
from outrider.layers.checkpoint import slice_for_rank
from outrider.parallel.state import ParallelState


@dataclass(frozen=True, slots=True)
class Routing:
    """Where rows go: global expert ids, or ids within this rank's experts once they are sent."""

    expert_ids_Nk: Tensor  # int32; -1: nowhere
    weights_Nk: Tensor  # fp32

    def packed(self) -> Tensor:
        """int32 [N, 2k], so that one collective carries both."""
        return torch.cat((self.expert_ids_Nk, self.weights_Nk.view(torch.int32)), dim=1)

    @classmethod
    def unpacked(cls, packed_NX: Tensor) -> Routing:
        ids_Nk, weights_Nk = packed_NX.chunk(2, dim=1)
        return cls(ids_Nk, weights_Nk.contiguous().view(torch.float32))


# This rank's part of the expert sum: rows [M, D] and their routing over local ids -> [M, D].
ExpertShare = Callable[[Tensor, Routing], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """What a rank holds: whole experts with expert parallelism, else a slice of each along the intermediate size."""

    num_experts: int
    first_expert: int
    num_local_experts: int
    intermediate_start: int
    intermediate_stop: int

    @classmethod
    def of(cls, moe: MoEConfig, parallel: ParallelState) -> ExpertPlacement:
        held, columns = slice(0, moe.num_experts), slice(0, moe.moe_intermediate_size)
        if parallel.topology.enable_expert_parallel:
            held = slice_for_rank("num_experts", moe.num_experts, parallel.world)
        else:
            columns = slice_for_rank("moe_intermediate_size", moe.moe_intermediate_size, parallel.world)
        return cls(
            num_experts=moe.num_experts,
            first_expert=held.start,
            num_local_experts=held.stop - held.start,
            intermediate_start=columns.start,
            intermediate_stop=columns.stop,
        )

    @property
    def intermediate_size(self) -> int:
        """Columns of each expert held here."""
        return self.intermediate_stop - self.intermediate_start

    def localised(self, routing: Routing) -> Routing:
        """Ids counted from the first expert held here; -1 for what others hold."""
        ids_Nk = routing.expert_ids_Nk - self.first_expert
        held_Nk = (routing.expert_ids_Nk >= self.first_expert) & (ids_Nk < self.num_local_experts)
        return Routing(torch.where(held_Nk, ids_Nk, -1), routing.weights_Nk)


class TokenDispatcher(Protocol):
    def run(self, x_ND: Tensor, routing: Routing, experts: ExpertMetadata, share: ExpertShare) -> Tensor:
        """[N, D]: for every own row the weighted sum over its experts, wherever they are."""
        ...


class AllGatherDispatcher:
    """Transport "allgather_reducescatter": gather rows over DP ranks, compute one's share of all, sum and scatter.

    Every rank brings the largest ``padded_tokens`` of the pass; rows added to reach it go nowhere. The sum over
    attention-TP ranks comes last: it is then over own rows only, and its result has the same bits on all of them.
    """

    def __init__(self, placement: ExpertPlacement, parallel: ParallelState) -> None:
        self._placement = placement
        self._attn_dp, self._attn_tp = parallel.attn_dp, parallel.attn_tp

    def run(self, x_ND: Tensor, routing: Routing, experts: ExpertMetadata, share: ExpertShare) -> Tensor:
        rows = x_ND.shape[0]
        if self._attn_dp.size == 1:
            return self._attn_tp.all_reduce(share(x_ND, self._placement.localised(routing)))
        extent = max(experts.padded_tokens)
        assert rows <= extent, f"{rows} rows exceed the pass's {experts.padded_tokens}"
        fill = extent - rows
        ids = F.pad(routing.expert_ids_Nk, (0, 0, 0, fill), value=-1)
        weights = F.pad(routing.weights_Nk, (0, 0, 0, fill))
        x_MD = self._attn_dp.all_gather(F.pad(x_ND, (0, 0, 0, fill)))
        everyone = Routing.unpacked(self._attn_dp.all_gather(Routing(ids, weights).packed()))
        partial_MD = share(x_MD, self._placement.localised(everyone))
        return self._attn_tp.all_reduce(self._attn_dp.reduce_scatter(partial_MD))[:rows]


class AllToAllDispatcher:
    """Transport "alltoall": each row to the ranks that own its experts, once to each, and the partial sums back.

    The attention-TP ranks of a DP rank hold the same rows: each takes a contiguous part, so that no row is sent twice,
    and the parts' results are gathered among them.
    """

    def __init__(self, placement: ExpertPlacement, parallel: ParallelState) -> None:
        assert parallel.topology.enable_expert_parallel, "rows are sent to whole experts"
        self._placement = placement
        self._world, self._attn_tp = parallel.world, parallel.attn_tp

    def run(self, x_ND: Tensor, routing: Routing, experts: ExpertMetadata, share: ExpertShare) -> Tensor:
        rows = x_ND.shape[0]
        part = -(-rows // self._attn_tp.size)  # of the last ranks' parts there may be less, or nothing
        start = min(self._attn_tp.rank * part, rows)
        own = slice(start, min(start + part, rows))
        mixed_CD = self._exchange(x_ND[own], Routing(routing.expert_ids_Nk[own], routing.weights_Nk[own]), share)
        gathered = self._attn_tp.all_gather(F.pad(mixed_CD, (0, 0, 0, part - mixed_CD.shape[0])))
        return gathered[:rows]

    def _exchange(self, x_CD: Tensor, routing: Routing, share: ExpertShare) -> Tensor:
        """The whole sum for this rank's part, [C, D]."""
        size, local = self._world.size, self._placement.num_local_experts
        owner_Ck = torch.where(routing.expert_ids_Nk >= 0, routing.expert_ids_Nk // local, -1)
        ranks_W = torch.arange(size, device=x_CD.device, dtype=owner_Ck.dtype)
        wanted_WC = (owner_Ck[None] == ranks_W[:, None, None]).any(dim=2)  # does rank w own an expert of row c?
        receiver_S, row_S = wanted_WC.nonzero(as_tuple=True)  # by receiver, and by row within it
        kept_Sk = owner_Ck[row_S] == receiver_S[:, None]
        local_ids_Sk = torch.where(kept_Sk, routing.expert_ids_Nk[row_S] - (receiver_S * local)[:, None], -1)
        sent = Routing(local_ids_Sk.to(torch.int32), routing.weights_Nk[row_S])

        to_send = wanted_WC.sum(dim=1)
        ones = [1] * size
        send_counts = to_send.tolist()
        receive_counts = self._world.all_to_all(to_send, ones, ones).tolist()
        x_TD = self._world.all_to_all(x_CD[row_S], send_counts, receive_counts)
        received = Routing.unpacked(self._world.all_to_all(sent.packed(), send_counts, receive_counts))
        back_SD = self._world.all_to_all(share(x_TD, received), receive_counts, send_counts)

        # One place for each (row, rank), summed in rank order: the same result in whatever order threads would add.
        places = back_SD.new_zeros(size, *x_CD.shape)
        places[receiver_S, row_S] = back_SD
        return places.sum(dim=0)


def make_dispatchers(placement: ExpertPlacement, parallel: ParallelState) -> tuple[TokenDispatcher, TokenDispatcher]:
    """For captured and for eager passes: the former always gather, the latter as the topology says."""
    gather = AllGatherDispatcher(placement, parallel)
    if parallel.topology.all2all_backend == "alltoall" and parallel.topology.world_size > 1:
        return gather, AllToAllDispatcher(placement, parallel)
    return gather, gather
