"""Compiled drafting and accepting: against torch, exactly where only exponentials may differ, and in any company.

``probabilities`` reads what a row is sampled from off a walk of one slot without a bias. Given these, everything else
is exact: drafts are what ``draw`` makes of the recorded q, acceptance is what ``rejection.accept`` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels import needs_kernels
from tests.sampling.helpers import make_state, verify_rows
from torch import Tensor

from outrider.ops.compiled_head import CompiledHead, MarkovTable
from outrider.ops.native_kernels import Kernels, build_kernels, load_kernels
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat
from outrider.sampling import rejection
from outrider.sampling.backend import SamplingBackend, TorchSampling
from outrider.sampling.compiled import CompiledSampling
from outrider.sampling.processors import Distribution, process
from outrider.sampling.proposal import Proposal, columns_of_ids
from outrider.sampling.random import Role
from outrider.sampling.rejection import Accepted
from outrider.sampling.sampler import draw, row_uniforms
from outrider.sampling.state import LogitRow, SequenceState

pytestmark = needs_kernels

VOCAB, RANK, HIDDEN, SLOTS = 2100, 5, 7, 4  # more than two stretches of columns, and a ragged panel at the end
SLICED = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:1111]


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


class Drafter:
    """A vanilla head and a confidence head, for both backends."""

    def __init__(self, kernels: Kernels, *, sliced: bool, markov: bool = True, dtype: torch.dtype = torch.float32):
        self.draft_to_target_V = SLICED if sliced else torch.arange(VOCAB)
        columns = self.draft_to_target_V.numel()
        self._kernels = kernels
        self._features_Vr = random(VOCAB, RANK, seed=2).to(dtype)
        weight = random(columns, RANK, seed=3)
        self._bias = PackedMatrix.pack(kernels, weight, None, weight_format=WeightFormat.INT8, name="bias")
        self._confidence_X = random(HIDDEN + (RANK if markov else 0) + 1, seed=4)
        self._markov = markov
        self.compiled_head = CompiledHead(
            vocab_size=VOCAB,
            markov=MarkovTable(features_Vr=self._features_Vr, bias=self._bias) if markov else None,
            confidence_X=self._confidence_X,
            draft_to_target_V=self.draft_to_target_V if sliced else None,
        )

    def markov_state(self, num_requests: int) -> Tensor:
        return torch.zeros(num_requests, 0)

    def markov_bias(self, prev_ids_R: Tensor, hidden_RD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self._markov:
            return torch.zeros(prev_ids_R.shape[0], self.draft_to_target_V.numel()), state
        return self._bias.linear(self._kernels, self._features_Vr[prev_ids_R]), state

    def confidence_logits(self, hidden_RD: Tensor, prev_ids_R: Tensor) -> Tensor:
        parts = [hidden_RD, self._features_Vr[prev_ids_R].float()] if self._markov else [hidden_RD]
        return (torch.cat(parts, dim=1) * self._confidence_X[:-1]).sum(dim=1) + self._confidence_X[-1]


MIX: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.6, "top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05},
    {"temperature": 1.4, "top_k": 300, "top_p": 0.95, "min_p": 1e-4}, {"top_k": 1}, {"presence_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.3}, {"min_tokens": 3}, {"logit_bias": {7: 5.0}, "top_p": 0.8},
]  # fmt: skip


def states_of(mix: Sequence[dict[str, Any]] = tuple(MIX), *, seed: int = 100) -> list[SequenceState]:
    return [make_state(seed=seed + r, prompt=[1] * (r + 1), output=[4], **params) for r, params in enumerate(mix)]


def draft(
    backend: SamplingBackend,
    drafter: Drafter,
    states: Sequence[SequenceState],
    *,
    base: Tensor | None = None,
    num_drafts: Sequence[int] | None = None,
    chosen: Sequence[int] | None = None,
    confidence: bool = True,
) -> Proposal:
    """``chosen``: these requests alone, with what they have among all ``states``."""
    if base is None:
        base = random(len(states), SLOTS, drafter.draft_to_target_V.numel(), seed=5, scale=2.0)
    hidden = random(len(states), SLOTS + 1, HIDDEN, seed=6)[:, 1:]  # requests lie apart, as in the proposer
    picked = list(range(len(states))) if chosen is None else list(chosen)
    return backend.propose(
        drafter=drafter,
        base_logits_RGV=base[picked],
        hidden_RGD=hidden if chosen is None else hidden[picked],
        anchor_ids_R=torch.arange(len(states))[picked] * 3,
        rows=[verify_rows(states[r])[0] for r in picked],
        num_drafts_R=[base.shape[1]] * len(picked) if num_drafts is None else [num_drafts[r] for r in picked],
        confidence=confidence,
    )


def probabilities(kernels: Kernels, logits_NV: Tensor, states: Sequence[SequenceState]) -> Tensor:
    """What each row is sampled from; zeros at greedy rows."""
    drafter = Drafter(kernels, sliced=False, markov=False)
    drafter.compiled_head = CompiledHead(vocab_size=VOCAB, markov=None, confidence_X=None, draft_to_target_V=None)
    (q_NV,) = draft(CompiledSampling(kernels), drafter, states, base=logits_NV[:, None], confidence=False).q_steps
    return q_NV


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found > 1e-30, expected > 1e-30)  # torch keeps smaller ones, which are never drawn
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("sliced", [False, True])
def test_a_walk_is_the_one_in_torch(kernels: Kernels, sliced: bool, markov: bool, dtype: torch.dtype) -> None:
    drafter, states = Drafter(kernels, sliced=sliced, markov=markov, dtype=dtype), states_of()
    found, expected = (draft(b, drafter, states) for b in (CompiledSampling(kernels), TorchSampling()))
    assert found.draft_ids == expected.draft_ids
    for q_RV, expected_RV in zip(found.q_steps, expected.q_steps, strict=True):
        close(q_RV, expected_RV)
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, rtol=1e-5, atol=1e-5)
    assert (found.draft_to_target is None) == (not sliced)
    assert not sliced or torch.equal(found.draft_to_target, SLICED)  # type: ignore[arg-type]


@pytest.mark.parametrize("sliced", [False, True])
def test_drafts_are_drawn_from_what_is_recorded(kernels: Kernels, sliced: bool) -> None:
    """To the bit: the recorded row and the named random number give the draft."""
    drafter, states = Drafter(kernels, sliced=sliced), states_of([MIX[r % 8] for r in range(24)])
    proposal = draft(CompiledSampling(kernels), drafter, states)
    for r, state in enumerate(states):
        for k, token_id in enumerate(proposal.draft_ids[r]):
            q_1V = proposal.q_steps[k][r : r + 1]
            if state.is_greedy:
                assert not q_1V.any()
                continue
            assert float(q_1V.double().sum()) == pytest.approx(1.0, abs=1e-5)
            first = verify_rows(state)[0]
            row = LogitRow(state, (), first.position + k, first.anchor_position)
            column = int(draw(q_1V, row_uniforms([row], Role.PROPOSE)))
            assert token_id == int(drafter.draft_to_target_V[column])


def test_greedy_requests_record_nothing(kernels: Kernels) -> None:
    drafter = Drafter(kernels, sliced=True)
    states = states_of([{"temperature": 0.0}] * 3)
    base = torch.randint(0, 3, (3, SLOTS, SLICED.numel()), generator=torch.Generator().manual_seed(8)).float()
    found, expected = (draft(b, drafter, states, base=base) for b in (CompiledSampling(kernels), TorchSampling()))
    assert found.q_steps == ()
    assert found.draft_ids == expected.draft_ids


def test_a_walk_does_not_depend_on_batch_mates_or_depth(kernels: Kernels) -> None:
    drafter, states, backend = Drafter(kernels, sliced=True), states_of(), CompiledSampling(kernels)
    together = draft(backend, drafter, states)
    shallow = draft(backend, drafter, states, num_drafts=[r % (SLOTS + 1) for r in range(len(states))])
    for r in range(len(states)):
        alone = draft(backend, drafter, states, chosen=[r])
        assert alone.draft_ids[0] == together.draft_ids[r]
        assert torch.equal(alone.confidence_logits[0], together.confidence_logits[r])
        assert shallow.draft_ids[r] == together.draft_ids[r][: r % (SLOTS + 1)]
        for k, q_RV in enumerate(alone.q_steps):
            assert torch.equal(q_RV[0], together.q_steps[k][r])


def test_no_drafts_asked_for(kernels: Kernels) -> None:
    drafter, states = Drafter(kernels, sliced=True), states_of(MIX[:2])
    proposal = draft(CompiledSampling(kernels), drafter, states, num_drafts=[0, 0])
    assert proposal.draft_ids == ((), ())
    assert proposal.q_steps == ()


def test_a_drafter_that_is_not_finite_drafts_all_the_same(kernels: Kernels) -> None:
    drafter, states = Drafter(kernels, sliced=True), states_of([{}, {"temperature": 0.0}, {"temperature": 0.7}, {}])
    base = random(4, SLOTS, SLICED.numel(), seed=5, scale=2.0)
    clean = draft(CompiledSampling(kernels), drafter, states, base=base)
    base[1, 0, 9], base[2, 1] = torch.inf, torch.nan
    base[0, 2, :900], base[0, 2, 900] = -torch.inf, torch.nan
    found, expected = (draft(b, drafter, states, base=base) for b in (CompiledSampling(kernels), TorchSampling()))
    assert found.draft_ids == expected.draft_ids
    assert found.draft_ids[1][0] == int(SLICED[9])
    assert found.draft_ids[3] == clean.draft_ids[3]
    assert set(sum(found.draft_ids, ())) <= set(SLICED.tolist())


logits_with_ties = st.tuples(st.integers(1, 40), st.sampled_from([0.25, 1.0, 3.0, 40.0]), st.integers(0, 2**20))
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.8, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 17, 200, VOCAB - 1, VOCAB, VOCAB + 5]),
        "top_p": st.sampled_from([1.0, 0.99, 0.9, 0.5, 1e-3]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.02, 0.4, 1.0]),
    }
)


@given(st.lists(st.tuples(logits_with_ties, filters), min_size=1, max_size=4))
def test_probabilities_are_those_in_torch(cases: list[tuple[tuple[int, float, int], dict[str, Any]]]) -> None:
    """Filters keep the same tokens among ties: few different logits, spread wide or not at all."""
    kernels = load_kernels()
    assert kernels is not None
    rows = []
    for (levels, step, seed), _ in cases:
        generator = torch.Generator().manual_seed(seed)
        row = torch.randint(0, levels, (VOCAB,), generator=generator).float() * step
        rows.append(torch.where(torch.rand(VOCAB, generator=generator) < 0.1, -torch.inf, row))
    states = states_of([params for _, params in cases])
    logits_NV = torch.stack(rows).nan_to_num()
    expected = process(logits_NV, [verify_rows(state)[0] for state in states]).probs_NV
    close(probabilities(kernels, logits_NV, states), expected)


def verify(
    backend: SamplingBackend,
    logits_NV: Tensor,
    states: Sequence[SequenceState],
    proposal: Proposal,
    widths: Sequence[int],
) -> list[Accepted]:
    return backend.accept(logits_NV=logits_NV, rows=rows_of(states, proposal, widths), proposal=proposal, widths=widths)


def rows_of(states: Sequence[SequenceState], proposal: Proposal, widths: Sequence[int]) -> list[LogitRow]:
    return [
        row
        for state, ids, width in zip(states, proposal.draft_ids, widths, strict=True)
        for row in verify_rows(state, ids[: width - 1])
    ]


class Round:
    """Drafts of many requests, and a target that agrees with the drafter more or less."""

    def __init__(self, kernels: Kernels, *, sliced: bool, mix: Sequence[dict[str, Any]] = MIX * 6) -> None:
        self.states = states_of(mix)
        drafter, count = Drafter(kernels, sliced=sliced, markov=False), len(self.states)
        base = random(count, SLOTS, drafter.draft_to_target_V.numel(), seed=5, scale=2.0)
        self.proposal = draft(CompiledSampling(kernels), drafter, self.states, base=base, confidence=False)
        self.widths = [1 + (3 * r) % (SLOTS + 1) for r in range(count)]
        target = random(count, SLOTS + 1, VOCAB, seed=9, scale=0.5)
        target[:, :SLOTS, drafter.draft_to_target_V] += base
        self.logits_NV = torch.cat([target[r, :width] for r, width in enumerate(self.widths)])
        ids_G = [ids[: width - 1] for ids, width in zip(self.proposal.draft_ids, self.widths, strict=True)]
        self.one_hot = Proposal.one_hot(ids_G)

    def probabilities(self, kernels: Kernels) -> Tensor:
        per_row = [state for state, width in zip(self.states, self.widths, strict=True) for _ in range(width)]
        return probabilities(kernels, self.logits_NV, per_row)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_acceptance_is_the_one_in_torch(kernels: Kernels, sliced: bool, one_hot: bool) -> None:
    """Edited rows, filtered support, greedy requests and all widths in one batch."""
    case = Round(kernels, sliced=sliced)
    proposal = case.one_hot if one_hot else case.proposal
    found, expected = (
        verify(b, case.logits_NV, case.states, proposal, case.widths)
        for b in (CompiledSampling(kernels), TorchSampling())
    )
    assert found == expected
    assert {result.num_accepted for result in found} >= ({0, 1, 2, 3} if one_hot else set(range(SLOTS + 1)))


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("one_hot", [False, True])
def test_acceptance_is_exact_given_its_probabilities(kernels: Kernels, sliced: bool, one_hot: bool) -> None:
    """u < p / q, the residual's draw, the draw behind all drafts: to the bit what torch decides on the same p and q."""
    case = Round(kernels, sliced=sliced, mix=MIX[2:8] * 20)
    proposal = case.one_hot if one_hot else case.proposal
    count = case.logits_NV.shape[0]
    dist = Distribution(torch.zeros(count, dtype=torch.bool), torch.full((count,), -1), case.probabilities(kernels))
    rows = rows_of(case.states, proposal, case.widths)
    expected = rejection.accept(dist=dist, rows=rows, proposal=proposal, widths=case.widths)
    assert verify(CompiledSampling(kernels), case.logits_NV, case.states, proposal, case.widths) == expected


