"""Acceptance decision by decision: greedy runs, replayed sampled runs, mixes, and requests on their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling.helpers import TableDrafter, make_state, sample, verify_rows
from torch import Tensor

from outrider.sampling.processors import Distribution, process
from outrider.sampling.proposal import Proposal, propose
from outrider.sampling.random import Role, uniforms
from outrider.sampling.rejection import Accepted, accept
from outrider.sampling.sampler import draw
from outrider.sampling.state import LogitRow

VOCAB, GAMMA = 12, 4


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=GAMMA + 1, max_size=GAMMA + 1),
            st.lists(st.integers(0, 2), max_size=GAMMA),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_greedy_accepts_while_the_draft_is_the_argmax(cases: list[tuple[list[int], list[int]]]) -> None:
    rows: list[LogitRow] = []
    logits: list[Tensor] = []
    expected = []
    for argmax, drafts in cases:
        rows += verify_rows(make_state(temperature=0), drafts)
        logits += [torch.eye(3)[token] for token in argmax[: len(drafts) + 1]]
        n = 0
        while n < len(drafts) and drafts[n] == argmax[n]:
            n += 1
        expected.append(Accepted(n, (*drafts[:n], argmax[n])))
    got = accept(
        dist=process(torch.stack(logits), rows),
        rows=rows,
        proposal=Proposal.one_hot([drafts for _, drafts in cases]),
        widths=[len(drafts) + 1 for _, drafts in cases],
    )
    assert got == expected


@dataclass(frozen=True, slots=True)
class Round:
    """One round of several requests."""

    dist: Distribution
    rows: list[LogitRow]
    proposal: Proposal
    widths: list[int]

    def accept(self) -> list[Accepted]:
        return accept(dist=self.dist, rows=self.rows, proposal=self.proposal, widths=self.widths)


def make_round(
    params: list[dict[str, Any]],
    widths: list[int],
    *,
    draft_to_target: list[int] | None = None,
    only: int | None = None,
) -> Round:
    """Random target and drafter; ``only`` leaves out every request but one, whose logits stay the same."""
    generator = torch.Generator().manual_seed(21)
    drafter = TableDrafter.flat(VOCAB, draft_to_target)
    num_columns = drafter.draft_to_target_V.shape[0]
    base = torch.randn(len(params), GAMMA, num_columns, generator=generator) * 2
    target = torch.randn(len(params), GAMMA + 1, VOCAB, generator=generator)
    target[..., drafter.draft_to_target_V] += torch.nn.functional.pad(base, (0, 0, 0, 1))  # alike, so some pass
    chosen = range(len(params)) if only is None else [only]
    states = [make_state(seed=100 + r, prompt=[1] * (r + 1), **params[r]) for r in chosen]
    proposal = propose(
        drafter=drafter,
        base_logits_RGV=base[list(chosen)],
        hidden_RGD=torch.zeros(len(states), GAMMA, 1),
        anchor_ids_R=torch.ones(len(states), dtype=torch.int64),
        rows=[verify_rows(state)[0] for state in states],
        num_drafts_R=[GAMMA] * len(states),
        confidence=False,
    )
    kept = [widths[r] for r in chosen]
    rows = [
        row
        for state, ids, width in zip(states, proposal.draft_ids, kept, strict=True)
        for row in verify_rows(state, ids[: width - 1])
    ]
    logits = torch.cat([target[r, : widths[r]] for r in chosen])
    return Round(dist=process(logits, rows), rows=rows, proposal=proposal, widths=kept)


def uniform(row: LogitRow, role: Role) -> Tensor:
    return uniforms(seeds=[row.state.seed], positions=[row.position], role=role, round_positions=[row.anchor_position])


def replay(case: Round, request: int) -> Accepted:
    """One sampled request with scalar arithmetic over the target's whole vocabulary."""
    start = sum(case.widths[:request])
    drafts = case.proposal.draft_ids[request][: case.widths[request] - 1]
    for k, token in enumerate(drafts):
        p_V = case.dist.probs_NV[start + k].double()
        q_V = torch.zeros(VOCAB, dtype=torch.float64)
        if not case.proposal.q_steps:
            q_V[token] = 1.0
        else:
            ids = case.proposal.draft_to_target
            q_V[torch.arange(VOCAB) if ids is None else ids] = case.proposal.q_steps[k][request].double()
        row = case.rows[start + k]
        if uniform(row, Role.ACCEPT).item() >= min(1.0, (p_V[token] / q_V[token]).item()):
            residual_V = (p_V - q_V).clamp(min=0)
            last = int(draw((residual_V / residual_V.sum())[None], uniform(row, Role.RECOVER)))
            return Accepted(k, (*drafts[:k], last))
    row = case.rows[start + len(drafts)]
    last = int(draw(case.dist.probs_NV[start + len(drafts)][None], uniform(row, Role.TARGET)))
    return Accepted(len(drafts), (*drafts, last))


