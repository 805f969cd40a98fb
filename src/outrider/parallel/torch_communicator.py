"""Collectives of real processes, over a process group of ``torch.distributed``: gloo on CPUs, NCCL on CUDA devices.

Contract: what ``Communicator`` says. On the CPU, data is moved and never added by the transport: ranks gather, or
exchange, and each adds in rank order (``parallel.reduction``). A ring all-reduce gives all ranks the same bits too, but
an element's bits then depend on where in the tensor it lies, so that a request's logits would depend on what else is in
the batch. On CUDA, sums are NCCL's: the same bits on all ranks, in an order that NCCL chooses.

Bytes that leave a rank on the CPU, for x bytes handed in and n ranks: all_gather and all_reduce (n - 1) x,
reduce_scatter (n - 1) / n x, all_to_all the rows for others.

Every tensor travels as bytes, so that all dtypes work wherever one does. Rows of integers travel as CPU tensors, over
gloo, on every device: the agreement of a step never waits for a device.

A group's timeout holds for each of its gloo collectives; with NCCL, torch's watchdog ends the process after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import CollectiveError
from outrider.parallel.communicator import Communicator, SingleRankCommunicator
from outrider.parallel.reduction import sum_in_rank_order
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology

Backend = Literal["gloo", "nccl"]
_TORCH_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
DEFAULT_TIMEOUT = timedelta(seconds=60)
# One function each; newer versions of torch have it under the first name and warn of the second.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TorchCommunicator:
    """One process's end of one process group. ``name`` is for errors."""

    def __init__(self, group: dist.ProcessGroup, *, name: str) -> None:
        self._group = group
        self._name = name
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        own = torch.tensor(list(row), dtype=torch.int64)
        gathered = torch.empty(self.size * len(row), dtype=torch.int64)
        with self._errors("all_gather_row"):
            _all_gather(gathered, own, group=self._group)
        return [tuple(other) for other in gathered.view(self.size, -1).tolist()]

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            with self._errors("all_reduce"):
                dist.all_reduce(x, group=self._group)
            return x
        return sum_in_rank_order(self._gather("all_reduce", x).view(self.size, *x.shape).unbind())

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gather("all_gather", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        own, rest = divmod(x.shape[0], self.size)
        assert rest == 0, f"{x.shape[0]} rows do not divide by {self.size} ranks"
        if x.is_cuda:
            reduced = x.new_empty(own, *x.shape[1:])
            with self._errors("reduce_scatter"):
                _reduce_scatter(reduced, x.contiguous(), group=self._group)
            return reduced
        counts = [own] * self.size
        return sum_in_rank_order(self._exchange("reduce_scatter", x, counts, counts).chunk(self.size))

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        assert sum(send_counts) == x.shape[0], f"{list(send_counts)} are not {x.shape[0]} rows"
        return self._exchange("all_to_all", x, send_counts, receive_counts)

    def _gather(self, name: str, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if x.numel():  # the same on all ranks
            with self._errors(name):
                _all_gather(_bytes(gathered), _bytes(x.contiguous()), group=self._group)
        return gathered

    def _exchange(self, name: str, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """All ranks call it, those without rows too: others may have some."""
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        row_bytes = x.element_size() * x.shape[1:].numel()
        with self._errors(name):
            dist.all_to_all_single(
                _bytes(received),
                _bytes(x.contiguous()),
                output_split_sizes=[count * row_bytes for count in receive_counts],
                input_split_sizes=[count * row_bytes for count in send_counts],
                group=self._group,
            )
        return received

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of the transport: a peer is gone, or the timeout
            raise CollectiveError(
                f"{self._name}.{name} failed on rank {self.rank} of {self.size}: {_reason(error)}"
            ) from error


def init_parallel(
    topology: Topology,
    rank: int,
    *,
    backend: Backend,
    init_method: str,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> ParallelState:
    """Join the world as ``rank`` and make its groups; every rank of the topology calls this once, at the same time.

    init_method: where ranks meet, as torch.distributed takes it: ``tcp://host:port``, ``file:///path``, ``env://``.
    Raises ``CollectiveError`` where the others do not come within ``timeout``. A world of one joins nothing.
    """
    if topology.world_size == 1:
        alone = SingleRankCommunicator()
        return ParallelState(topology=topology, rank=rank, world=alone, attn_tp=alone, attn_dp=alone)
    try:
        dist.init_process_group(
            _TORCH_BACKENDS[backend],
            init_method=init_method,
            rank=rank,
            world_size=topology.world_size,
            timeout=timeout,
        )
        world = dist.group.WORLD
        assert world is not None
        return ParallelState(
            topology=topology,
            rank=rank,
            world=TorchCommunicator(world, name="world"),
            attn_tp=_join("attn_tp", topology, rank, topology.attn_tp_ranks, timeout),
            attn_dp=_join("attn_dp", topology, rank, topology.attn_dp_ranks, timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {rank} of {topology.world_size} could not join at {init_method}: {_reason(error)}"
        ) from error


def close_parallel() -> None:
    """Leave the world, if this process is in one; the others need not agree."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(
    name: str, topology: Topology, rank: int, ranks_of: Callable[[int], tuple[int, ...]], timeout: timedelta
) -> Communicator:
    """The own group of a partition of the world. Torch wants every rank to make every group, in one order."""
    own: Communicator = SingleRankCommunicator()
    for ranks in sorted({ranks_of(r) for r in range(topology.world_size)}):
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            own = TorchCommunicator(group, name=name)
    return own


def _reason(error: Exception) -> str:
    """The first line: torch appends a stack of its own."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