def test_residuals_without_mass_and_without_the_draft(kernels: Kernels) -> None:
    """q = p: every draft passes. q = 2 p: half of them fail, nothing is left of p - q, and p is drawn from."""
    states = states_of([{}, {"top_k": 20}] * 12)
    logits_NV = random(2 * len(states), VOCAB, seed=10, scale=2.0)
    widths = [2] * len(states)
    p_NV = probabilities(kernels, logits_NV, [state for state in states for _ in range(2)])
    drafts = [(int(draw(p_V[None], torch.tensor([0.37]))),) for p_V in p_NV[::2]]
    numbers = torch.empty(len(states), 0)
    same = Proposal(tuple(drafts), (p_NV[::2].contiguous(),), None, numbers)
    twice = Proposal(tuple(drafts), (2 * p_NV[::2],), None, numbers)
    backend = CompiledSampling(kernels)
    assert all(result.num_accepted == 1 for result in verify(backend, logits_NV, states, same, widths))
    found = verify(backend, logits_NV, states, twice, widths)
    rejected = [r for r, result in enumerate(found) if result.num_accepted == 0]
    assert 4 <= len(rejected) <= 20
    for r in rejected:
        uniform = row_uniforms([verify_rows(states[r])[0]], Role.RECOVER)
        assert found[r].token_ids == (int(draw(p_NV[2 * r : 2 * r + 1], uniform)),)


