"""The emitted tokens have exactly the target's distribution, whatever the drafter's.

Target p = (.10, .60, .30) on three tokens at every position, drafter q = (.45, .10, .45), the other logits at -30;
WIDE is a pair whose residual has two tokens. 20,000 sequences with distinct seeds, in the quick run for the plain
case only; in torch and compiled. Drafts are kept right through rounds as the engine does: rejected ones are drafted
again in the next round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.kernels import needs_kernels
from tests.sampling.helpers import TableDrafter, chi_square_p, verify_rows

from outrider.ops.native_kernels import Kernels
from outrider.sampling import rejection
from outrider.sampling.backend import SamplingBackend, TorchSampling
from outrider.sampling.compiled import CompiledSampling
from outrider.sampling.proposal import Proposal
from outrider.sampling.random import Role
from outrider.sampling.sampler import row_uniforms
from outrider.sampling.state import LogitRow, SequenceState
from outrider.sampling_params import SamplingParams

NUM_SEQUENCES, NUM_QUICK, GAMMA, VOCAB, POSITIONS = 20_000, 4_000, 3, 8, 4


@dataclass(frozen=True, slots=True)
class Pair:
    p: tuple[float, float, float]  # target
    q: tuple[float, float, float]  # drafter


MAIN = Pair((0.10, 0.60, 0.30), (0.45, 0.10, 0.45))
WIDE = Pair((0.50, 0.30, 0.20), (0.10, 0.10, 0.80))
ALPHA = 1e-3


def logits_of(probs: Sequence[float]) -> torch.Tensor:
    return torch.cat((torch.tensor(probs).log(), torch.full((VOCAB - len(probs),), -30.0)))


MakeProposal = Callable[[SamplingBackend, list[SequenceState]], Proposal]


def model_proposal(pair: Pair = MAIN, draft_to_target: Sequence[int] | None = None) -> MakeProposal:
    """Drafts drawn from the pair's q, over the whole vocabulary or the given slice of it."""
    drafter = TableDrafter.flat(VOCAB, draft_to_target)
    base_V = logits_of(pair.q)[drafter.draft_to_target_V]

    def make(backend: SamplingBackend, states: list[SequenceState]) -> Proposal:
        return backend.propose(
            drafter=drafter,
            base_logits_RGV=base_V.expand(len(states), GAMMA, -1),
            hidden_RGD=torch.zeros(len(states), GAMMA, 1),
            anchor_ids_R=torch.zeros(len(states), dtype=torch.int64),
            rows=[verify_rows(state)[0] for state in states],
            num_drafts_R=[GAMMA] * len(states),
            confidence=False,
        )

    return make


def lookup_proposal(backend: SamplingBackend, states: list[SequenceState]) -> Proposal:
    """Determined drafts, likely and unlikely ones."""
    return Proposal.one_hot([(1, 0, 2)] * len(states))


@dataclass(frozen=True, slots=True)
class Case:
    expected: tuple[float, ...]
    params: dict[str, Any] = field(default_factory=dict)
    pair: Pair = MAIN
    make_proposal: MakeProposal = field(default_factory=model_proposal)
    shorten: bool = False  # keep 0..GAMMA drafts, by sequence and round


@pytest.fixture(params=["torch", pytest.param("compiled", marks=needs_kernels)])
def backend(request: pytest.FixtureRequest) -> SamplingBackend:
    if request.param == "torch":
        return TorchSampling()
    kernels: Kernels = request.getfixturevalue("kernels")
    return CompiledSampling(kernels)


