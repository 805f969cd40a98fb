"""Draws by inversion and log-probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling.helpers import chi_square_p, make_state, sample, verify_rows

from outrider.sampling.processors import process
from outrider.sampling.random import Role
from outrider.sampling.sampler import compute_logprobs, draw, row_uniforms

ALMOST_ONE = 1 - 2.0**-53


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.249, 1), (0.25, 3), (0.749, 3), (0.75, 4), (ALMOST_ONE, 4)],
)
def test_inversion_skips_tokens_of_zero_probability(uniform: float, token: int) -> None:
    probs_NV = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0]])
    assert draw(probs_NV, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@given(
    st.lists(st.sampled_from([0.0, 1e-12, 1e-3, 0.1, 1.0]), min_size=2, max_size=9).filter(any),
    st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-24, ALMOST_ONE]),
)
def test_a_drawn_token_has_positive_probability(masses: list[float], uniform: float) -> None:
    probs_NV = torch.tensor([masses], dtype=torch.float32)
    probs_NV /= probs_NV.sum()
    token = draw(probs_NV, torch.tensor([uniform], dtype=torch.float64)).item()
    assert probs_NV[0, int(token)] > 0


def test_unnormalised_rows_are_drawn_in_proportion() -> None:
    uniform_N = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    tokens = draw(torch.tensor([[3e-9, 1e-9]]).expand(1000, 2), uniform_N)
    assert abs(int((tokens == 0).sum()) - 750) <= 1


def test_rows_in_any_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    probs_NV = torch.rand(7, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    uniform_N = torch.linspace(0.01, 0.99, 7, dtype=torch.float64)
    whole = draw(probs_NV, uniform_N)
    monkeypatch.setattr("outrider.sampling.sampler._CHUNK_ELEMENTS", 100)
    assert torch.equal(draw(probs_NV, uniform_N), whole)
    assert len(set(whole.tolist())) > 3


def test_a_row_of_nan_does_not_disturb_its_mates() -> None:
    logits_NV = torch.randn(3, 20, generator=torch.Generator().manual_seed(2))
    rows = [verify_rows(make_state(seed=seed))[0] for seed in range(3)]
    healthy = sample(process(logits_NV, rows), rows).tolist()
    logits_NV[1] = torch.nan
    got = sample(process(logits_NV, rows), rows).tolist()
    assert (got[0], got[2]) == (healthy[0], healthy[2])
    assert 0 <= got[1] < 20


def test_greedy_and_sampled_rows_mix() -> None:
    logits_NV = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    states = [make_state(seed=i, temperature=float(i % 2)) for i in range(4)]
    rows = [verify_rows(state)[0] for state in states]
    got = sample(process(logits_NV, rows), rows)
    assert got[0::2].tolist() == logits_NV[0::2].argmax(-1).tolist()
    for i in (1, 3):
        probs_NV = logits_NV[i : i + 1].softmax(-1)
        assert got[i] == draw(probs_NV, row_uniforms(rows[i : i + 1], Role.TARGET))[0]
    all_greedy = [rows[0], rows[2]]
    assert torch.equal(sample(process(logits_NV[0::2], all_greedy), all_greedy), logits_NV[0::2].argmax(-1))


def test_samples_have_the_distribution() -> None:
    probs = [0.1, 0.6, 0.3]
    count = 4000
    rows = [verify_rows(make_state(seed=seed))[0] for seed in range(count)]
    logits_NV = torch.tensor(probs).log().expand(count, 3)
    for role in (Role.TARGET, Role.PROPOSE):
        tokens = sample(process(logits_NV, rows), rows, role)
        assert chi_square_p(torch.bincount(tokens, minlength=3).tolist(), probs) > 1e-3


def test_logprobs_ranks_and_tops() -> None:
    logits_NV = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    first, second = compute_logprobs(logits_NV, torch.tensor([3, 2]), [3, 0])
    logprobs_NV = logits_NV.log_softmax(-1)
    assert (first.token_id, first.rank) == (3, 2)  # equal to token 1, which comes first
    assert first.logprob == pytest.approx(logprobs_NV[0, 3].item())
    assert [(top.token_id, top.rank) for top in first.top] == [(1, 1), (3, 2), (2, 3)]
    assert [top.logprob for top in first.top] == pytest.approx(logprobs_NV[0, [1, 3, 2]].tolist())
    assert (second.token_id, second.rank, second.top) == (2, 4, ())
    (tied,) = compute_logprobs(logits_NV[1:], torch.tensor([4]), [3])
    assert [top.token_id for top in tied.top] == [4, 0, 1]
    assert compute_logprobs(logits_NV[:0], torch.tensor([], dtype=torch.int64), []) == []
    (everything,) = compute_logprobs(logits_NV[:1], torch.tensor([0]), [20])
    assert [top.token_id for top in everything.top] == [1, 3, 2, 0, 4]
