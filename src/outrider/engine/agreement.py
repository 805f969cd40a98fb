"""Where ranks meet once a step: one row of integers from each, one all-gather, the same answer everywhere.

Contract: beside its ``RankRow`` every rank brings three integers, and what they decide is a function of the gathered
rows alone, so that all ranks go on, fall asleep and leave together. No rank may decide any of this by itself: it would
wait in a collective that nobody else enters.

Sleeping: a step in which no rank holds a request is followed by sleep. Each rank sleeps until the front's wake-up
calls that have reached it exceed the *least* number that any rank brought to that step. The front calls all ranks
after every request it hands out, so whoever had not yet seen a request's call brings a number below it, and all wake.
"""

from __future__ import annotations

from outrider.batch.step_plan import IDLE_ROW, RankRow
from outrider.parallel.communicator import Communicator

_ROW_SIZE = len(IDLE_ROW.encode())


class StepAgreement:
    """``num_wakes`` and ``stopping`` are set by whoever takes the front's messages, the rest by ``gather``."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.num_wakes = 0  # wake-up calls taken so far
        self.stopping = False  # this rank was told to leave
        self.all_idle = False  # of the latest step: no rank held a request
        self.all_stopping = False  # every rank was told to leave
        self.least_wakes = 0  # the fewest calls any rank had taken

    def gather(self, row: RankRow, *, num_unfinished: int) -> list[RankRow]:
        """Every rank's row of this step, index = dp_rank. ``num_unfinished``: requests this rank holds."""
        own = (*row.encode(), num_unfinished, self.num_wakes, int(self.stopping))
        gathered = self._communicator.all_gather_row(own)
        unfinished, wakes, stopping = zip(*(values[_ROW_SIZE:] for values in gathered), strict=True)
        self.all_idle = not any(unfinished)
        self.all_stopping = all(stopping)
        self.least_wakes = min(wakes)
        return [RankRow.decode(values[:_ROW_SIZE]) for values in gathered]
