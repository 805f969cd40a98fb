"""Figures of runs and their ratios, worked out by hand."""

from __future__ import annotations

import pytest

from outrider.bench.comparison import ContenderFigures, compare, rotated
from outrider.bench.figures import Spread
from outrider.bench.served import Run, Served
from outrider.outputs import SpecCounters


def _run(elapsed_s: float, *answers: tuple[tuple[int, ...], float, float], rounds: int = 0) -> Run:
    """``answers``: token ids, seconds to the first and to the last."""
    return Run(
        served=tuple(
            Served(num_tokens=len(ids), ttft_s=ttft_s, e2e_s=e2e_s, token_ids=ids) for ids, ttft_s, e2e_s in answers
        ),
        elapsed_s=elapsed_s,
        spec=SpecCounters(rounds=rounds, emitted=2 * rounds),
    )


def test_figures_of_one_contender() -> None:
    runs = [
        _run(2.0, ((1, 2, 3), 0.5, 1.5), ((4,), 0.7, 0.7), rounds=3),
        _run(4.0, ((1, 2, 3), 1.0, 2.0), ((4,), 0.1, 0.1), rounds=1),
    ]
    figures = ContenderFigures.of(runs)
    assert (figures.num_requests, figures.num_tokens) == (4, 8)
    assert figures.requests_per_s == Spread(median=0.75, min=0.5, max=1.0)
    assert figures.output_tokens_per_s == Spread(median=1.5, min=1.0, max=2.0)
    assert figures.decode_tokens_per_s == Spread(median=2.0, min=2.0, max=2.0)  # 2 tokens in the second after the first
    assert (figures.ttft_s.min, figures.ttft_s.p50, figures.ttft_s.max) == pytest.approx((0.1, 0.6, 1.0))
    assert figures.tpot_s is not None
    assert figures.tpot_s.p99 == pytest.approx(0.5)  # answers of one token have none
    assert (figures.spec.rounds, figures.spec.accepted_length) == (4, 2.0)


def test_figures_without_second_tokens() -> None:
    figures = ContenderFigures.of([_run(1.0, ((1,), 0.5, 0.5))])
    assert figures.tpot_s is None
    assert figures.decode_tokens_per_s.max == 0.0


def test_ratios_are_taken_within_a_repetition() -> None:
    """The machine is twice as slow in the second repetition; the ratios do not see it."""
    fast = [_run(1.0, ((1, 2, 3), 0.5, 1.0)), _run(2.0, ((1, 2, 3), 1.0, 2.0))]
    slow = [_run(3.0, ((1, 2, 3), 0.5, 2.5)), _run(5.0, ((1, 2, 4), 1.0, 5.0))]
    comparison = compare({"dspark": fast, "none": slow}, check_output=True)
    assert list(comparison.ratios) == ["dspark_over_none"]
    ratio = comparison.ratios["dspark_over_none"]
    assert ratio.output_tokens_per_s == Spread(median=2.75, min=2.5, max=3.0)
    assert ratio.decode_tokens_per_s == Spread(median=4.0, min=4.0, max=4.0)
    assert comparison.equal_output is not None
    assert (comparison.equal_output.compared, comparison.equal_output.equal) == (2, {"dspark": 1})


def test_every_pair_has_a_ratio_and_sampled_output_is_not_compared() -> None:
    runs = [_run(1.0, ((1,), 0.5, 0.5))]
    comparison = compare({"dspark": runs, "lookup": runs, "none": runs}, check_output=False)
    assert list(comparison.ratios) == ["dspark_over_none", "dspark_over_lookup", "lookup_over_none"]
    assert comparison.ratios["lookup_over_none"].decode_tokens_per_s is None
    assert comparison.equal_output is None


def test_the_order_rotates() -> None:
    assert [rotated(["dspark", "lookup", "none"], i) for i in (0, 1, 5)] == [
        ["dspark", "lookup", "none"],
        ["lookup", "none", "dspark"],
        ["none", "dspark", "lookup"],
    ]