@pytest.mark.parametrize("draft_to_target", [None, [11, 3, 0, 7, 5, 8, 1]])
def test_replayed_decisions(draft_to_target: list[int] | None) -> None:
    params: list[dict[str, Any]] = [{}, {"top_k": 4}, {"temperature": 0.6, "top_p": 0.8}, {"presence_penalty": 1.0}] * 8
    widths = [1 + r % (GAMMA + 1) for r in range(len(params))]
    case = make_round(params, widths, draft_to_target=draft_to_target)
    got = case.accept()
    assert got == [replay(case, r) for r in range(len(params))]
    assert {result.num_accepted for result in got} == set(range(GAMMA + 1))


def test_replayed_decisions_of_determined_drafts() -> None:
    params: list[dict[str, Any]] = [{"top_p": 0.9}, {}] * 10
    model = make_round(params, [GAMMA + 1] * 20)
    case = Round(model.dist, model.rows, Proposal.one_hot(model.proposal.draft_ids), model.widths)
    got = case.accept()
    assert got == [replay(case, r) for r in range(20)]
    assert {result.num_accepted for result in got} >= {0, 1}


MIX: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"top_k": 3}, {"temperature": 0, "frequency_penalty": 1.5}, {"top_p": 0.7},
    {"repetition_penalty": 1.4}, {"temperature": 0}, {"min_p": 0.1},
]  # fmt: skip
MIX_WIDTHS = [5, 5, 3, 4, 1, 5, 1, 2]


def test_results_do_not_depend_on_batch_mates() -> None:
    together = make_round(MIX, MIX_WIDTHS).accept()
    alone = [make_round(MIX, MIX_WIDTHS, only=r).accept()[0] for r in range(len(MIX))]
    assert together == alone
    backwards = list(reversed(range(len(MIX))))
    case = make_round(MIX, MIX_WIDTHS)
    starts = [sum(MIX_WIDTHS[:r]) for r in range(len(MIX))]
    order = [n for r in backwards for n in range(starts[r], starts[r] + MIX_WIDTHS[r])]
    reordered = accept(
        dist=Distribution(case.dist.greedy_N[order], case.dist.argmax_N[order], case.dist.probs_NV[order]),
        rows=[case.rows[n] for n in order],
        proposal=Proposal(
            tuple(case.proposal.draft_ids[r] for r in backwards),
            tuple(q[backwards] for q in case.proposal.q_steps),
            case.proposal.draft_to_target,
            case.proposal.confidence_logits[backwards],
        ),
        widths=[MIX_WIDTHS[r] for r in backwards],
    )
    assert reordered == [together[r] for r in backwards]


def test_width_one_is_plain_sampling() -> None:
    case = make_round(MIX, [1] * len(MIX))
    assert [result.token_ids for result in case.accept()] == [
        (token,) for token in sample(case.dist, case.rows).tolist()
    ]
    without_drafts = Round(case.dist, case.rows, Proposal.one_hot([()] * len(MIX)), case.widths)
    assert without_drafts.accept() == case.accept()


def test_equal_distributions_accept_everything() -> None:
    case = make_round([{}] * 16, [2] * 16)
    same_q = Proposal(case.proposal.draft_ids, (case.dist.probs_NV[0::2],), None, case.proposal.confidence_logits)
    assert all(r.num_accepted == 1 for r in accept(dist=case.dist, rows=case.rows, proposal=same_q, widths=case.widths))


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """With twice p in place of q half of the drafts are rejected, and nothing is left of p - q."""
    case = make_round([{}] * 16, [2] * 16)
    twice = Proposal(case.proposal.draft_ids, (case.dist.probs_NV[0::2] * 2,), None, case.proposal.confidence_logits)
    results = accept(dist=case.dist, rows=case.rows, proposal=twice, widths=case.widths)
    rejected = [r for r, result in enumerate(results) if result.num_accepted == 0]
    assert 3 <= len(rejected) <= 13
    for r in rejected:
        expected = draw(case.dist.probs_NV[2 * r : 2 * r + 1], uniform(case.rows[2 * r], Role.RECOVER))
        assert results[r].token_ids == tuple(expected.tolist())
