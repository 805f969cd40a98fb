"""Counting what drafting did. One rule for every figure in every command.

A round is one verify row window of one request. ``offered`` counts the drafts that were verified in it, ``accepted``
those that became output (a draft accepted behind a stop event is not output), ``emitted`` the tokens that became
output, the target's own token at the end included. Tokens sampled by prefill belong to no round, nor do those that a
drafting engine decodes without drafts because too many requests run.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.outputs import SpecCounters


class SpecAccumulator:
    """Mutable sums behind the frozen ``SpecCounters``."""

    __slots__ = ("_accepted_at", "_emitted", "_offered_at", "_rounds")

    def __init__(self) -> None:
        self._rounds = 0
        self._emitted = 0
        self._offered_at: list[int] = []
        self._accepted_at: list[int] = []

    def add_round(self, *, offered: int, accepted: int, emitted: int) -> None:
        assert 0 <= accepted <= offered, f"{accepted} drafts accepted of {offered} offered"
        assert accepted <= emitted <= accepted + 1, f"{emitted} tokens emitted with {accepted} drafts accepted"
        self._rounds += 1
        self._emitted += emitted
        missing = offered - len(self._offered_at)
        self._offered_at.extend([0] * missing)
        self._accepted_at.extend([0] * missing)
        for position in range(offered):
            self._offered_at[position] += 1
            self._accepted_at[position] += position < accepted

    def snapshot(self) -> SpecCounters:
        return SpecCounters(
            rounds=self._rounds,
            offered=sum(self._offered_at),
            accepted=sum(self._accepted_at),
            emitted=self._emitted,
            per_position=tuple(zip(self._offered_at, self._accepted_at, strict=True)),
        )


def merge_counters(parts: Iterable[SpecCounters]) -> SpecCounters:
    """The sum of several snapshots."""
    merged = list(parts)
    if len(merged) == 1:
        return merged[0]
    depth = max((len(part.per_position) for part in merged), default=0)
    padded = [(*part.per_position, *[(0, 0)] * (depth - len(part.per_position))) for part in merged]
    return SpecCounters(
        rounds=sum(part.rounds for part in merged),
        offered=sum(part.offered for part in merged),
        accepted=sum(part.accepted for part in merged),
        emitted=sum(part.emitted for part in merged),
        per_position=tuple(
            (sum(part[i][0] for part in padded), sum(part[i][1] for part in padded)) for i in range(depth)
        ),
    )
