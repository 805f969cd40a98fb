"""SamplingParams: defaults, normalisation, and every refusal by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from outrider.errors import InvalidRequestError
from outrider.sampling_params import LogitBias, SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.stop_token_ids, dict(params.logit_bias)) == ((), (), {})
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (False, False, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", True), ("n", 1.0),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
        ("temperature", True), ("temperature", 10**400),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan),
        ("top_k", -2), ("top_k", 1.5), ("top_k", False),
        ("min_p", -0.01), ("min_p", 1.01), ("min_p", math.nan),
        ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", True),
        ("max_tokens", 0), ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 17),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 3),
        ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", "12"), ("stop_token_ids", 5),
        ("ignore_eos", 1), ("include_stop_str_in_output", "no"), ("skip_special_tokens", None),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
        ("logit_bias", [1]), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: 101}), ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.0}), ("logit_bias", {1: True}), ("logit_bias", {True: 1.0}),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
    ],
)  # fmt: skip
def test_refused_with_the_parameters_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 2**64 - 1), ("seed", -(2**63)), ("top_k", -1), ("top_p", 1), ("temperature", 0), ("max_tokens", None),
     ("logprobs", 0), ("logprobs", 20), ("min_tokens", 16), ("presence_penalty", -2), ("min_p", 1)],
)  # fmt: skip
def test_ends_of_ranges_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_normalised_to_immutable_types() -> None:
    ids, bias = [3, 4], {9: 1, 2: -5}
    params = SamplingParams(temperature=0, stop="end", stop_token_ids=ids, logit_bias=bias)
    ids.append(5)
    bias[7] = 1
    assert isinstance(params.temperature, float)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert list(params.logit_bias.items()) == [(2, -5.0), (9, 1.0)]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 2.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_copies_survive_process_boundaries() -> None:
    params = SamplingParams(seed=7, stop=["a"], logit_bias={5: 2.5})
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=2) == SamplingParams(n=2, seed=7, stop=["a"], logit_bias={5: 2.5})
    assert len({params, copy.deepcopy(params), SamplingParams()}) == 2
    assert repr(LogitBias([(5, 2.5)])) in repr(params)


def test_greedy_is_a_temperature_of_zero_or_next_to_it() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize("params", [{"stop_token_ids": [64]}, {"logit_bias": {64: 1.0}}])
def test_token_ids_are_checked_against_the_vocabulary(params: dict[str, Any]) -> None:
    SamplingParams(**params).validate_for(65)
    with pytest.raises(InvalidRequestError, match=r"64 must lie in 0\.\.63") as caught:
        SamplingParams(**params).validate_for(64)
    assert caught.value.param == next(iter(params))