def test_acceptance_does_not_depend_on_batch_mates(kernels: Kernels) -> None:
    case, backend = Round(kernels, sliced=True, mix=MIX), CompiledSampling(kernels)
    together = verify(backend, case.logits_NV, case.states, case.proposal, case.widths)
    starts = [sum(case.widths[:r]) for r in range(len(case.widths))]
    order = list(reversed(range(len(MIX))))
    for chosen in (order, *([r] for r in order)):
        proposal = Proposal(
            tuple(case.proposal.draft_ids[r] for r in chosen),
            tuple(q_RV[chosen] for q_RV in case.proposal.q_steps),
            case.proposal.draft_to_target,
            torch.empty(len(chosen), 0),
        )
        logits = torch.cat([case.logits_NV[starts[r] : starts[r] + case.widths[r]] for r in chosen])
        widths = [case.widths[r] for r in chosen]
        found = verify(backend, logits, [case.states[r] for r in chosen], proposal, widths)
        assert found == [together[r] for r in chosen]


def test_rows_behind_a_rejection_are_not_looked_at(kernels: Kernels) -> None:
    case, backend = Round(kernels, sliced=False), CompiledSampling(kernels)
    found = verify(backend, case.logits_NV, case.states, case.proposal, case.widths)
    start = 0
    for result, width in zip(found, case.widths, strict=True):
        case.logits_NV[start + result.num_accepted + 1 : start + width] = torch.nan
        start += width
    assert verify(backend, case.logits_NV, case.states, case.proposal, case.widths) == found


