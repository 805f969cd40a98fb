"""Which request counts are captured, and why a pass runs in the tier it runs in. Pure; no torch.

A tier is a number of requests, never of tokens: the tokens of a captured pass are the tier times the pass's width. The
steps widen with the size, so that padding stays below a fifth of a pass while the number of captures stays small.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.batch.counts import RequestCount
from outrider.batch.step_plan import EAGER, PassKind, PassPlan, RankRow, choose_tier

_STEPS = ((1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8))  # first, last, step
_STEP_BEYOND = 16


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Tiers of a rank that holds up to ``max_num_seqs`` requests, ascending, the maximum included.

    1-8 by 1, 10-32 by 2, 40-64 by 4, 72-256 by 8, then by 16. 64 gives 8 + 12 + 7 = 27.
    """
    assert max_num_seqs >= 1, f"max_num_seqs={max_num_seqs} must be at least 1"
    sizes = [size for first, last, step in _STEPS for size in range(first, last + 1, step)]
    sizes += range(sizes[-1] + _STEP_BEYOND, max_num_seqs + 1, _STEP_BEYOND)
    kept = [size for size in sizes if size < max_num_seqs]
    return (*kept, max_num_seqs)


def describe_tier(plan: PassPlan, rows: Sequence[RankRow], *, tiers: Sequence[int]) -> str:
    """One sentence: why ``plan`` runs in its tier. ``rows`` and ``tiers`` are what ``plan_step`` made it from."""
    largest = max(count.value for count in plan.requests)
    rank = next(rank for rank, count in enumerate(plan.requests) if count.value == largest)
    if plan.tier != EAGER:
        held = f"the {largest} of rank {rank}, the largest request count over ranks"
        rounded = choose_tier([RequestCount(largest)], tiers) != plan.tier
        return f"tier {plan.tier}: the smallest captured {'even ' if rounded else ''}one that holds {held}"
    if plan.kind is PassKind.PREFILL:
        return "eager: prefill rows are ragged and no prefill pass is captured"
    incapable = next((rank for rank, row in enumerate(rows) if not row.graph_capable), None)
    if incapable is not None:
        return f"eager: rank {incapable} has nothing captured, and all ranks run a pass alike"
    return f"eager: the {largest} requests of rank {rank} exceed the largest tier, {max(tiers, default=0)}"
