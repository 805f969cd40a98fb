"""Engines that sample in compiled calls: mixtures as alone, every kind of head, and the law of what is emitted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests import fixtures
from tests.engine.test_cases import t5_p_values
from tests.engine.test_mixed_params import MIX
from tests.engine.zoo import Zoo, generate, random_prompt, tokens
from tests.kernels import needs_kernels

from outrider import LLM, SamplingParams

pytestmark = needs_kernels

HEADS: list[dict[str, Any]] = [
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn"},
    {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    {"confidence_head_with_markov": False},
    {"sample_from_anchor": False},
]


def assert_mix_is_as_alone(llm: LLM) -> None:
    """Requests that are walked in torch among others: bans end in the midst of a request."""
    prompts = [random_prompt(9 + 4 * i, seed=i) for i in range(len(MIX))]
    params = [SamplingParams(max_tokens=16, **mix) for mix in MIX]
    together = generate(llm, prompts, params)
    for prompt, p, output in zip(prompts, params, together, strict=True):
        solo = generate(llm, [prompt], p)[0]
        assert tokens(output) == tokens(solo), p
        assert output.spec == solo.spec


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize(("drafter", "gamma"), [("random", 7), ("random", 4), ("lookup", 3), ("none", None)])
def test_a_mixed_batch_gives_each_request_its_solo_run(
    drafter: str, gamma: int | None, threshold: float, zoo: Zoo
) -> None:
    args: dict[str, Any] = {"draft_confidence_threshold": threshold} if threshold and drafter == "random" else {}
    assert_mix_is_as_alone(zoo.llm("rand", drafter, gamma, quantization="int8", enable_prefix_caching=False, **args))


@pytest.mark.parametrize("changes", HEADS, ids=str)
def test_every_kind_of_head(changes: dict[str, Any], zoo: Zoo, tmp_path: Path) -> None:
    path = fixtures.make_random_drafter(tmp_path / "drafter", **changes)
    assert_mix_is_as_alone(zoo.llm("rand", str(path), 5, quantization="int8", enable_prefix_caching=False))


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 0.7}])
def test_emitted_tokens_have_the_quantised_target_s_law(params: dict[str, Any], zoo: Zoo) -> None:
    """As case T5, with the probabilities that the quantised target's own logprobs say."""
    llm = zoo.llm("fixed", "fixed-drafter", 3, quantization="int8", max_num_seqs=500, max_num_batched_tokens=4096)
    (output,) = generate(llm, [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, ignore_eos=True))
    assert output.outputs[0].logprobs is not None
    top = {entry.token_id: entry.logprob / params["temperature"] for entry in output.outputs[0].logprobs[0].top}
    kept = sorted(top, key=lambda token_id: -top[token_id])[: params.get("top_k", 3)]
    total = sum(math.exp(top[token_id]) for token_id in kept)
    expected = [math.exp(top[token_id]) / total if token_id in kept else 0.0 for token_id in sorted(top)]
    assert min(t5_p_values(llm, params, expected, 2000)) > 1e-3
    assert 0.0 < llm.stats().spec.acceptance_rate < 1.0
