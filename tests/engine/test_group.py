"""Engines of several ranks, each a process: the same tokens as one rank, requests spread, each fault its own alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
from tests import fixtures
from tests.engine.groups import group_args, group_of, running_group
from tests.engine.zoo import Zoo, assert_same_but_for_ties, generate, greedy, random_prompt, run_to_end, tokens

from outrider import LLM, SamplingParams
from outrider.bench.contenders import Contenders
from outrider.config import EngineArgs
from outrider.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError

PROMPT = fixtures.orbit_prompt(5)
LENGTHS = (3, 20, 7, 41, 11, 30)


@pytest.fixture(scope="module")
def cycle(zoo: Zoo) -> Iterator[LLM]:
    """Two data-parallel ranks of CYCLE with PERFECT."""
    with running_group(group_args(zoo, "cycle", "perfect", max_num_seqs=4, max_num_waiting=40)) as llm:
        yield llm


@pytest.fixture(scope="module")
def rand(zoo: Zoo) -> Iterator[LLM]:
    """Two data-parallel ranks of RAND with a random drafter."""
    with running_group(group_args(zoo, "rand", "random")) as llm:
        yield llm


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [random_prompt(length, seed=length) for length in lengths]


def test_requests_are_spread_and_every_answer_is_the_targets(cycle: LLM) -> None:
    before = [stats.generation_tokens_total for stats in cycle.core.rank_stats()]
    prompts = [fixtures.orbit_prompt(length) for length in LENGTHS]
    for prompt, output in zip(prompts, generate(cycle, prompts, greedy(40)), strict=True):
        assert tokens(output) == fixtures.continuation(prompt, 40)
        assert output.prompt_token_ids == tuple(prompt)
        assert output.outputs[0].finish_reason == "length"
        assert output.spec.accepted_length > 6
        assert 0 < output.timing.ttft_s <= output.timing.e2e_s
    each = [stats.generation_tokens_total - b for stats, b in zip(cycle.core.rank_stats(), before, strict=True)]
    assert each == [4 * 40, 2 * 40], "owed: 43 0, 43 60, 90 60, 90 141, 141 141, and ties go to the lowest rank"
    total = cycle.stats()
    assert total.kv_blocks_free == total.kv_blocks_total == sum(s.kv_blocks_total for s in cycle.core.rank_stats())
    assert (total.num_running, total.num_waiting) == (0, 0)


@pytest.mark.parametrize("zoo", ["torch", "int8"], indirect=True)
def test_tokens_are_those_of_one_rank(rand: LLM, zoo: Zoo) -> None:
    """Greedy but for ties, and sampled with seeds of the requests' own and of the engine's."""
    alone = zoo.llm("rand", "random", draft_self_test=False)
    prompts = prompts_of(LENGTHS)
    params = greedy(40, logprobs=2)
    for expected, found in zip(generate(alone, prompts, params), generate(rand, prompts, params), strict=True):
        assert_same_but_for_ties(expected, found, "two ranks", tie=zoo.tie)
        assert found.outputs[0].logprobs is not None
        assert found.outputs[0].text == expected.outputs[0].text
    for sampling in (
        [SamplingParams(temperature=0.9, max_tokens=30, seed=i, n=2, top_p=0.95) for i in range(len(prompts))],
        SamplingParams(temperature=0.7, max_tokens=30),
    ):
        for expected, found in zip(generate(alone, prompts, sampling), generate(rand, prompts, sampling), strict=True):
            assert [c.token_ids for c in found.outputs] == [c.token_ids for c in expected.outputs]


def test_a_wrong_request_is_refused_at_once_and_harms_nobody(cycle: LLM) -> None:
    core = cycle.core
    core.add_request(request_id="good", prompt="p", prompt_token_ids=PROMPT, params=greedy(60))
    for wrong, params, words in (
        ([], greedy(4), "0 tokens"),
        ([1] * 2000, greedy(4), "max_model_len=1024"),
        ([99], greedy(4), "token id 99"),
        ([1], greedy(4, stop_token_ids=[64]), "stop_token_ids"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            core.add_request(request_id="bad", prompt=None, prompt_token_ids=wrong, params=params)
    with pytest.raises(InvalidRequestError, match="'good' is in use"):
        core.add_request(request_id="good", prompt=None, prompt_token_ids=PROMPT, params=greedy(4))
    with pytest.raises(QueueFullError, match="45 more come together; max_waiting=40"):
        core.add_request(request_id="many", prompt=None, prompt_token_ids=PROMPT, params=greedy(4, n=45))
    with pytest.raises(InvalidRequestError, match="unfinished"):
        cycle.generate([PROMPT], greedy(4), use_tqdm=False)
    finished = run_to_end(cycle.core)
    assert set(finished) == {"good"}
    assert finished["good"].prompt == "p"
    assert tokens(finished["good"]) == fixtures.continuation(PROMPT, 60)


def test_abort_frees_the_request_and_its_id(cycle: LLM) -> None:
    core = cycle.core
    for request_id in ("a", "b", "c"):
        core.add_request(request_id=request_id, prompt=None, prompt_token_ids=PROMPT, params=greedy(900))
    seen: dict[str, int] = {}
    while not all(seen.get(request_id, 0) >= 10 for request_id in ("a", "b")):
        seen |= {output.request_id: len(tokens(output)) for output in core.step()}
    last = core.abort("a")
    assert last is not None
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert tokens(last) == fixtures.continuation(PROMPT, len(tokens(last)))
    assert len(tokens(last)) >= 10
    assert core.abort("a") is None
    core.add_request(request_id="a", prompt=None, prompt_token_ids=PROMPT, params=greedy(5))
    for request_id in ("b", "c"):
        assert core.abort(request_id) is not None
    finished = run_to_end(core)
    assert {request_id: tokens(output) for request_id, output in finished.items()} == {
        "a": fixtures.continuation(PROMPT, 5)
    }
    assert wait_for_free_blocks(cycle), "the ranks have ended them too"


def wait_for_free_blocks(llm: LLM) -> bool:
    for _ in range(500):
        if llm.stats().kv_blocks_free == llm.stats().kv_blocks_total:
            return True
        time.sleep(0.02)
    return False


def test_ranks_that_sleep_wake_for_every_request(cycle: LLM) -> None:
    """One request at a time, so that all ranks are idle between, and a pause now and then, so that they sleep."""
    before = cycle.stats().steps_total
    for i in range(40):
        if i % 8 == 0:
            time.sleep(0.05)
        prompt = fixtures.orbit_prompt(1 + i)
        assert tokens(generate(cycle, [prompt], greedy(9))[0]) == fixtures.continuation(prompt, 9)
    time.sleep(1.0)  # the step in which the ranks agree that there is nothing left
    asleep = cycle.stats().steps_total
    time.sleep(0.5)
    assert cycle.stats().steps_total == asleep, "nobody steps without work"
    assert asleep - before <= 40 * 6, "prefill, two rounds, and few steps to agree on sleep"


def test_two_ranks_that_share_every_layer_give_the_same_tokens(zoo: Zoo) -> None:
    alone = zoo.llm("rand", "random", draft_self_test=False)
    prompts = prompts_of(LENGTHS)
    params = greedy(40, logprobs=2)
    args = group_args(zoo, "rand", "random", data_parallel_size=1, tensor_parallel_size=2)
    with running_group(args) as llm:
        assert len(group_of(llm).process_ids) == 2
        for expected, found in zip(generate(alone, prompts, params), generate(llm, prompts, params), strict=True):
            assert_same_but_for_ties(expected, found, "tensor-parallel ranks")
        sampling = SamplingParams(temperature=0.8, max_tokens=30)
        for expected, found in zip(generate(alone, prompts, sampling), generate(llm, prompts, sampling), strict=True):
            assert tokens(found) == tokens(expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_parallel_size": 0}, ["data_parallel_size=0", "at least 1"]),
        ({"data_parallel_size": 3, "nnodes": 2}, ["nnodes=2", "3 ranks"]),
        ({"data_parallel_size": 2, "nnodes": 2, "node_rank": 2}, ["node_rank=2", "0..1"]),
        ({"data_parallel_size": 2, "master_port": 70000}, ["master_port=70000", "65535"]),
        ({"data_parallel_size": 2, "master_addr": "10.0.0.1"}, ["master_addr='10.0.0.1'", "nnodes=1"]),
        ({"master_port": 29500}, ["master_port=29500", "one rank"]),
        ({"data_parallel_size": 2, "distributed_timeout_seconds": 0}, ["distributed_timeout_seconds=0"]),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**changes)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_a_timeout_of_an_engine_in_this_process_is_refused(zoo: Zoo) -> None:
    """Of ``outrider serve`` it is not: there one rank is a process of its own."""
    with pytest.raises(ConfigError, match=r"distributed_timeout_seconds=9 is how long .*this engine is one process"):
        zoo.llm("cycle", distributed_timeout_seconds=9)
    args = group_args(zoo, "cycle", data_parallel_size=1, distributed_timeout_seconds=9)
    with pytest.raises(ConfigError, match="distributed_timeout_seconds=9"):
        Contenders.resolved(args)


def test_a_model_that_the_ranks_do_not_divide_starts_no_process(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3.*num_heads=4"):
        zoo.llm("cycle", tensor_parallel_size=3)


def test_a_closed_engine_says_so(cycle: LLM) -> None:
    """The last test of this group."""
    cycle.close()
    cycle.close()
    with pytest.raises(EngineDeadError, match="closed"):
        generate(cycle, [PROMPT], greedy(4))
