"""Slots and budgets change nothing: context limit, chunks, prefix cache, preemption, aborts.

Most of it runs LAYERED with CONTEXT, whose drafts are right only while every position's draft context is in its slot:
a lost, shifted or stale one shows as a round too many, where the text would not change.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests import fixtures
from tests.engine.zoo import (
    Zoo,
    assert_same_but_for_ties,
    generate,
    greedy,
    on_every_back_end,
    random_prompt,
    run_to_end,
    tokens,
)

from outrider import LLM, SamplingParams
from outrider.outputs import RequestOutput

pytestmark = on_every_back_end


def context_llm(zoo: Zoo, **engine_args: Any) -> LLM:
    return zoo.llm("layered", "context", 7, **engine_args)


def check_context(output: RequestOutput, *, rounds: int = 8) -> None:
    assert tokens(output) == fixtures.continuation(output.prompt_token_ids, 65)
    assert output.spec.rounds == rounds, output.request_id


# ------------------------------------------------------------------------------------------------ the context limit


@pytest.mark.parametrize("max_tokens", [None, 16])
def test_the_context_limit_clamps_every_depth_alike(max_tokens: int | None, zoo: Zoo) -> None:
    """Room for 10, 2 and 1 new tokens, and for 16 exactly; blocks of drafts reach beyond the limit."""
    prompts = [random_prompt(length, seed=length) for length in (30, 38, 39, 24)]
    references = generate(
        zoo.llm("rand", max_model_len=40), prompts, greedy(max_tokens or 999, logprobs=2, ignore_eos=True)
    )
    assert [len(tokens(output)) for output in references] == [10, 2, 1, 16]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for gamma in (1, 4, 7) if max_tokens is None else (7,):
        llm = zoo.llm("rand", "random", gamma, max_model_len=40)
        for reference, output in zip(references, generate(llm, prompts, params), strict=True):
            assert_same_but_for_ties(reference, output, f"gamma {gamma}", tie=zoo.tie)
            assert output.outputs[0].finish_reason == "length"
        assert llm.stats().kv_blocks_free == llm.stats().kv_blocks_total


def test_the_models_own_limit_is_reached_with_drafts(zoo: Zoo) -> None:
    """The last positions are drafted for as far as there is room: 39 tokens in rounds of 8, the last one cut."""
    target = str(zoo.edited("cycle", max_position_embeddings=45))
    llm = zoo.llm(target, "perfect", 7)
    prompt = fixtures.orbit_prompt(5)
    output = generate(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=None))[0]
    assert tokens(output) == fixtures.continuation(prompt, 40)
    assert output.spec.rounds == 5
    assert output.spec.emitted == 39
    # anchors at 5, 13, 21, 29 draft 7; the one at 37 has room for rows up to position 44
    assert output.spec.offered == 5 * 7


# --------------------------------------------------------------------------------------- chunks and the prefix cache


@pytest.mark.parametrize("budget", [8, 17])
def test_chunked_prefill_changes_neither_text_nor_rounds(budget: int, zoo: Zoo) -> None:
    prompts = [fixtures.orbit_prompt(length, first_generated_index=length) for length in (8, 23, 40)]
    llm = context_llm(zoo, max_num_batched_tokens=budget, enable_prefix_caching=False)
    outputs = generate(llm, prompts, greedy(65))
    for output in outputs:
        check_context(output)
    assert llm.stats().prompt_tokens_total == sum(map(len, prompts))
    assert llm.stats().steps_total > -(-sum(map(len, prompts)) // budget)


def test_a_prefix_hit_brings_the_draft_context_along(zoo: Zoo) -> None:
    """Slots look 7 positions back: with a prompt of 33 all but the newest of those come from the cache."""
    prompt = fixtures.orbit_prompt(33)
    llm = context_llm(zoo)
    first = generate(llm, [prompt], greedy(65))[0]
    again = generate(llm, [prompt], greedy(65))[0]
    check_context(first)
    check_context(again)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    # the next turn: prompt and answer are the prefix, cached as prefill and as rounds wrote them
    longer = [*prompt, *tokens(first)]
    following = generate(llm, [longer], greedy(65))[0]
    check_context(following)
    assert following.num_cached_tokens == 96
    stats = llm.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (33 + 33 + 98, 32 + 96)
    assert stats.kv_blocks_free == stats.kv_blocks_total


def test_prefix_cache_off_finds_nothing(zoo: Zoo) -> None:
    llm = context_llm(zoo, enable_prefix_caching=False)
    for _ in range(2):
        output = generate(llm, [fixtures.orbit_prompt(33)], greedy(65))[0]
        check_context(output)
        assert output.num_cached_tokens == 0
    assert llm.stats().prefix_cache_hits == 0


def test_a_prefix_is_shared_while_its_first_owner_still_runs(zoo: Zoo) -> None:
    core = context_llm(zoo).core
    prompt = fixtures.orbit_prompt(49)
    for request_id in ("a", "b"):
        core.add_request(request_id=request_id, prompt=None, prompt_token_ids=prompt, params=greedy(65))
        core.step()
    held = core.stats().kv_blocks_total - core.stats().kv_blocks_free
    assert held < 2 * 4  # 49 tokens and a window are 4 blocks and more; 3 of them are shared
    finished = run_to_end(core)
    for output in finished.values():
        check_context(output)
    assert finished["b"].num_cached_tokens == 48


# ------------------------------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("caching", [False, True])
def test_preemption_changes_neither_text_nor_rounds(caching: bool, zoo: Zoo) -> None:
    """Four requests that need 6 or 7 blocks each, in a pool of 10."""
    prompts = [fixtures.orbit_prompt(20 + 3 * i, first_generated_index=5 * i) for i in range(4)]
    llm = context_llm(zoo, kv_cache_memory_bytes=10 * zoo.block_bytes, enable_prefix_caching=caching)
    outputs = generate(llm, prompts, greedy(65))
    stats = llm.stats()
    assert stats.kv_blocks_total == 10
    assert stats.preemptions_total > 0
    for output in outputs:
        check_context(output)
    assert stats.kv_blocks_free == 10
    assert stats.generation_tokens_total == 4 * 65
    num_cached = sum(output.num_cached_tokens for output in outputs)
    assert stats.prompt_tokens_total == sum(map(len, prompts)) - num_cached, "what is computed twice counts once"


def test_preemption_of_sampled_requests_continues_their_streams(zoo: Zoo) -> None:
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, presence_penalty=0.5, ignore_eos=True) for i in range(3)
    ]
    tight = zoo.llm("rand", "random", 7, kv_cache_memory_bytes=9 * zoo.block_bytes)
    outputs = generate(tight, prompts, params)
    assert tight.stats().preemptions_total > 0
    roomy = zoo.llm("rand", "random", 7)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        solo = generate(roomy, [prompt], p)[0]
        assert tokens(output) == tokens(solo)
        assert output.spec == solo.spec


# ----------------------------------------------------------------------------------------------------------- aborts


def test_abort_at_every_stage_frees_all_and_harms_nobody(zoo: Zoo) -> None:
    """One request aborted waiting, one mid-prefill, one decoding, one with n = 3 half-way."""
    llm = context_llm(zoo, kv_cache_memory_bytes=14 * zoo.block_bytes, max_num_batched_tokens=32)
    core = llm.core

    def add(request_id: str, length: int, **params: Any) -> None:
        prompt = fixtures.orbit_prompt(length)
        core.add_request(request_id=request_id, prompt=None, prompt_token_ids=prompt, params=greedy(65, **params))

    def abort(request_id: str, expected_tokens: range) -> None:
        output = core.abort(request_id)
        assert output is not None
        assert output.finished
        for completion in output.outputs:
            assert completion.finish_reason == "abort"
            assert len(completion.token_ids) in expected_tokens
        assert core.abort(request_id) is None, "it is gone"

    add("keeper", 20)
    add("waiting", 20)
    abort("waiting", range(1))
    add("prefilling", 100)
    core.step()  # 20 tokens of the keeper, 12 of the other
    abort("prefilling", range(1))
    add("decoding", 30)
    core.step()
    core.step()
    core.step()
    abort("decoding", range(1, 65))
    add("three", 17, n=3)
    core.step()
    core.step()
    abort("three", range(1, 65))
    finished = run_to_end(core)
    for output in finished.values():
        check_context(output)
    assert core.stats().kv_blocks_free == core.stats().kv_blocks_total == 14
    assert core.stats().requests_finished["abort"] == 6
    assert core.abort("keeper") is None
    assert core.abort("never seen") is None


def test_abort_of_a_preempted_request(zoo: Zoo) -> None:
    core = context_llm(zoo, kv_cache_memory_bytes=9 * zoo.block_bytes).core
    for i in range(3):
        prompt = fixtures.orbit_prompt(20, first_generated_index=7 * i)
        core.add_request(request_id=f"r{i}", prompt=None, prompt_token_ids=prompt, params=greedy(65))
    while core.stats().preemptions_total == 0:
        core.step()
    assert (core.stats().num_running, core.stats().num_waiting) == (2, 1)
    last = core.abort("r2")  # the youngest
    assert last is not None
    assert 1 < len(tokens(last)) < 65
    finished = run_to_end(core)
    assert set(finished) == {"r0", "r1"}
    for output in finished.values():
        check_context(output)
    assert core.stats().kv_blocks_free == 9