def test_logits_that_are_not_finite_concern_their_request_alone(kernels: Kernels) -> None:
    case, backend = Round(kernels, sliced=False, mix=MIX[:8] * 3), CompiledSampling(kernels)
    clean = verify(backend, case.logits_NV, case.states, case.proposal, case.widths)
    starts = [sum(case.widths[:r]) for r in range(len(case.widths))]
    broken = {0: torch.nan, 1: torch.nan, 4: torch.inf, 9: torch.inf, 11: -torch.inf, 15: torch.nan}
    for r, value in broken.items():
        case.logits_NV[starts[r]] = value
    found = verify(backend, case.logits_NV, case.states, case.proposal, case.widths)
    for r, result in enumerate(found):
        assert r in broken or result == clean[r]
        assert all(0 <= token_id < VOCAB for token_id in result.token_ids)


def test_the_argmax_is_the_first_of_equals_and_nan_the_largest(kernels: Kernels) -> None:
    logits_NV = torch.randint(0, 3, (9, VOCAB), generator=torch.Generator().manual_seed(12)).float()
    logits_NV[3], logits_NV[4], logits_NV[5, 2090], logits_NV[6, 17] = -torch.inf, 0.0, torch.nan, torch.inf
    logits_NV[7, VOCAB - 1], logits_NV[8] = 5.0, -3e38
    states = states_of([{"temperature": 0.0}] * 9)
    found = verify(CompiledSampling(kernels), logits_NV, states, Proposal.one_hot([()] * 9), [1] * 9)
    assert [result.token_ids for result in found] == [(i,) for i in logits_NV.numpy().argmax(-1).tolist()]


