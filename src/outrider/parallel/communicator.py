"""The one collective of a step's control flow: gathering every rank's row of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Communicator(Protocol):
    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's row, index = rank; all ranks get the same answer. Called exactly once per step by each."""
        ...


class SingleRankCommunicator:
    """A group of one: gathering is handing back one's own row."""

    def all_gather_row(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(row)]
