"""Processing against the slow oracle: filters with ties, each row's own history, reduced vocabularies, batch mates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampling import oracle
from tests.sampling.helpers import EOS, make_state, verify_rows
from torch import Tensor

from outrider.sampling.filters import filter_probs, ordered_candidates
from outrider.sampling.processors import process
from outrider.sampling.proposal import columns_of_ids
from outrider.sampling_params import SamplingParams

VOCAB = 12
quarter_logits = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=VOCAB, max_size=VOCAB)
filter_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 0.7, 1.0, 1.5]),
        "top_k": st.integers(-1, VOCAB + 2),
        "top_p": st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.9, 0.95, 0.999]),
        "min_p": st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    },
)
edit_params = st.fixed_dictionaries(
    {},
    optional={
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-8, 8).map(float), max_size=3),
        "repetition_penalty": st.sampled_from([0.5, 1.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
    },
)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=5)


@given(st.lists(st.tuples(quarter_logits, filter_params), min_size=1, max_size=4))
def test_filters_equal_the_full_sort(cases: list[tuple[list[float], dict[str, Any]]]) -> None:
    logits_NV = torch.tensor([logits for logits, _ in cases])
    rows = [verify_rows(make_state(**params))[0] for _, params in cases]
    dist = process(logits_NV, rows)
    for n, (logits, params) in enumerate(cases):
        expected = torch.tensor(oracle.filtered_probs(logits, SamplingParams(**params)))
        assert torch.equal(dist.probs_NV[n] > 0, expected > 0)
        torch.testing.assert_close(dist.probs_NV[n], expected, rtol=1e-5, atol=1e-7)


def test_top_k_beyond_any_integer_type_keeps_every_token() -> None:
    logits_NV = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    dist = process(logits_NV, verify_rows(make_state(top_k=10**30)))
    torch.testing.assert_close(dist.probs_NV, logits_NV.softmax(-1))


@pytest.mark.parametrize(("penalty", "likeliest"), [(1e300, [1, 2]), (5e-324, [0])])
def test_extreme_repetition_penalties_stay_in_range(penalty: float, likeliest: list[int]) -> None:
    """Tokens 0 and 3 were seen, with logits 1 and 0; a factor that overflows fp32 would make 0 times infinity NaN."""
    logits_NV = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    state = make_state(prompt=(0, 3), repetition_penalty=penalty, logit_bias={1: 0.5, 2: 0.5})
    probs_V = process(logits_NV, verify_rows(state)).probs_NV[0]
    assert probs_V.sum().item() == pytest.approx(1.0)
    assert (probs_V == probs_V.max()).nonzero().flatten().tolist() == likeliest


@pytest.mark.parametrize("levels", [0, 40])
@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_k": 127}, {"top_k": 128}, {"top_k": 2000}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
     {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.999}, {"min_p": 0.3}, {"min_p": 0.001}, {"min_p": 1e-9},
     {"min_p": 0.02, "top_p": 0.9}, {"top_k": 1500, "top_p": 0.99}, {"min_p": 0.0001, "top_k": 1023, "top_p": 0.7}],
)  # fmt: skip
def test_candidates_are_enough_or_followed_by_the_full_sort(params: dict[str, Any], levels: int) -> None:
    """A vocabulary far above the candidates, peaked and flat rows; ``levels`` > 0 makes many logits equal."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(4, 3000, generator=generator) * torch.tensor([0.1, 1.0, 3.0, 6.0])[:, None]
    if levels:
        logits_NV = (logits_NV * levels / 8).round() * 8 / levels
    probs_NV = filter_probs(logits_NV / params.get("temperature", 1.0), [SamplingParams(**params)] * 4)
    for logits, probs_V in zip(logits_NV.tolist(), probs_NV, strict=True):
        expected = torch.tensor(oracle.filtered_probs(logits, SamplingParams(**params)))
        only_one_V = (probs_V > 0) != (expected > 0)  # a token at the edge of top_p, by rounding
        assert (probs_V + expected)[only_one_V].sum() < 1e-5
        torch.testing.assert_close(probs_V, expected, rtol=1e-4, atol=1e-5)


def test_ordered_candidates_know_where_ties_cut() -> None:
    logits_MV = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    values_MK, ids_MK, known_M = ordered_candidates(logits_MV, 3)
    assert known_M.tolist() == [1, 2]
    assert ids_MK[0, :1].tolist() == [1]
    assert ids_MK[1].tolist() == [0, 1, 2]
    assert values_MK[0].tolist() == [3.0, 2.0, 2.0]
    assert ordered_candidates(logits_MV, 6)[1][0].tolist() == [1, 2, 3, 4, 0, 5]


