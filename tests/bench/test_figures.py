"""Spreads, percentiles and the bootstrap interval against figures worked out by hand."""

from __future__ import annotations

import pytest

from outrider.bench.figures import Distribution, Spread, bootstrap_ci95


def test_spread_and_distribution() -> None:
    assert Spread.of([3.0, 1.0, 8.0, 2.0]) == Spread(median=2.5, min=1.0, max=8.0)
    # 0..100: the 99th of a hundred equal steps
    assert Distribution.of([float(i) for i in range(101)]) == Distribution(
        mean=50.0, p50=50.0, p99=99.0, min=0.0, max=100.0
    )


def test_interval_of_equal_prompts_is_a_point() -> None:
    assert bootstrap_ci95([8, 16, 24], [1, 2, 3]) == (8.0, 8.0)


def test_interval_of_two_prompts() -> None:
    """Drawn with replacement: both the first 1/4, one each 1/2, both the second 1/4; so the tails are the extremes."""
    assert bootstrap_ci95([10, 40], [10, 10]) == (1.0, 4.0)
    # pooled, not averaged: one each gives 50/20, but that is never in a tail
    assert bootstrap_ci95([1000, 1], [100, 1]) == (1.0, 10.0)


def test_interval_of_many_prompts_is_that_of_the_normal_law() -> None:
    """100 prompts, half with length 1 and half with 3: the mean is 2 and its standard error 1 / sqrt(100)."""
    low, high = bootstrap_ci95([10] * 50 + [30] * 50, [10] * 100)
    assert low == pytest.approx(2 - 1.96 / 10, abs=0.025)
    assert high == pytest.approx(2 + 1.96 / 10, abs=0.025)
    assert (low, high) == bootstrap_ci95([10] * 50 + [30] * 50, [10] * 100)


def test_prompts_without_rounds() -> None:
    assert bootstrap_ci95([0, 0], [0, 0]) == (0.0, 0.0)
