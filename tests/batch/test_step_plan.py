"""Case S1, and the plan's rules over random rows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.batch.counts import PaddedTokenCount, RequestCount, TokenCount
from outrider.batch.step_plan import (
    EAGER,
    IDLE_ROW,
    PaddingMode,
    PassKind,
    PassWidths,
    RankRow,
    StepFamily,
    choose_tier,
    plan_capture,
    plan_step,
)

GAMMA = 6
WIDTHS = PassWidths(draft=GAMMA, verify=GAMMA + 1)


def decode_row(requests: int) -> RankRow:
    return RankRow(
        prefill_requests=0,
        prefill_tokens=0,
        prefill_logit_rows=0,
        draft_requests=requests,
        verify_requests=requests,
        verify_tokens=requests * (GAMMA + 1),
        graph_capable=1,
    )


def test_s1_counts_tier_and_widths() -> None:
    plan = plan_step([decode_row(n) for n in (1, 3, 0, 2)], tiers=(1, 2, 4, 8), widths=WIDTHS)
    draft, verify = plan.passes
    assert plan.family is StepFamily.DECODE
    assert draft.kind is PassKind.DRAFT
    assert [c.value for c in draft.requests] == [1, 3, 0, 2]
    assert [c.value for c in draft.tokens] == [6, 18, 0, 12]
    assert draft.tier == 4
    assert [c.value for c in draft.padded_tokens] == [24] * 4
    assert draft.tokens[0] == TokenCount(6)
    assert verify.kind is PassKind.VERIFY
    assert verify.width == 7
    assert verify.tier == 4
    assert [c.value for c in verify.padded_tokens] == [28] * 4


def test_s1_every_rank_runs_the_same_passes() -> None:
    """The idle rank's collectives are those of the passes; all ranks derive them from one plan."""
    rows = [decode_row(n) for n in (1, 3, 0, 2)]
    gathered = [row.encode() for row in rows]
    plans = [plan_step([RankRow.decode(r) for r in gathered], tiers=(1, 2, 4, 8), widths=WIDTHS) for _ in rows]
    assert len({plan.digest() for plan in plans}) == 1
    assert [p.kind for p in plans[2].passes] == [PassKind.DRAFT, PassKind.VERIFY]


def test_admission_looks_at_requests_not_tokens() -> None:
    assert choose_tier([RequestCount(1), RequestCount(3)], (1, 2, 4, 8)) == 4
    assert choose_tier([RequestCount(1), RequestCount(3)], (1, 2, 3, 4, 5)) == 4  # several ranks: even
    assert choose_tier([RequestCount(3)], (1, 2, 3, 4, 5)) == 3
    assert choose_tier([RequestCount(5), RequestCount(0)], (1, 2, 3, 4, 5)) == 5  # no larger one
    assert choose_tier([RequestCount(1), RequestCount(0)], (1, 2, 3)) == 1
    assert choose_tier([RequestCount(9)], (1, 2, 4, 8)) == EAGER
    assert choose_tier([RequestCount(1)], ()) == EAGER


def test_one_rank_that_cannot_replay_makes_all_eager() -> None:
    rows = [decode_row(1), dataclasses.replace(decode_row(1), graph_capable=0)]
    plan = plan_step(rows, tiers=(1, 2), widths=WIDTHS)
    assert {p.tier for p in plan.passes} == {EAGER}
    assert {p.padding_mode for p in plan.passes} == {PaddingMode.NONE}


def test_all_idle_is_an_empty_plan() -> None:
    plan = plan_step([IDLE_ROW, IDLE_ROW], tiers=(1,), widths=WIDTHS)
    assert plan.family is StepFamily.IDLE
    assert plan.passes == ()


def test_counts_convert_only_by_width_and_extent() -> None:
    assert RequestCount(3).tokens(width=7) == TokenCount(21)
    assert TokenCount(21).padded(extent=28) == PaddedTokenCount(28)
    with pytest.raises(AssertionError, match="below the 21 real rows"):
        TokenCount(21).padded(extent=20)
    with pytest.raises(AssertionError):
        RequestCount(-1)
    with pytest.raises(TypeError):
        RequestCount(1) + TokenCount(1)  # type: ignore[operator]


@st.composite
def rank_rows(draw: st.DrawFn) -> RankRow:
    verify = draw(st.integers(0, 9))
    prefill = draw(st.integers(0, 3))
    return RankRow(
        prefill_requests=prefill,
        prefill_tokens=prefill * draw(st.integers(1, 50)) if prefill else 0,
        prefill_logit_rows=draw(st.integers(0, prefill)),
        draft_requests=draw(st.integers(0, verify)),
        verify_requests=verify,
        verify_tokens=draw(st.integers(verify, verify * (GAMMA + 1))) if verify else 0,
        graph_capable=draw(st.integers(0, 1)),
    )


@given(st.lists(rank_rows(), min_size=1, max_size=6))
def test_plan_is_consistent_for_any_rows(rows: list[RankRow]) -> None:
    plan = plan_step([RankRow.decode(row.encode()) for row in rows], tiers=(1, 2, 4, 8), widths=WIDTHS)
    assert plan == plan_step(rows, tiers=(1, 2, 4, 8), widths=WIDTHS)
    kinds = [p.kind for p in plan.passes]
    assert kinds == [k for k in PassKind if k in kinds], "passes run in one order"
    for pass_plan in plan.passes:
        assert any(c.value for c in pass_plan.requests), "a pass nobody needs is not run"
        if pass_plan.tier:
            assert pass_plan.tier >= max(c.value for c in pass_plan.requests)
            assert {c.value for c in pass_plan.padded_tokens} == {pass_plan.tier * pass_plan.width}
        else:
            assert [c.value for c in pass_plan.padded_tokens] == [c.value for c in pass_plan.tokens]
        if pass_plan.kind is PassKind.PREFILL or not all(row.graph_capable for row in rows):
            assert pass_plan.tier == EAGER


def test_a_rank_that_decodes_keeps_its_tier_while_another_prefills() -> None:
    prefill = dataclasses.replace(IDLE_ROW, prefill_requests=1, prefill_tokens=128, prefill_logit_rows=1)
    alone = plan_step([decode_row(2), IDLE_ROW], tiers=(1, 2, 4, 8), widths=WIDTHS)
    mixed = plan_step([decode_row(2), prefill], tiers=(1, 2, 4, 8), widths=WIDTHS)
    assert mixed.family is StepFamily.MIXED
    assert [p.kind for p in mixed.passes] == [PassKind.PREFILL, PassKind.DRAFT, PassKind.VERIFY]
    assert [p.tier for p in mixed.passes] == [EAGER, 2, 2]
    assert mixed.passes[1:] == alone.passes, "who prefills changes nothing about the decode passes"


@pytest.mark.parametrize(("kind", "width"), [(PassKind.DRAFT, GAMMA), (PassKind.VERIFY, GAMMA + 1)])
def test_a_capture_has_the_extents_of_the_steps_it_serves(kind: PassKind, width: int) -> None:
    captured = plan_capture(kind, tier=4, widths=WIDTHS, num_ranks=4)
    served = plan_step([decode_row(n) for n in (1, 3, 0, 2)], tiers=(4,), widths=WIDTHS).find(kind)
    assert served is not None
    for name in ("kind", "width", "tier", "padded_requests", "padded_tokens", "padding_mode"):
        assert getattr(captured, name) == getattr(served, name), name
    assert captured.width == width
    assert not any(count.value for count in captured.requests)
    assert not any(count.value for count in captured.tokens)