def test_rows_that_are_finite(kernels: Kernels) -> None:
    x_NI = torch.full((7, VOCAB), 3e38)  # a sum of these is not finite, each of them is
    for row, (column, value) in enumerate(
        [(0, torch.nan), (VOCAB - 1, torch.inf), (70, -torch.inf), (1999, -torch.nan)]
    ):
        x_NI[row, column] = value
    assert kernels.finite_rows(x_NI) == (False,) * 4 + (True,) * 3
    assert kernels.finite_rows(x_NI[:0]) == ()


def test_ids_beyond_a_vocabulary_are_refused(kernels: Kernels) -> None:
    backend, drafter, states = CompiledSampling(kernels), Drafter(kernels, sliced=True), states_of([{}])
    logits_NV = torch.zeros(2, VOCAB)
    absent = int((columns_of_ids(SLICED) < 0).nonzero()[0])
    q_1V = torch.full((1, SLICED.numel()), 1 / SLICED.numel())
    for ids, q_steps, id_map in (
        ((VOCAB,), (), None),
        ((-1,), (), None),
        ((absent,), (q_1V,), SLICED),
        ((SLICED.numel(),), (q_1V,), None),
    ):
        with pytest.raises(AssertionError, match="beyond the vocabulary"):
            verify(backend, logits_NV, states, Proposal((ids,), q_steps, id_map, torch.empty(1, 0)), [2])
    with pytest.raises(AssertionError, match="beyond the vocabulary"):
        backend.propose(
            drafter=drafter,
            base_logits_RGV=torch.zeros(1, SLOTS, SLICED.numel()),
            hidden_RGD=torch.zeros(1, SLOTS, HIDDEN),
            anchor_ids_R=torch.tensor([VOCAB]),
            rows=[verify_rows(states[0])[0]],
            num_drafts_R=[1],
            confidence=False,
        )


@pytest.mark.parametrize("architecture", [("-march=x86-64-v3",), ("-march=x86-64",)], ids=" ".join)
def test_every_instruction_set_gives_the_same_bits(kernels: Kernels, architecture: tuple[str, ...]) -> None:
    other = build_kernels(architecture, threads=1)
    if other is None:
        pytest.skip("this compiler builds for another family of processors")
    drafter, states = Drafter(kernels, sliced=True), states_of()
    here, there = (draft(CompiledSampling(each), drafter, states) for each in (kernels, other))
    assert here.draft_ids == there.draft_ids
    assert torch.equal(torch.stack(here.q_steps), torch.stack(there.q_steps))
    assert torch.equal(here.confidence_logits, there.confidence_logits)
    case = Round(kernels, sliced=True)
    results = [
        verify(CompiledSampling(each), case.logits_NV, case.states, case.proposal, case.widths)
        for each in (kernels, other)
    ]
    assert results[0] == results[1]
