"""The step plan: what every rank runs in this step, a pure function of one row of integers per rank.

Contract: ``plan_step`` reads nothing but its arguments, so that ranks holding the same gathered rows hold the same
plan (``StepPlan.digest`` lets them compare). Counts in a ``PassPlan`` are unscaled requests and real tokens; the tier
comes from the largest *request* count over all ranks, never from a token count. A pass is in the plan when any rank
has requests in it; a rank without requests runs it with zero rows.

Prefill passes are always eager: their rows are ragged. That concerns no other pass of the step: a rank with decode work
alone goes on replaying its graphs while another prefills, since the passes of a step are separate forwards.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from outrider.batch.counts import PaddedTokenCount, RequestCount, TokenCount

EAGER = 0  # tier of a pass that runs without a captured graph


class StepFamily(IntEnum):
    """What kinds of pass a rank has work for (in its row), or the step consists of (in the plan)."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3


class PassKind(StrEnum):
    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


class PaddingMode(StrEnum):
    NONE = "none"  # eager: each rank runs its own real rows
    TIER = "tier"  # captured: every rank runs the tier's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What one rank contributes to a step's single all-gather. Integers only, fixed length."""

    prefill_requests: int
    prefill_tokens: int
    prefill_logit_rows: int  # chunks whose last row is sampled
    draft_requests: int
    verify_requests: int
    verify_tokens: int  # anchors plus the drafts the budget admits; what is verified may be fewer, never more
    graph_capable: int  # 1: this rank can replay captured graphs in this step

    def __post_init__(self) -> None:
        assert min(self.encode()) >= 0, f"no integer of a row is negative: {self}"
        assert self.prefill_logit_rows <= self.prefill_requests <= self.prefill_tokens, f"inconsistent prefill: {self}"
        assert self.draft_requests <= self.verify_requests <= self.verify_tokens, f"inconsistent decode: {self}"
        assert self.graph_capable in (0, 1), f"graph_capable={self.graph_capable} must be 0 or 1"

    def encode(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    @classmethod
    def decode(cls, values: Sequence[int]) -> RankRow:
        names = cls.__slots__
        assert len(values) == len(names), f"a rank row has {len(names)} integers, not {len(values)}"
        return cls(**dict(zip(names, values, strict=True)))

    @property
    def family(self) -> StepFamily:
        return StepFamily(
            (StepFamily.PREFILL if self.prefill_requests else 0) | (StepFamily.DECODE if self.verify_requests else 0)
        )


IDLE_ROW = RankRow(
    prefill_requests=0,
    prefill_tokens=0,
    prefill_logit_rows=0,
    draft_requests=0,
    verify_requests=0,
    verify_tokens=0,
    graph_capable=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWidths:
    """Rows per request: of a draft pass (the block), and at most of a verify pass (anchor and drafts)."""

    draft: int
    verify: int

    def __post_init__(self) -> None:
        assert self.draft >= 0, f"draft width {self.draft} must not be negative"
        assert self.verify >= 1, f"verify width {self.verify} must be at least 1: the anchor's row"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """One forward of one model, for all ranks; index = rank."""

    kind: PassKind
    width: int  # rows per request; 1 for prefill, whose rows are ragged
    requests: tuple[RequestCount, ...]
    tokens: tuple[TokenCount, ...]  # upper bound of real rows where a confidence cut may verify fewer
    logit_rows: tuple[int, ...]
    tier: int  # captured number of requests, or EAGER
    padded_requests: tuple[RequestCount, ...]
    padded_tokens: tuple[PaddedTokenCount, ...]
    padding_mode: PaddingMode

    def __post_init__(self) -> None:
        for real, padded in zip(self.requests, self.padded_requests, strict=True):
            assert real.value <= padded.value, f"{self.kind}: {real} exceeds {padded}"
        for tokens, extent in zip(self.tokens, self.padded_tokens, strict=True):
            assert tokens.value <= extent.value, f"{self.kind}: {tokens} exceeds {extent}"
        for rows, tokens in zip(self.logit_rows, self.tokens, strict=True):
            assert 0 <= rows <= tokens.value, f"{self.kind}: {rows} logit rows of {tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    family: StepFamily
    passes: tuple[PassPlan, ...]  # in the order every rank runs them

    def find(self, kind: PassKind) -> PassPlan | None:
        """The plan of one pass, or None when no rank runs it in this step."""
        return next((p for p in self.passes if p.kind is kind), None)

    def digest(self) -> str:
        """Equal on all ranks, or the ranks have not gathered the same rows."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def plan_step(rows: Sequence[RankRow], *, tiers: Sequence[int], widths: PassWidths) -> StepPlan:
    """The plan of a step from the gathered rows (index = rank).

    tiers: captured numbers of requests, ascending; empty when nothing is captured. Steps with the same rows, as those
    that only decode often are, get the same plan object.
    """
    return _plan_step(tuple(rows), tuple(tiers), widths)


@functools.lru_cache(maxsize=256)
def _plan_step(rows: tuple[RankRow, ...], tiers: tuple[int, ...], widths: PassWidths) -> StepPlan:
    assert rows, "a step has at least one rank"
    assert list(tiers) == sorted(set(tiers)), f"tiers {list(tiers)} must ascend"
    family = 0
    for row in rows:
        assert row.verify_tokens <= row.verify_requests * widths.verify, f"{row} exceeds verify width {widths.verify}"
        family |= row.family
    captured = tiers if all(row.graph_capable for row in rows) else ()
    passes = []
    if family & StepFamily.PREFILL:
        passes.append(
            _plan_pass(
                PassKind.PREFILL,
                width=1,
                requests=[RequestCount(row.prefill_requests) for row in rows],
                tokens=[TokenCount(row.prefill_tokens) for row in rows],
                logit_rows=[row.prefill_logit_rows for row in rows],
                tier=EAGER,
            )
        )
    if any(row.draft_requests for row in rows):
        requests = [RequestCount(row.draft_requests) for row in rows]
        tokens = [count.tokens(width=widths.draft) for count in requests]
        passes.append(
            _plan_pass(
                PassKind.DRAFT,
                width=widths.draft,
                requests=requests,
                tokens=tokens,
                logit_rows=[count.value for count in tokens],
                tier=choose_tier(requests, captured),
            )
        )
    if family & StepFamily.DECODE:
        requests = [RequestCount(row.verify_requests) for row in rows]
        tokens = [TokenCount(row.verify_tokens) for row in rows]
        passes.append(
            _plan_pass(
                PassKind.VERIFY,
                width=widths.verify,
                requests=requests,
                tokens=tokens,
                logit_rows=[count.value for count in tokens],
                tier=choose_tier(requests, captured),
            )
        )
    return StepPlan(family=StepFamily(family), passes=tuple(passes))


def plan_capture(kind: PassKind, *, tier: int, widths: PassWidths, num_ranks: int) -> PassPlan:
    """The plan under which a tier is captured: no rank has a real row, every rank runs the tier's extents."""
    assert tier > EAGER, f"tier={tier} must be at least 1"
    assert kind is not PassKind.PREFILL, "prefill passes are not captured"
    return _plan_pass(
        kind,
        width=widths.draft if kind is PassKind.DRAFT else widths.verify,
        requests=[RequestCount(0)] * num_ranks,
        tokens=[TokenCount(0)] * num_ranks,
        logit_rows=[0] * num_ranks,
        tier=tier,
    )


def choose_tier(requests: Sequence[RequestCount], tiers: Sequence[int]) -> int:
    """The smallest captured tier that holds every rank's unscaled requests, or EAGER.

    Among several ranks a largest count above 2 is first rounded up to even where such a tier exists: the ranks' counts
    wander by one from step to step, and the group stays on one graph while they do, for one padded request at most.
    """
    largest = max(count.value for count in requests)
    steady = largest + largest % 2 if len(requests) > 1 and largest > 2 else largest
    holding = [tier for tier in tiers if tier >= largest]
    return next((tier for tier in holding if tier >= steady), holding[-1] if holding else EAGER)


def _plan_pass(
    kind: PassKind,
    *,
    width: int,
    requests: list[RequestCount],
    tokens: list[TokenCount],
    logit_rows: list[int],
    tier: int,
) -> PassPlan:
    if tier == EAGER:
        padded_requests = requests
        padded_tokens = [count.padded(extent=count.value) for count in tokens]
    else:
        padded_requests = [RequestCount(tier)] * len(requests)
        padded_tokens = [count.padded(extent=tier * width) for count in tokens]
    return PassPlan(
        kind=kind,
        width=width,
        requests=tuple(requests),
        tokens=tuple(tokens),
        logit_rows=tuple(logit_rows),
        tier=tier,
        padded_requests=tuple(padded_requests),
        padded_tokens=tuple(padded_tokens),
        padding_mode=PaddingMode.NONE if tier == EAGER else PaddingMode.TIER,
    )
