"""Figures that sum up many measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_RESAMPLES = 4000
_BOOTSTRAP_SEED = 20240  # fixed: the same measurements always give the same interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one figure over repetitions, or of a per-prompt figure over prompts."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=float(np.median(values)), min=float(min(values)), max=float(max(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of a per-request figure over all requests of all repetitions."""

    mean: float
    p50: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        p50, p99 = np.percentile(values, (50, 99))  # linear interpolation between neighbours
        return cls(
            mean=float(np.mean(values)), p50=float(p50), p99=float(p99), min=float(min(values)), max=float(max(values))
        )


def bootstrap_ci95(numerators: Sequence[int], denominators: Sequence[int]) -> tuple[float, float]:
    """95 % interval of sum(numerators) / sum(denominators) when the pairs are drawn anew with replacement.

    The pairs are prompts: the rounds of one prompt are not independent of each other, so prompts are what is resampled.
    A draw whose denominators are all zero counts as 0.
    """
    assert len(numerators) == len(denominators) > 0
    draws = np.random.default_rng(_BOOTSTRAP_SEED).integers(
        len(numerators), size=(BOOTSTRAP_RESAMPLES, len(numerators))
    )
    above = np.asarray(numerators, dtype=np.float64)[draws].sum(axis=1)
    below = np.asarray(denominators, dtype=np.float64)[draws].sum(axis=1)
    ratios = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
