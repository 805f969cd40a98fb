"""``speculative_disable_by_batch_size``: under load no token changes, and figures tell of drafted rounds alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests import fixtures
from tests.engine.test_mixed_params import MIX
from tests.engine.test_self_test import messages, with_card
from tests.engine.zoo import Zoo, generate, greedy, on_every_back_end, random_prompt, tokens

from outrider import SamplingParams
from outrider.config import EngineArgs
from outrider.engine.setup import resolve
from outrider.errors import ConfigError

LIMIT = 3


@on_every_back_end
@pytest.mark.parametrize(("drafter", "gamma"), [("random", 7), ("lookup", 3)])
def test_under_load_every_request_says_what_it_says_alone(drafter: str, gamma: int, zoo: Zoo) -> None:
    """More run than are drafted for, then fewer; sampled requests with seeds go on drafting among those that do not."""
    args: dict[str, Any] = {"enable_prefix_caching": False}
    alone = zoo.llm("rand", drafter, gamma, **args)
    llm = zoo.llm("rand", drafter, gamma, speculative_disable_by_batch_size=LIMIT, **args)
    prompts = [random_prompt(9 + 4 * i, seed=i) for i in range(len(MIX))]
    params = [SamplingParams(max_tokens=6 + 5 * i, **mix) for i, mix in enumerate(MIX)]
    together = generate(llm, prompts, params)
    for prompt, p, output in zip(prompts, params, together, strict=True):
        solo = generate(alone, [prompt], p)[0]
        assert tokens(output) == tokens(solo), p
        assert output.outputs[0].finish_reason == solo.outputs[0].finish_reason
        if p.seed is not None and not p.is_greedy:
            assert output.spec == solo.spec, "what it drafts is part of what a seed promises"
    stats = llm.stats()
    assert 0 < stats.undrafted_tokens_total < stats.generation_tokens_total
    assert stats.spec.emitted + stats.undrafted_tokens_total + len(MIX) == stats.generation_tokens_total
    assert stats.kv_blocks_free == stats.kv_blocks_total


def test_drafting_stops_beyond_the_limit_and_comes_back(zoo: Zoo) -> None:
    """PERFECT drafts: eight tokens a round, one a step without. Two short requests keep the long one from drafting."""
    llm = zoo.llm("cycle", "perfect", speculative_disable_by_batch_size=2)
    prompt = fixtures.orbit_prompt(5)
    outputs = generate(llm, [prompt] * 3, [greedy(41), greedy(9), greedy(9)])
    for output, length in zip(outputs, (41, 9, 9), strict=True):
        assert tokens(output) == fixtures.continuation(prompt, length)
    assert llm.stats().undrafted_tokens_total == 3 * 8  # behind the first, which prefill gives
    assert [output.spec.rounds for output in outputs] == [4, 0, 0]
    assert llm.stats().spec.accepted_length == 8.0
    before = llm.stats().undrafted_tokens_total
    generate(llm, [prompt] * 2, greedy(9))
    assert llm.stats().undrafted_tokens_total == before, "two are not more than two"


def test_requests_without_a_seed_are_sampled_without_drafts(zoo: Zoo) -> None:
    llm = zoo.llm("rand", "random", 5, speculative_disable_by_batch_size=1)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = generate(llm, [random_prompt(8)] * 4, params)
    assert all(output.spec.rounds == 0 for output in outputs)
    assert len({tuple(tokens(output)) for output in outputs}) == 4


def test_the_self_test_drafts_whatever_the_limit(zoo: Zoo, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    zoo.llm("cycle", with_card(zoo, "perfect", tmp_path / "d"), speculative_disable_by_batch_size=1)
    assert messages(log, logging.INFO) == ["drafter self-test: accepted length 8.00 (the card says 8.00)"]


def test_a_limit_without_a_meaning_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match="speculative_disable_by_batch_size=0 must be an integer of at least 1"):
        EngineArgs(speculative_disable_by_batch_size=0)
    args = EngineArgs(model=str(zoo.path("rand")), draft="lookup", max_num_seqs=4, speculative_disable_by_batch_size=4)
    with pytest.raises(ConfigError, match=r"speculative_disable_by_batch_size=4 must be below max_num_seqs=4"):
        resolve(args)
    args = EngineArgs(model=str(zoo.path("rand")), draft="none", speculative_disable_by_batch_size=4)
    with pytest.raises(ConfigError, match=r"speculative_disable_by_batch_size=4 is about drafting; draft='none'"):
        resolve(args)
