"""What the collectives of a pass or step are, and the bytes they move: communicators that note every call.

A ``RecordingCommunicator`` notes a call before it issues it, so that a call that fails is in the record too. Groups of
size 1 issue nothing and are not recorded. ``bytes_sent`` is what leaves the rank with the gloo transport (see
``torch_communicator``); a rank receives as much in every collective but an uneven all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.parallel.communicator import Communicator
from outrider.parallel.state import ParallelState


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    group: str  # world, attn_tp or attn_dp
    name: str  # the method of Communicator
    shape: tuple[int, ...]  # of what this rank hands in
    dtype: str  # as torch spells it, without the prefix
    bytes_sent: int  # by this rank to others

    def __str__(self) -> str:
        return f"{self.group}.{self.name} {self.dtype}{list(self.shape)}"


class RecordingCommunicator:
    """``inner`` with every call noted in ``record``."""

    def __init__(self, inner: Communicator, *, group: str, record: list[CollectiveCall]) -> None:
        self._inner = inner
        self._group = group
        self._record = record

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        others = self.size - 1
        self._record.append(
            CollectiveCall(
                group=self._group,
                name="all_gather_row",
                shape=(len(row),),
                dtype="int64",
                bytes_sent=others * len(row) * 8,
            )
        )
        return self._inner.all_gather_row(row)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note("all_reduce", x, rows_sent=(self.size - 1) * x.shape[0])
        return self._inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self._note("all_gather", x, rows_sent=(self.size - 1) * x.shape[0])
        return self._inner.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._note("reduce_scatter", x, rows_sent=(self.size - 1) * (x.shape[0] // self.size))
        return self._inner.reduce_scatter(x)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        self._note("all_to_all", x, rows_sent=sum(send_counts) - send_counts[self.rank])
        return self._inner.all_to_all(x, send_counts, receive_counts)

    def _note(self, name: str, x: Tensor, *, rows_sent: int) -> None:
        row_bytes = x.element_size() * x[:1].numel()
        self._record.append(
            CollectiveCall(
                group=self._group,
                name=name,
                shape=tuple(x.shape),
                dtype=str(x.dtype).removeprefix("torch."),
                bytes_sent=rows_sent * row_bytes,
            )
        )


def recorded(parallel: ParallelState, record: list[CollectiveCall]) -> ParallelState:
    """``parallel`` with the collectives of all its groups noted in one ``record``, in the order they are issued."""

    def wrap(inner: Communicator, group: str) -> Communicator:
        return inner if inner.size == 1 else RecordingCommunicator(inner, group=group, record=record)

    return replace(
        parallel,
        world=wrap(parallel.world, "world"),
        attn_tp=wrap(parallel.attn_tp, "attn_tp"),
        attn_dp=wrap(parallel.attn_dp, "attn_dp"),
    )
