"""Requests, their seeds, and when they arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests import fixtures

from outrider.bench.prompt_file import encode_prompt
from outrider.bench.workload import SamplingPlan, poisson_arrivals, random_requests, requests_of_texts
from outrider.errors import ConfigError
from outrider.models.tokenizer import Tokenizer

PLAN = SamplingPlan(max_tokens=5, temperature=0.7, top_p=0.9, ignore_eos=True, sampling_seed=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    fixtures.make_cycle_target(directory)
    return Tokenizer.from_directory(directory, eos_token_ids=(fixtures.EOS_ID,))


def test_texts_go_through_the_chat_template_unless_raw(tokenizer: Tokenizer) -> None:
    (chat,) = requests_of_texts(["ab"], PLAN, tokenizer=tokenizer, raw=False)
    assert chat.chat
    assert tokenizer.decode(chat.token_ids, skip_special_tokens=False) == "<|turn|>user\nab\n<|turn|>assistant\n"
    (raw,) = requests_of_texts(["ab"], PLAN, tokenizer=tokenizer, raw=True)
    assert (raw.chat, raw.token_ids) == (False, (0, 1))
    assert encode_prompt(tokenizer, "ab", raw=True) == [0, 1]


def test_without_a_tokenizer_the_text_goes_to_the_server() -> None:
    (request,) = requests_of_texts(["ab"], PLAN, tokenizer=None, raw=False)
    assert (request.text, request.chat, request.token_ids) == ("ab", True, ())


def test_without_a_template_the_text_goes_in_as_it_is(tmp_path: Path) -> None:
    fixtures.make_cycle_target(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("chat_template", "other"), encoding="utf-8")
    bare = Tokenizer.from_directory(tmp_path, eos_token_ids=(fixtures.EOS_ID,))
    (request,) = requests_of_texts(["ab"], PLAN, tokenizer=bare, raw=False)
    assert (request.chat, request.token_ids) == (False, (0, 1))


def test_every_request_has_its_own_seed(tokenizer: Tokenizer) -> None:
    requests = requests_of_texts(["a", "b", "c"], PLAN, tokenizer=tokenizer, raw=True)
    assert [request.params.seed for request in requests] == [40, 41, 42]
    assert {(r.params.max_tokens, r.params.temperature, r.params.top_p, r.params.ignore_eos) for r in requests} == {
        (5, 0.7, 0.9, True)
    }


def test_random_prompts_are_ordinary_tokens_and_reproducible(tokenizer: Tokenizer) -> None:
    requests = random_requests(20, PLAN, input_len=30, tokenizer=tokenizer)
    ids = [token for request in requests for token in request.token_ids]
    assert len(ids) == 600
    assert set(ids) <= set(range(fixtures.CYCLE))  # none of the three special ones
    assert len(set(ids)) > 50
    assert requests == random_requests(20, PLAN, input_len=30, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="input_len=0"):
        random_requests(1, PLAN, input_len=0, tokenizer=tokenizer)


def test_poisson_arrivals() -> None:
    arrivals = poisson_arrivals(4000, request_rate=8.0, seed=1)
    gaps = np.diff((0.0, *arrivals))
    assert gaps.min() > 0
    # exponential: mean and standard deviation are both 1/8; standard error of the mean 1/8 / sqrt(4000)
    assert gaps.mean() == pytest.approx(1 / 8, abs=4 / 8 / 4000**0.5)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)
    assert arrivals == poisson_arrivals(4000, request_rate=8.0, seed=1)
    assert arrivals != poisson_arrivals(4000, request_rate=8.0, seed=2)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=f"request_rate={rate}"):
        poisson_arrivals(3, request_rate=rate, seed=0)
