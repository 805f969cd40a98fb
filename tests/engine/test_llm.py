"""The offline API: prompt forms, errors that name what is wrong, and one bad request among good ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import fixtures
from tests.engine.failing import core_failing_at_step
from tests.engine.zoo import Zoo, generate, greedy, on_every_back_end, random_prompt, run_to_end, tokens
from tests.fixtures import CHARACTERS

from outrider import LLM, SamplingParams
from outrider.errors import CheckpointError, InvalidRequestError, QueueFullError
from outrider.models.tokenizer import Tokenizer

TEXT = "abc"
IDS = [0, 1, 2]


@pytest.fixture(scope="module")
def llm(zoo: Zoo) -> LLM:
    return zoo.llm("cycle", "perfect", 7)


def test_every_prompt_form_means_the_same(llm: LLM) -> None:
    expected = fixtures.continuation(IDS, 5)
    forms: list[Any] = [TEXT, {"prompt": TEXT}, {"prompt_token_ids": IDS}, IDS, [TEXT], [IDS], [{"prompt": TEXT}]]
    for prompt in forms:
        outputs = llm.generate(prompt, greedy(5), use_tqdm=False)
        assert [tokens(output) for output in outputs] == [expected]
        assert outputs[0].prompt_token_ids == tuple(IDS)
        assert outputs[0].finished
    forms = [TEXT, IDS, {"prompt": "b"}]
    mixed = llm.generate(forms, greedy(5), use_tqdm=False)
    assert [tokens(output) for output in mixed] == [expected, expected, fixtures.continuation([1], 5)]
    assert [output.prompt for output in mixed] == [TEXT, None, "b"]
    assert mixed[0].outputs[0].text == "".join(CHARACTERS[i] for i in expected)
    assert llm.generate([], greedy(5), use_tqdm=False) == []


def test_parameters_per_prompt_and_defaults(llm: LLM) -> None:
    outputs = llm.generate([TEXT, TEXT], [greedy(3), greedy(6)], use_tqdm=False)
    assert [len(tokens(output)) for output in outputs] == [3, 6]
    assert len(tokens(llm.generate(TEXT, use_tqdm=False)[0])) == SamplingParams().max_tokens
    with pytest.raises(InvalidRequestError, match="1 entries for 2 prompts"):
        llm.generate([TEXT, TEXT], [greedy(3)], use_tqdm=False)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    output = llm.chat(conversation, greedy(4), use_tqdm=False)[0]
    assert output.prompt == "<|turn|>user\nhi\n<|turn|>assistant\n"
    assert output.prompt_token_ids[0] == fixtures.TURN_ID
    assert tokens(output) == fixtures.continuation(output.prompt_token_ids, 4)
    two = llm.chat([conversation, conversation], greedy(4), add_generation_prompt=False, use_tqdm=False)
    assert [o.prompt for o in two] == ["<|turn|>user\nhi\n"] * 2


@pytest.mark.parametrize(("prompt", "params", "words"), [
    ([[]], {}, ["prompt", "0 tokens"]),
    ([[1] * 1024], {}, ["1024 tokens", "max_model_len=1024"]),
    ([[1, 64]], {}, ["token id 64", "0..63"]),
    ([[1, -1]], {}, ["token id -1", "0..63"]),
    ([[1, 2.5]], {}, ["integer token ids"]),
    ({"text": "a"}, {}, ["'text'", "'prompt'", "'prompt_token_ids'"]),
    ({"prompt": "a", "prompt_token_ids": [1]}, {}, ["exactly one"]),
    ([[1]], {"stop_token_ids": [64]}, ["stop_token_ids", "64"]),
    ([[1]], {"logit_bias": {70: 1.0}}, ["logit_bias", "70"]),
    ([[1]], {"stop_token_ids": list(range(63)), "min_tokens": 1}, ["stop_token_ids", "all 64", "min_tokens=1"]),
    ("ab\ud800", {}, ["prompt", "\\ud800", "index 2"]),
])  # fmt: skip
def test_wrong_requests_are_refused_by_name_and_leave_nothing(
    prompt: Any, params: dict[str, Any], words: Sequence[str], llm: LLM
) -> None:
    before = llm.stats()
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, greedy(4, **params), use_tqdm=False)
    for word in words:
        assert word in str(caught.value)
    assert not llm.core.has_unfinished
    assert llm.stats().steps_total == before.steps_total
    assert llm.stats().kv_blocks_free == before.kv_blocks_total


def test_one_wrong_prompt_stops_the_call_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().steps_total
    with pytest.raises(InvalidRequestError, match="token id 99"):
        llm.generate([IDS, [99], IDS], greedy(4), use_tqdm=False)
    assert llm.stats().steps_total == before
    assert not llm.core.has_unfinished
    assert tokens(llm.generate(IDS, greedy(4), use_tqdm=False)[0]) == fixtures.continuation(IDS, 4)


def test_unknown_arguments_and_models_are_named(zoo: Zoo) -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        zoo.llm("cycle", tensor_parallel=2)
    with pytest.raises(CheckpointError, match="no/such-model-here"):
        LLM("no/such-model-here/at/all")


@on_every_back_end
def test_the_memory_bounds_the_context_limit(zoo: Zoo) -> None:
    """Where nobody asked for a limit it is what the pool holds; requests beyond it are clamped or refused."""
    small = zoo.llm("cycle", "perfect", 7, kv_cache_memory_bytes=5 * zoo.block_bytes)
    assert small.stats().kv_blocks_total == 5
    output = generate(small, [IDS], greedy(500))[0]
    assert tokens(output) == fixtures.continuation(IDS, 80 - 3)
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match=r"80 tokens.*max_model_len=80"):
        generate(small, [[1] * 80], greedy(1))


@on_every_back_end
def test_good_requests_go_on_while_bad_ones_are_refused(zoo: Zoo) -> None:
    core = zoo.llm("cycle", "perfect", 7, max_num_waiting=2).core
    core.add_request(request_id="good", prompt=None, prompt_token_ids=IDS, params=greedy(40))
    core.step()
    with pytest.raises(InvalidRequestError, match="'good' is in use"):
        core.add_request(request_id="good", prompt=None, prompt_token_ids=IDS, params=greedy(40))
    with pytest.raises(InvalidRequestError, match="0 tokens"):
        core.add_request(request_id="empty", prompt=None, prompt_token_ids=[], params=greedy(40))
    with pytest.raises(QueueFullError, match="0 requests wait already and 3 more come together; max_waiting=2"):
        core.add_request(request_id="three", prompt=None, prompt_token_ids=IDS, params=greedy(40, n=3))
    assert core.abort("three") is None, "of n sequences all are queued or none"
    assert core.stats().requests_finished == {}, "what never entered did not end either"
    core.add_request(request_id="two", prompt=None, prompt_token_ids=IDS, params=greedy(40, n=2))
    finished = run_to_end(core)
    assert set(finished) == {"good", "two"}
    for output in finished.values():
        for index in range(len(output.outputs)):
            assert tokens(output, index) == fixtures.continuation(IDS, 40)
    assert core.stats().kv_blocks_free == core.stats().kv_blocks_total


@on_every_back_end
def test_a_step_that_raises_leaves_nothing_for_the_next_call(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.setup.EngineCore", core_failing_at_step(2))
    llm = zoo.llm("layered", "context", 7)
    prompts = [fixtures.orbit_prompt(20), fixtures.orbit_prompt(33)]
    with pytest.raises(RuntimeError, match="the drafter broke"):
        generate(llm, prompts, greedy(65))
    assert not llm.core.has_unfinished
    assert llm.stats().kv_blocks_free == llm.stats().kv_blocks_total
    for prompt, output in zip(prompts, generate(llm, prompts, greedy(65)), strict=True):
        assert tokens(output) == fixtures.continuation(prompt, 65)
        assert output.spec.rounds == 8


class BrokenTokenizer(Tokenizer):
    """Fails on decoding one token, as a tokenizer with a hole would."""

    def __init__(self, inner: Tokenizer, hole: int) -> None:
        self.__dict__.update(inner.__dict__)
        self.hole = hole

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.hole in token_ids:
            raise KeyError(f"no text for {self.hole}")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@on_every_back_end
def test_a_failure_of_one_request_ends_that_one_alone(zoo: Zoo) -> None:
    core = zoo.llm("cycle", "perfect", 7).core
    core.tokenizer = BrokenTokenizer(core.tokenizer, hole=fixtures.ORBIT[12])
    prompts = {"before": fixtures.orbit_prompt(4, first_generated_index=0), "clear of it": [30]}
    prompts["after"] = fixtures.orbit_prompt(9, first_generated_index=13)
    for request_id, prompt in prompts.items():
        core.add_request(request_id=request_id, prompt=None, prompt_token_ids=prompt, params=greedy(20))
    finished = run_to_end(core)
    failed = finished["before"].outputs[0]
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "no text for" in failed.error
    for request_id in ("clear of it", "after"):
        assert finished[request_id].outputs[0].finish_reason == "length"
        assert tokens(finished[request_id]) == fixtures.continuation(prompts[request_id], 20)
    assert core.stats().kv_blocks_free == core.stats().kv_blocks_total
    assert core.stats().requests_finished == {"error": 1, "length": 2}


@pytest.fixture
def poisoned(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> str:
    """CYCLE whose embedding of token 30, which no orbit reaches, is NaN."""
    tensors = load_file(zoo.path("cycle") / "model.safetensors")
    tensors["model.embed_tokens.weight"][30] = torch.nan
    return str(fixtures.write_target(tmp_path_factory.mktemp("poisoned"), tensors))


@on_every_back_end
@pytest.mark.parametrize("drafter", ["none", "perfect", "random"])
def test_logits_that_are_not_finite_end_their_request_alone(drafter: str, poisoned: str, zoo: Zoo) -> None:
    llm = zoo.llm(poisoned, drafter)
    prompts = [fixtures.orbit_prompt(20), [*fixtures.orbit_prompt(18), 30, 5], fixtures.orbit_prompt(33)]
    params = [greedy(12), SamplingParams(temperature=1.0, seed=1, max_tokens=12), greedy(12)]
    for _ in range(2):  # again, so that slots once NaN and blocks once cached are met
        outputs = generate(llm, prompts, params)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
        assert outputs[1].outputs[0].token_ids == ()
        assert "not finite" in str(outputs[1].outputs[0].error)
        for i in (0, 2):
            assert tokens(outputs[i]) == fixtures.continuation(prompts[i], 12)
    assert llm.stats().kv_blocks_free == llm.stats().kv_blocks_total


@on_every_back_end
def test_a_rejected_draft_cannot_end_a_request(zoo: Zoo, tmp_path: Path) -> None:
    """Logits behind token 30 are not finite. WRONG proposes it where 29 is right; the target alone never runs it."""
    tensors = load_file(zoo.path("cycle") / "model.safetensors")
    if zoo.back_end == "torch":
        tensors["lm_head.weight"][5, 30] = 3e38
    else:  # packed weights are finite; here keys and values of the rejected row are not finite either
        tensors["model.embed_tokens.weight"][30] = torch.nan
    llm = zoo.llm(str(fixtures.write_target(tmp_path, tensors)), "wrong")
    prompt = fixtures.orbit_prompt(16)
    output = generate(llm, [prompt], greedy(61))[0]
    assert 29 in tokens(output)
    assert tokens(output) == fixtures.continuation(prompt, 61)
    assert generate(llm, [[30]], greedy(3))[0].outputs[0].finish_reason == "error"


@on_every_back_end
def test_requests_of_one_token_prompts_and_long_batches(zoo: Zoo) -> None:
    """More requests than seats: all are answered, in the order they were asked."""
    llm = zoo.llm("cycle", "perfect", 7, max_num_seqs=3)
    prompts = [[i] for i in range(10)] + [random_prompt(20, seed=i) for i in range(3)]
    outputs = generate(llm, prompts, greedy(9))
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tokens(output) == fixtures.continuation(prompt, 9)
        assert output.timing.queue_s <= output.timing.ttft_s <= output.timing.e2e_s
        assert output.timing.ttft_s > 0
