"""Ranks as threads of one process: any topology on one machine, with every collective checked against the others'.

Contract: what ``Communicator`` says, and more. A collective ends on all ranks of its group, or raises
``CollectiveError`` on all ranks that wait or come later: when they differ in name, shape, dtype or counts; when no rank
can go on, since each waits for one that waits elsewhere, has returned or has failed; when a rank is busy past the
timeout. The error says which rank issued what. Sums are those of ``parallel.reduction``, as on real ranks over gloo.

Worst fault: a simulation that hangs, or lets a mismatch pass that would hang real ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor

from outrider.errors import CollectiveError
from outrider.parallel.communicator import Communicator, SingleRankCommunicator
from outrider.parallel.recording import CollectiveCall, recorded
from outrider.parallel.reduction import sum_in_rank_order
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(seconds=60)


@dataclass(slots=True)
class _Round:
    """One collective of one group, while its ranks arrive."""

    calls: dict[int, str] = field(default_factory=dict)  # world rank -> what it issued
    tensors: dict[int, Tensor] = field(default_factory=dict)  # world rank -> a copy of what it brought
    counts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=dict
    )  # all_to_all: sent, received
    done: bool = False


class _Hub:
    """Where ranks meet. All state is guarded by one condition."""

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._condition = threading.Condition()
        self._rounds: dict[tuple[int, ...], _Round] = {}  # the open one of each group, by its ranks
        self._waiting: dict[int, str] = {}  # rank -> in what
        self._ended: dict[int, str] = {}  # rank -> how
        self._failure = ""

    def meet(
        self,
        ranks: tuple[int, ...],
        rank: int,
        call: str,
        tensor: Tensor,
        counts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> _Round:
        """Returns when all of ``ranks`` have come: what each brought, which nobody changes any more."""
        with self._condition:
            self._raise_failure()
            meeting = self._rounds.setdefault(ranks, _Round())
            meeting.calls[rank], meeting.tensors[rank], meeting.counts[rank] = call, tensor.clone(), counts
            if len(meeting.calls) == len(ranks):
                self._finish(ranks, meeting)
            else:
                self._waiting[rank] = call
                self._fail_if_nobody_can_go_on()
                self._condition.wait_for(lambda: meeting.done or self._failure, self._timeout.total_seconds())
                if not (meeting.done or self._failure):
                    busy = [r for r in range(self._world_size) if r not in self._waiting and r not in self._ended]
                    self._fail(
                        f"no answer within {self._timeout.total_seconds():g} s from ranks {busy}; {self._where()}"
                    )
                if not meeting.done:
                    self._raise_failure()
            return meeting

    def end(self, rank: int, how: str) -> None:
        """``rank`` issues nothing more."""
        with self._condition:
            self._ended[rank] = how
            self._fail_if_nobody_can_go_on()
            self._condition.notify_all()

    def wait_for_the_end(self) -> None:
        """Of all ranks; after a failure, ranks that are busy get the timeout once more and are then left behind."""

        def all_ended() -> bool:
            return len(self._ended) == self._world_size

        with self._condition:
            self._condition.wait_for(lambda: all_ended() or self._failure)
            self._condition.wait_for(all_ended, self._timeout.total_seconds())

    def _finish(self, ranks: tuple[int, ...], meeting: _Round) -> None:
        different = len(set(meeting.calls.values())) > 1
        sent = {(a, b): meeting.counts[a][0][j] for a in ranks for j, b in enumerate(ranks) if meeting.counts[a][0]}
        received = {(a, b): meeting.counts[b][1][i] for i, a in enumerate(ranks) for b in ranks if meeting.counts[b][1]}
        if different or sent != received:
            issued = "; ".join(
                f"rank {r} {meeting.calls[r]}" + (f" counts {meeting.counts[r]}" if meeting.counts[r][0] else "")
                for r in ranks
            )
            self._fail(f"ranks {list(ranks)} do not agree: {issued}")
            self._raise_failure()
        del self._rounds[ranks]
        meeting.done = True
        for r in ranks:
            self._waiting.pop(r, None)
        self._condition.notify_all()

    def _fail_if_nobody_can_go_on(self) -> None:
        if self._waiting and len(self._waiting) + len(self._ended) == self._world_size:
            self._fail(f"no rank can go on: {self._where()}")

    def _where(self) -> str:
        places = [(r, f"waits in {call}") for r, call in self._waiting.items()] + list(self._ended.items())
        return "; ".join(f"rank {r} {place}" for r, place in sorted(places))

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        self._condition.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise CollectiveError(self._failure)


class SimulatedCommunicator:
    """One rank's end of one group."""

    def __init__(self, hub: _Hub, *, group: str, ranks: tuple[int, ...], world_rank: int) -> None:
        self._hub = hub
        self._group = group
        self._ranks = ranks
        self._world_rank = world_rank
        self.rank = ranks.index(world_rank)
        self.size = len(ranks)

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        rows = self._meet("all_gather_row", torch.tensor(list(row), dtype=torch.int64))
        return [tuple(other.tolist()) for other in rows]

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(self._meet("all_reduce", x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meet("all_gather", x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows do not divide by {self.size} ranks"
        return sum_in_rank_order([part.chunk(self.size)[self.rank] for part in self._meet("reduce_scatter", x)])

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        assert len(send_counts) == len(receive_counts) == self.size
        assert sum(send_counts) == x.shape[0], f"{list(send_counts)} are not {x.shape[0]} rows"
        counts = (tuple(send_counts), tuple(receive_counts))
        # Ranks bring different numbers of rows: what must agree is the rest of the shape.
        call = f"{self._group}.all_to_all {_dtype(x)}{['rows', *x.shape[1:]]}"
        meeting = self._hub.meet(self._ranks, self._world_rank, call, x, counts)
        return torch.cat(
            [torch.split_with_sizes(meeting.tensors[r], meeting.counts[r][0])[self.rank] for r in self._ranks]
        )

    def _meet(self, name: str, x: Tensor) -> list[Tensor]:
        call = f"{self._group}.{name} {_dtype(x)}{list(x.shape)}"
        meeting = self._hub.meet(self._ranks, self._world_rank, call, x)
        return [meeting.tensors[r] for r in self._ranks]


class Simulation:
    """All ranks of ``topology``; ``calls[rank]`` records what each issued, also where it failed."""

    def __init__(self, topology: Topology, *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._hub = _Hub(topology.world_size, timeout)
        self.calls: list[list[CollectiveCall]] = [[] for _ in range(topology.world_size)]
        self.states = [recorded(self._state(topology, rank), self.calls[rank]) for rank in range(topology.world_size)]

    def run(self, fn: Callable[[ParallelState], T]) -> list[T]:
        """``fn`` on every rank's own thread: results in rank order, or the first error of a rank's own.

        A ``CollectiveError`` that only follows from another rank's error gives way to it.
        """
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = fn(self.states[rank])
                self._hub.end(rank, "has returned")
            except BaseException as error:  # handed on to the caller
                errors[rank] = error
                self._hub.end(rank, f"has failed ({type(error).__name__}: {error})")

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(len(self.states))
        ]
        for thread in threads:
            thread.start()
        self._hub.wait_for_the_end()
        if errors:
            own = [rank for rank, error in errors.items() if not isinstance(error, CollectiveError)]
            rank = min(own or errors)
            errors[rank].add_note(f"on simulated rank {rank}")
            raise errors[rank]
        return [results[rank] for rank in range(len(self.states))]

    def _state(self, topology: Topology, rank: int) -> ParallelState:
        def group(name: str, ranks: tuple[int, ...]) -> Communicator:
            if len(ranks) == 1:
                return SingleRankCommunicator()
            return SimulatedCommunicator(self._hub, group=name, ranks=ranks, world_rank=rank)

        return ParallelState(
            topology=topology,
            rank=rank,
            world=group("world", tuple(range(topology.world_size))),
            attn_tp=group("attn_tp", topology.attn_tp_ranks(rank)),
            attn_dp=group("attn_dp", topology.attn_dp_ranks(rank)),
        )


def run_simulated(
    topology: Topology, fn: Callable[[ParallelState], T], *, timeout: timedelta = DEFAULT_TIMEOUT
) -> list[T]:
    """``fn(parallel)`` on a simulated rank each; results in rank order. See ``Simulation`` for the record."""
    return Simulation(topology, timeout=timeout).run(fn)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
