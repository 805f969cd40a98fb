"""Requests with different sampling in one batch: each gets what it would get alone, and seeds mean what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.zoo import Zoo, decode, generate, greedy, random_prompt, tokens
from tests.reference_drafter import ReferenceTarget

from outrider import SamplingParams

MIX: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.3, "seed": 3, "presence_penalty": 1.0, "min_p": 0.02},
    {"temperature": 1.0, "seed": 4, "logit_bias": {5: 4.0, 6: -100.0}, "min_tokens": 8},
    {"temperature": 0.0, "logit_bias": {9: 3.0}, "stop_token_ids": [9], "min_tokens": 4},
    {"temperature": 1.0, "seed": -7, "top_k": 1},
]


@pytest.mark.parametrize(("drafter", "gamma"), [("random", 7), ("none", None)])
def test_a_mixed_batch_gives_each_request_its_solo_run(drafter: str, gamma: int | None, zoo: Zoo) -> None:
    prompts = [random_prompt(9 + 4 * i, seed=i) for i in range(len(MIX))]
    params = [SamplingParams(max_tokens=16, **mix) for mix in MIX]
    llm = zoo.llm("rand", drafter, gamma, enable_prefix_caching=False)
    together = generate(llm, prompts, params)
    for prompt, p, output in zip(prompts, params, together, strict=True):
        solo = generate(llm, [prompt], p)[0]
        assert tokens(output) == tokens(solo), p
        assert output.spec == solo.spec
        assert output.outputs[0].finish_reason == solo.outputs[0].finish_reason


def test_seeds_reproduce_and_differ(zoo: Zoo) -> None:
    llm, prompt = zoo.llm("rand", "random", 5), random_prompt(8)

    def sampled(seed: int | None, n: int = 1) -> list[list[int]]:
        output = generate(llm, [prompt], SamplingParams(seed=seed, n=n, max_tokens=12, ignore_eos=True))[0]
        assert [completion.index for completion in output.outputs] == list(range(n))
        return [tokens(output, index) for index in range(n)]

    assert sampled(11) == sampled(11)
    assert sampled(11) != sampled(12)
    three = sampled(11, n=3)
    assert three[0] == sampled(11)[0]
    assert len({tuple(ids) for ids in three}) == 3
    assert sampled(None) != sampled(None)


def test_the_engines_seed_decides_for_requests_without_one(zoo: Zoo) -> None:
    params = SamplingParams(n=2, max_tokens=10, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        output = generate(zoo.llm("rand", "random", 3, seed=seed), [random_prompt(8)], params)[0]
        runs.append([tokens(output, index) for index in range(2)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_n_counts_all_its_tokens_and_rounds(zoo: Zoo) -> None:
    llm = zoo.llm("rand", "random", 7)
    output = generate(llm, [random_prompt(20)], SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True))[0]
    assert len(output.outputs) == 3
    assert output.spec == llm.stats().spec
    assert output.spec.emitted == 3 * 8
    assert llm.stats().generation_tokens_total == 27
    assert llm.stats().requests_finished == {"length": 3}


@pytest.mark.parametrize(("drafter", "gamma"), [("random", 7), ("none", None)])
def test_logprobs_are_the_raw_logits_whatever_sampling_does(drafter: str, gamma: int | None, zoo: Zoo) -> None:
    """One entry a token, from prefill and rounds alike, before penalties, bias, temperature and filters."""
    prompt = random_prompt(13)
    mix: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 5, "top_k": 9, "presence_penalty": 2.0, "temperature": 1.5},
    ]
    params = [SamplingParams(max_tokens=14, logprobs=5, ignore_eos=True, **m) for m in mix]
    params += [greedy(14, logprobs=0, ignore_eos=True), greedy(14, ignore_eos=True)]
    outputs = generate(zoo.llm("rand", drafter, gamma), [prompt] * 4, params)
    target = ReferenceTarget(zoo.path("rand"))
    for output in outputs[:2]:
        logits_TV, _ = target.run([*prompt, *tokens(output)], ())
        expected_TV = logits_TV[len(prompt) - 1 :].log_softmax(-1)
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert len(entries) == 14
        for token_id, entry, expected_V in zip(tokens(output), entries, expected_TV, strict=False):
            assert entry.sampled.token_id == token_id
            assert entry.sampled.logprob == pytest.approx(float(expected_V[token_id]), abs=1e-4)
            assert entry.sampled.rank == 1 + int((expected_V > expected_V[token_id]).sum())
            top = expected_V.topk(5)
            assert [t.token_id for t in entry.top] == top.indices.tolist()
            torch.testing.assert_close(torch.tensor([t.logprob for t in entry.top]), top.values, atol=1e-4, rtol=0)
            assert [t.rank for t in entry.top] == [1, 2, 3, 4, 5]
            assert entry.sampled.decoded == decode(token_id)
    entries = outputs[2].outputs[0].logprobs
    assert entries is not None
    assert [entry.top for entry in entries] == [()] * 14
    assert outputs[3].outputs[0].logprobs is None
