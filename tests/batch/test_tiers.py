"""The capture list, and that every plan over it is captured or declared eager: all count vectors of four ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from outrider.batch.step_plan import EAGER, PaddingMode, PassKind, PassWidths, RankRow, StepPlan, plan_step
from outrider.batch.tiers import capture_sizes, describe_tier

GAMMA = 6
WIDTHS = PassWidths(draft=GAMMA, verify=GAMMA + 1)
COUNTS = (0, 1, 2, 3, 7, 8, 9)
VECTORS = list(itertools.product(COUNTS, repeat=4))
BUDGETS = (0, 3, GAMMA)  # drafts a request may verify on average

FIELDS_LIST = {*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 600, 16)}


@pytest.mark.parametrize("max_num_seqs", range(1, 601))
def test_the_capture_list_for_every_maximum(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    expected = [size for size in range(1, max_num_seqs + 1) if size in FIELDS_LIST or size == max_num_seqs]
    assert list(sizes) == expected


def test_the_counts_the_field_names() -> None:
    assert len(capture_sizes(64)) == 8 + 12 + 7 == 27
    assert len(capture_sizes(256)) == 27 + 24
    assert capture_sizes(300)[-3:] == (272, 288, 300)
    with pytest.raises(AssertionError, match="max_num_seqs=0"):
        capture_sizes(0)


def rows_of(requests: Sequence[int], budget: int) -> list[RankRow]:
    """A rank's budget is shared by its requests, and one request takes one draft more than another."""
    return [
        RankRow(
            prefill_requests=0,
            prefill_tokens=0,
            prefill_logit_rows=0,
            draft_requests=n,
            verify_requests=n,
            verify_tokens=min(n * (1 + budget) + (n > 1), n * WIDTHS.verify),
            graph_capable=1,
        )
        for n in requests
    ]


def plan_of(requests: Sequence[int], budget: int, tiers: Sequence[int]) -> StepPlan:
    return plan_step(rows_of(requests, budget), tiers=tiers, widths=WIDTHS)


@pytest.mark.parametrize("max_num_seqs", [8, 64])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_count_vector_of_four_ranks(budget: int, max_num_seqs: int) -> None:
    """Admission on the largest unscaled request count, whatever the budget; every rank's own plan is the same."""
    tiers = capture_sizes(max_num_seqs)
    for requests in VECTORS:
        gathered = [row.encode() for row in rows_of(requests, budget)]
        plans = [plan_step([RankRow.decode(r) for r in gathered], tiers=tiers, widths=WIDTHS) for _ in requests]
        plan = plans[0]
        assert all(other == plan for other in plans)
        largest = max(requests)
        assert len(plan.passes) == (2 if largest else 0)
        for pass_plan in plan.passes:
            even = largest + largest % 2 if largest > 2 else largest
            expected = next((tier for tier in tiers if tier >= even), EAGER if largest > max_num_seqs else max_num_seqs)
            assert pass_plan.tier == expected, (requests, pass_plan.kind)
            assert (pass_plan.tier == EAGER) == (largest > max_num_seqs)
            assert [count.value for count in pass_plan.requests] == list(requests)
            extent = [pass_plan.tier * pass_plan.width] * 4 if pass_plan.tier else [c.value for c in pass_plan.tokens]
            assert [count.value for count in pass_plan.padded_tokens] == extent
            assert pass_plan.padding_mode is (PaddingMode.TIER if pass_plan.tier else PaddingMode.NONE)


def test_ranks_with_the_same_plan_have_the_same_digest() -> None:
    plans = {requests: plan_of(requests, GAMMA, capture_sizes(8)) for requests in VECTORS[:: len(VECTORS) // 97]}
    assert len({plan.digest() for plan in plans.values()}) == len(plans)
    assert all(plan.digest() == plan_of(requests, GAMMA, capture_sizes(8)).digest() for requests, plan in plans.items())


def test_the_reason_names_the_rank_that_decides() -> None:
    tiers = capture_sizes(8)
    rows = rows_of((1, 3, 0, 2), GAMMA)
    draft = plan_step(rows, tiers=tiers, widths=WIDTHS).passes[0]
    assert describe_tier(draft, rows, tiers=tiers) == (
        "tier 4: the smallest captured even one that holds the 3 of rank 1, the largest request count over ranks"
    )
    rows = rows_of((1, 9, 0, 2), GAMMA)
    draft = plan_step(rows, tiers=tiers, widths=WIDTHS).passes[0]
    assert "the 9 requests of rank 1 exceed the largest tier, 8" in describe_tier(draft, rows, tiers=tiers)
    rows[2] = RankRow.decode((*rows[2].encode()[:-1], 0))
    draft = plan_step(rows, tiers=tiers, widths=WIDTHS).passes[0]
    assert draft.kind is PassKind.DRAFT
    assert "rank 2 has nothing captured" in describe_tier(draft, rows, tiers=tiers)