@given(quarter_logits, edit_params, token_lists, token_lists, st.lists(st.integers(0, VOCAB - 1), max_size=4))
def test_each_row_has_its_own_history(
    logits: list[float], params: dict[str, Any], prompt: list[int], output: list[int], drafts: list[int]
) -> None:
    """A row behind drafts equals a sequence that has emitted them."""
    state = make_state(prompt=prompt, output=output, temperature=0, **params)
    rows = verify_rows(state, drafts)
    logits_NV = torch.tensor([logits] * len(rows))
    argmax = process(logits_NV, rows).argmax_N.tolist()
    sampled_state = make_state(prompt=prompt, output=output, **params)
    probs_NV = process(logits_NV, verify_rows(sampled_state, drafts)).probs_NV
    for j in range(len(rows)):
        edited = oracle.edited_logits(
            logits, params=state.params, prompt=prompt, output=[*output, *drafts[:j]], eos=EOS
        )
        assert edited[argmax[j]] == pytest.approx(max(edited))
        expected = torch.tensor(edited).softmax(-1)
        torch.testing.assert_close(probs_NV[j], expected, rtol=1e-4, atol=1e-6)


@given(quarter_logits, edit_params, token_lists, st.permutations(range(VOCAB)), st.integers(1, VOCAB))
def test_a_reduced_vocabulary_is_edited_by_target_ids(
    logits: list[float], params: dict[str, Any], drafts: list[int], permutation: list[int], size: int
) -> None:
    draft_to_target = torch.tensor(permutation[:size])
    rows = verify_rows(make_state(prompt=[1, 5], output=[5, 3], **params), drafts)
    edited = process(torch.tensor([logits] * len(rows)), rows)
    full_NV = edited.probs_NV[:, draft_to_target]
    sliced = process(
        torch.tensor([logits] * len(rows))[:, draft_to_target], rows, column_of_id=columns_of_ids(draft_to_target)
    )
    mass_N1 = full_NV.sum(-1, keepdim=True)
    some_N = mass_N1[:, 0] > 1e-6  # every column banned: nothing to compare
    torch.testing.assert_close(sliced.probs_NV[some_N], (full_NV / mass_N1)[some_N], rtol=1e-4, atol=1e-6)


def mixed_batch() -> tuple[Tensor, list[list[Any]]]:
    """Logits and rows, per request, of requests with every kind of parameter."""
    generator = torch.Generator().manual_seed(5)
    params: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 0.7},
        {"temperature": 0, "repetition_penalty": 1.3}, {"top_k": 300, "top_p": 0.95}, {"presence_penalty": 1.0},
    ]  # fmt: skip
    requests = [verify_rows(make_state(seed=i, prompt=[1, 4], **p), [7, 9]) for i, p in enumerate(params)]
    return torch.randn(3 * len(requests), 2500, generator=generator) * 3, requests


def test_result_is_bitwise_independent_of_batch_mates() -> None:
    logits_NV, requests = mixed_batch()
    together = process(logits_NV, [row for rows in requests for row in rows])
    for i, rows in enumerate(requests):
        alone = process(logits_NV[3 * i : 3 * i + 3].clone(), rows)
        assert torch.equal(alone.argmax_N, together.argmax_N[3 * i : 3 * i + 3])
        if not rows[0].state.is_greedy:
            assert torch.equal(alone.probs_NV, together.probs_NV[3 * i : 3 * i + 3])
            one = process(logits_NV[3 * i + 1 : 3 * i + 2], rows[1:2])
            assert torch.equal(one.probs_NV[0], alone.probs_NV[1])


def test_input_is_not_changed_and_greedy_rows_are_marked() -> None:
    logits_NV, requests = mixed_batch()
    before = logits_NV.clone()
    rows = [row for rows in requests for row in rows]
    dist = process(logits_NV, rows)
    assert torch.equal(logits_NV, before)
    assert dist.greedy_N.tolist() == [row.state.is_greedy for row in rows]
    assert torch.equal(dist.argmax_N[:3], logits_NV[:3].argmax(-1))
    assert set(dist.argmax_N[~dist.greedy_N].tolist()) == {-1}
    assert dist.probs_NV[dist.greedy_N].abs().sum() == 0
    torch.testing.assert_close(dist.probs_NV[~dist.greedy_N].sum(-1), torch.ones(18))


def test_all_greedy_has_no_probabilities() -> None:
    dist = process(torch.tensor([[0.0, 2.0, 2.0]]), verify_rows(make_state(temperature=0)))
    assert dist.argmax_N.tolist() == [1]  # the first of equals
    assert dist.probs_NV.shape == (0, 3)


def test_min_tokens_bans_until_the_rows_own_length_reaches_it() -> None:
    state = make_state(temperature=0, min_tokens=3, stop_token_ids=[1], output=[5])
    logits_NV = torch.tensor([[0.0, 3.0, 4.0, 1.0, 0.0, 0.0]] * 4)
    assert process(logits_NV, verify_rows(state, [3, 3, 3])).argmax_N.tolist() == [3, 3, 2, 2]
    state.append([3, 3])
    assert not state.edits_logits
    assert process(logits_NV[:1], verify_rows(state)).argmax_N.tolist() == [2]


def test_penalty_counts_exist_only_where_used_and_grow_with_append() -> None:
    with pytest.raises(AssertionError):
        _ = make_state().penalty_counts
    state = make_state(prompt=[1, 1, 2], frequency_penalty=0.5)
    state.append([2, 3])
    state.append([3])
    assert state.penalty_counts == {1: 0, 2: 1, 3: 2}
    assert list(state.output_token_ids) == [2, 3, 3]