def simulate(case: Case, num_sequences: int, backend: SamplingBackend) -> list[tuple[int, ...]]:
    """The first POSITIONS tokens of each sequence."""
    shared = SamplingParams(max_tokens=None, **case.params)
    states = [
        SequenceState(params=shared, seed=seed, prompt_token_ids=(0,), eos_token_ids=())
        for seed in range(num_sequences)
    ]
    pending = states
    while pending:
        proposal = case.make_proposal(backend, pending)
        widths = [1 + GAMMA] * len(pending)
        if case.shorten:
            widths = [1 + (state.seed + len(state.output_token_ids)) % (GAMMA + 1) for state in pending]
        rows = [
            row
            for state, ids, width in zip(pending, proposal.draft_ids, widths, strict=True)
            for row in verify_rows(state, ids[: width - 1])
        ]
        logits_NV = logits_of(case.pair.p).repeat(len(rows), 1)
        results = backend.accept(logits_NV=logits_NV, rows=rows, proposal=proposal, widths=widths)
        for state, result in zip(pending, results, strict=True):
            assert len(result.token_ids) == result.num_accepted + 1
            state.append(result.token_ids)
        pending = [state for state in pending if len(state.output_token_ids) < POSITIONS]
    return [tuple(state.output_token_ids[:POSITIONS]) for state in states]


def p_values(sequences: Sequence[tuple[int, ...]], probs: Sequence[float]) -> list[float]:
    """Of each position, then of the joint of the first two; 0 where a token without probability was emitted."""
    values = []
    for position in range(POSITIONS):
        tokens = [sequence[position] for sequence in sequences]
        values.append(chi_square_p([tokens.count(t) for t in range(VOCAB)], [*probs, *[0.0] * (VOCAB - 3)]))
    pairs = [sequence[:2] for sequence in sequences]
    cells = list(itertools.product(range(3), repeat=2))
    values.append(chi_square_p([pairs.count(cell) for cell in cells], [probs[a] * probs[b] for a, b in cells]))
    return values


def tempered(temperature: float) -> tuple[float, ...]:
    masses = [p ** (1 / temperature) for p in MAIN.p]
    return tuple(mass / sum(masses) for mass in masses)


CASES = {
    "plain": Case(MAIN.p),
    "top_p": Case((0.0, 2 / 3, 1 / 3), {"top_p": 0.9}),
    "top_k": Case((0.0, 2 / 3, 1 / 3), {"top_k": 2}),
    "temperature": Case(tempered(0.7), {"temperature": 0.7}),
    "wide residual": Case(WIDE.p, pair=WIDE, make_proposal=model_proposal(WIDE)),
    "sliced vocabulary": Case(MAIN.p, make_proposal=model_proposal(MAIN, [2, 0, 5])),
    "fewer drafts kept": Case(MAIN.p, shorten=True),
    "look-up": Case(MAIN.p, make_proposal=lookup_proposal, shorten=True),
}


@pytest.mark.parametrize("name", CASES)
def test_emitted_tokens_have_the_targets_distribution(name: str, backend: SamplingBackend) -> None:
    count = NUM_SEQUENCES if name == "plain" else NUM_QUICK
    values = p_values(simulate(CASES[name], count, backend), CASES[name].expected)
    assert min(values) > ALPHA, values


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_emitted_tokens_have_the_targets_distribution_in_full(name: str, backend: SamplingBackend) -> None:
    values = p_values(simulate(CASES[name], NUM_SEQUENCES, backend), CASES[name].expected)
    assert min(values) > ALPHA, values


@pytest.mark.parametrize(
    ("role", "stolen", "name"),
    [(Role.ACCEPT, Role.PROPOSE, "plain"), (Role.RECOVER, Role.ACCEPT, "wide residual")],
)
def test_a_shared_stream_would_be_noticed(monkeypatch: pytest.MonkeyPatch, role: Role, stolen: Role, name: str) -> None:
    """The same simulation with two roles drawing the same numbers: the check above must see that it is wrong."""

    def shared(rows: Sequence[LogitRow], asked: Role | Sequence[Role]) -> torch.Tensor:
        if isinstance(asked, Role):
            return row_uniforms(rows, stolen if asked is role else asked)
        return row_uniforms(rows, [stolen if a is role else a for a in asked])

    monkeypatch.setattr(rejection, "row_uniforms", shared)
    assert min(p_values(simulate(CASES[name], NUM_QUICK, TorchSampling()), CASES[name].expected)) < ALPHA
