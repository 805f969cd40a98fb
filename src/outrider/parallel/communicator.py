"""Collectives of one group of ranks. A module receives the communicator of the group it uses, and no other.

Contract, of every implementation: all ranks of a group issue the same calls in the same order; a call returns the same
bits on every rank where it returns the same value (so ranks that share requests decide alike); a group of size 1 is a
no-op. A rank that is gone or does not come within the group's timeout makes the call raise ``CollectiveError`` on the
others. Shapes: the first dimension is the one that is gathered, scattered or exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    @property
    def rank(self) -> int:
        """Own index in the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's row of integers, index = rank; rows have one length. Once per step, to agree on it."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; ``x`` may be overwritten and returned."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of every rank, concatenated in rank order: [size * n, ...]. All ranks bring the same shape."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n, ...] summed over ranks, of which rank r keeps rows r * n .. (r + 1) * n."""
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Rows of ``x``, in rank order of their receivers, exchanged: rows received, in rank order of their senders."""
        ...


class SingleRankCommunicator:
    """A group of one: everything is handing back one's own."""

    rank = 0
    size = 1

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(row)]

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        assert list(send_counts) == list(receive_counts) == [x.shape[0]]
        return x
