"""Counters of rounds: one rule, and sums that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.outputs import SpecCounters
from outrider.spec_decode.counters import SpecAccumulator, merge_counters

Round = tuple[int, int, int]  # offered, accepted, emitted


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    offered = draw(st.integers(0, 7))
    accepted = draw(st.integers(0, offered))
    return offered, accepted, accepted + draw(st.integers(0, 1))


def accumulate(parts: list[Round]) -> SpecCounters:
    accumulator = SpecAccumulator()
    for offered, accepted, emitted in parts:
        accumulator.add_round(offered=offered, accepted=accepted, emitted=emitted)
    return accumulator.snapshot()


@given(st.lists(rounds(), max_size=8))
def test_sums_add_up(parts: list[Round]) -> None:
    spec = accumulate(parts)
    assert spec.rounds == len(parts)
    assert (spec.offered, spec.accepted, spec.emitted) == tuple(sum(part[i] for part in parts) for i in range(3))
    assert spec.per_position == tuple(
        (sum(offered > j for offered, _, _ in parts), sum(accepted > j for _, accepted, _ in parts))
        for j in range(max((offered for offered, _, _ in parts), default=0))
    )
    assert spec.accepted_length == (spec.emitted / len(parts) if parts else 0.0)
    assert spec.acceptance_rate == (spec.accepted / spec.offered if spec.offered else 0.0)


@given(st.lists(st.lists(rounds(), max_size=4), max_size=4))
def test_merging_is_counting_together(parts: list[list[Round]]) -> None:
    assert merge_counters(accumulate(part) for part in parts) == accumulate([r for part in parts for r in part])


def test_a_snapshot_never_changes() -> None:
    accumulator = SpecAccumulator()
    accumulator.add_round(offered=3, accepted=1, emitted=2)
    before = accumulator.snapshot()
    accumulator.add_round(offered=5, accepted=5, emitted=6)
    assert before == SpecCounters(rounds=1, offered=3, accepted=1, emitted=2, per_position=((1, 1), (1, 0), (1, 0)))


@pytest.mark.parametrize(("offered", "accepted", "emitted"), [(2, 3, 4), (3, -1, 0), (3, 2, 4), (3, 2, 1)])
def test_impossible_rounds_are_errors(offered: int, accepted: int, emitted: int) -> None:
    with pytest.raises(AssertionError):
        SpecAccumulator().add_round(offered=offered, accepted=accepted, emitted=emitted)
