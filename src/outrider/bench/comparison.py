"""Runs of several contenders side by side: figures of each, and ratios taken within a repetition.

A machine's speed drifts; two runs of the same repetition saw the same drift, so their ratio is what is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outrider.bench.figures import Distribution, Spread
from outrider.bench.served import Run
from outrider.config import ProposerName
from outrider.outputs import SpecCounters
from outrider.spec_decode.counters import merge_counters

Name = TypeVar("Name", bound=str)
Runs = Mapping[ProposerName, Sequence[Run]]  # one run a repetition; the same number of each


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderFigures:
    """Speeds spread over repetitions; times of all requests of all repetitions."""

    num_requests: int
    num_tokens: int
    requests_per_s: Spread
    output_tokens_per_s: Spread  # of the whole run, prefill included
    decode_tokens_per_s: Spread  # of one stream, after its first token
    ttft_s: Distribution
    tpot_s: Distribution | None  # None: no request had a second token
    e2e_s: Distribution
    spec: SpecCounters

    @classmethod
    def of(cls, runs: Sequence[Run]) -> ContenderFigures:
        served = [each for run in runs for each in run.served]
        tpots = [each.decode_s / (each.num_tokens - 1) for each in served if each.num_tokens > 1]
        return cls(
            num_requests=len(served),
            num_tokens=sum(run.num_tokens for run in runs),
            requests_per_s=Spread.of([run.requests_per_s for run in runs]),
            output_tokens_per_s=Spread.of([run.output_tokens_per_s for run in runs]),
            decode_tokens_per_s=Spread.of([run.decode_tokens_per_s for run in runs]),
            ttft_s=Distribution.of([each.ttft_s for each in served]),
            tpot_s=Distribution.of(tpots) if tpots else None,
            e2e_s=Distribution.of([each.e2e_s for each in served]),
            spec=merge_counters(run.spec for run in runs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Above 1: the contender is faster than the baseline."""

    output_tokens_per_s: Spread
    decode_tokens_per_s: Spread | None  # None: no request had a second token

    @classmethod
    def of(cls, runs: Sequence[Run], baseline: Sequence[Run]) -> Ratio:
        pairs = list(zip(runs, baseline, strict=True))
        decode = [a.decode_tokens_per_s / b.decode_tokens_per_s for a, b in pairs if b.decode_tokens_per_s]
        return cls(
            output_tokens_per_s=Spread.of([a.output_tokens_per_s / b.output_tokens_per_s for a, b in pairs]),
            decode_tokens_per_s=Spread.of(decode) if decode else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualOutput:
    """How many answers have exactly the token ids that decoding without drafts gave."""

    compared: int
    equal: Mapping[ProposerName, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    figures: Mapping[ProposerName, ContenderFigures]
    ratios: Mapping[str, Ratio]  # e.g. "dspark_over_none"
    equal_output: EqualOutput | None  # None: sampled, or over HTTP


def compare(runs: Runs, *, check_output: bool) -> Comparison:
    """``check_output``: greedy answers with known token ids, which drafting must not change."""
    names = list(runs)
    equal = None
    if check_output and "none" in runs:
        equal = EqualOutput(
            compared=sum(len(run.served) for run in runs["none"]),
            equal={name: _num_equal(runs[name], runs["none"]) for name in names if name != "none"},
        )
    return Comparison(
        figures={name: ContenderFigures.of(runs[name]) for name in names},
        ratios={
            f"{name}_over_{baseline}": Ratio.of(runs[name], runs[baseline])
            for index, name in enumerate(names)
            for baseline in reversed(names[index + 1 :])
        },
        equal_output=equal,
    )


def rotated(names: Sequence[Name], by: int) -> list[Name]:
    """The contenders in another order each time, so that none always runs on the cache another has filled."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def _num_equal(runs: Sequence[Run], reference: Sequence[Run]) -> int:
    return sum(
        mine.token_ids == theirs.token_ids
        for run, other in zip(runs, reference, strict=True)
        for mine, theirs in zip(run.served, other.served, strict=True)
    )
