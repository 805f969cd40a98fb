"""Stop events inside an accepted run: what drafting hands out is what plain decoding hands out, and nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from tests import fixtures
from tests.engine.zoo import Zoo, generate, greedy, on_every_back_end, tokens
from tests.fixtures import CHARACTERS, ORBIT
from tests.models.test_tokenizer import sentencepiece_like

from outrider import SamplingParams
from outrider.engine.sequence import Sequence
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.scheduler.request import Request

PROMPT = fixtures.orbit_prompt(5)  # ORBIT[0] comes from prefill, 1..8 from the first round, 9..16 from the second
EOS = (ORBIT[12], ORBIT[40])
TEXT = "".join(CHARACTERS[token_id] for token_id in ORBIT)

CASES: dict[str, dict[str, Any]] = {
    "eos": {},
    "eos ignored": {"ignore_eos": True},
    "length": {"max_tokens": 7},
    "length 1": {"max_tokens": 1},
    "length at eos": {"max_tokens": 13},
    "length at the end of a run": {"max_tokens": 9},
    "stop token in the prefill": {"stop_token_ids": [ORBIT[0]]},
    "stop token first in a run": {"stop_token_ids": [ORBIT[1]]},
    "stop token in a run": {"stop_token_ids": [ORBIT[5], ORBIT[7]]},
    "stop token last in a run": {"stop_token_ids": [ORBIT[8]]},
    "stop token shown": {"stop_token_ids": [ORBIT[5]], "include_stop_str_in_output": True},
    "stop string of one token": {"stop": TEXT[6]},
    "stop string over tokens": {"stop": [TEXT[3:6]]},
    "stop string over rounds": {"stop": [TEXT[7:11]]},
    "stop string shown": {"stop": [TEXT[7:11]], "include_stop_str_in_output": True},
    "two stop strings": {"stop": [TEXT[4:9], TEXT[5:7]]},
    "stop string begun at the end": {"stop": [TEXT[5:9]], "max_tokens": 7},
    "stop string behind eos": {"stop": [TEXT[11:14]]},
    "min_tokens over eos": {"min_tokens": 20, "max_tokens": 50},
    "min_tokens over stop string": {"stop": [TEXT[3:5]], "min_tokens": 6, "ignore_eos": True},
    "min_tokens over stop token": {"stop_token_ids": [ORBIT[3], ORBIT[9]], "min_tokens": 6},
    "penalties": {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "ignore_eos": True},
    "logit_bias": {"logit_bias": {ORBIT[4]: -20.0, ORBIT[20]: 7.0}, "ignore_eos": True},
    "logit_bias to eos": {"logit_bias": {ORBIT[3]: -20.0, EOS[1]: 1.0}},
    "n": {"n": 3, "stop": [TEXT[3:6]]},
}


@pytest.fixture(scope="module")
def plain(zoo: Zoo) -> dict[str, RequestOutput]:
    return run_all(zoo, "none", None)


def run_all(zoo: Zoo, drafter: str, gamma: int | None) -> dict[str, RequestOutput]:
    """All cases in one batch; the engine's totals are those of what it handed out."""
    target = zoo.edited("cycle", eos_token_id=list(EOS))
    llm = zoo.llm(str(target), drafter, gamma)
    free = llm.stats().kv_blocks_free
    params = [greedy(**{"max_tokens": 70, "logprobs": 2, **case}) for case in CASES.values()]
    outputs = generate(llm, [PROMPT] * len(params), params)
    stats = llm.stats()
    handed_out = [completion for output in outputs for completion in output.outputs]
    assert stats.generation_tokens_total == sum(len(completion.token_ids) for completion in handed_out)
    assert stats.spec.emitted == stats.generation_tokens_total - len(handed_out)
    assert stats.kv_blocks_free == free
    assert stats.num_running == stats.num_waiting == 0
    return dict(zip(CASES, outputs, strict=True))


def visible(completion: CompletionOutput) -> tuple[object, ...]:
    return (completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason)


@on_every_back_end
@pytest.mark.parametrize(("drafter", "gamma"), [("perfect", 7), ("perfect", 3), ("half", 7), ("lookup", 4)])
def test_drafting_changes_no_stop(drafter: str, gamma: int, zoo: Zoo, plain: dict[str, RequestOutput]) -> None:
    drafted = run_all(zoo, drafter, gamma)
    for name, reference in plain.items():
        for expected, found in zip(reference.outputs, drafted[name].outputs, strict=True):
            assert visible(found) == visible(expected), name
            assert found.logprobs is not None
            assert expected.logprobs is not None
            assert len(found.logprobs) == len(found.token_ids)
            for a, b in zip(found.logprobs, expected.logprobs, strict=True):
                assert a.sampled.logprob == pytest.approx(b.sampled.logprob, abs=1e-4), name
                assert a.sampled.token_id == b.sampled.token_id


@on_every_back_end
def test_the_events_are_those_of_the_orbit(plain: dict[str, RequestOutput]) -> None:
    """What plain decoding gives, by hand, so that both are not wrong alike."""

    def check(name: str, length: int, text: str, reason: str, stop_reason: int | str | None = None) -> None:
        completion = plain[name].outputs[0]
        expected = (text, ORBIT[:length], reason, stop_reason)
        assert visible(completion) == expected, name

    check("eos", 13, TEXT[:12], "stop")
    check("length", 7, TEXT[:7], "length")
    check("length 1", 1, TEXT[:1], "length")
    check("length at eos", 13, TEXT[:12], "stop")
    check("length at the end of a run", 9, TEXT[:9], "length")
    check("stop token in the prefill", 1, "", "stop", ORBIT[0])
    check("stop token first in a run", 2, TEXT[:1], "stop", ORBIT[1])
    check("stop token in a run", 6, TEXT[:5], "stop", ORBIT[5])
    check("stop token last in a run", 9, TEXT[:8], "stop", ORBIT[8])
    check("stop token shown", 6, TEXT[:6], "stop", ORBIT[5])
    check("stop string of one token", 7, TEXT[:6], "stop", TEXT[6])
    check("stop string over tokens", 6, TEXT[:3], "stop", TEXT[3:6])
    check("stop string over rounds", 11, TEXT[:7], "stop", TEXT[7:11])
    check("stop string shown", 11, TEXT[:11], "stop", TEXT[7:11])
    check("two stop strings", 7, TEXT[:5], "stop", TEXT[5:7])
    check("stop string begun at the end", 7, TEXT[:7], "length")
    check("stop string behind eos", 13, TEXT[:12], "stop")
    assert tokens(plain["eos ignored"]) == fixtures.continuation(PROMPT, 70)
    assert tokens(plain["n"], 2) == list(ORBIT[:6])


@on_every_back_end
def test_min_tokens_and_edits_turn_the_path(plain: dict[str, RequestOutput]) -> None:
    """Cases that leave the orbit: a banned or biased token is not taken, and a penalised orbit is not walked twice."""
    over_eos = tokens(plain["min_tokens over eos"])
    assert over_eos[:12] == list(ORBIT[:12])
    assert not set(over_eos[:20]) & set(EOS)
    assert len(over_eos) >= 20
    assert tokens(plain["min_tokens over stop string"])[:6] == list(ORBIT[:6])
    assert len(tokens(plain["min_tokens over stop string"])) > 6
    over_stop = tokens(plain["min_tokens over stop token"])
    assert not set(over_stop[:6]) & {ORBIT[3], ORBIT[9], *EOS}
    assert tokens(plain["penalties"]) != fixtures.continuation(PROMPT, 70)
    assert ORBIT[4] not in tokens(plain["logit_bias"])


@on_every_back_end
def test_penalties_are_those_of_every_row_at_random_logits(zoo: Zoo) -> None:
    """With close logits one missing count in one verify row would show: every depth, and rejected drafts between."""
    params = greedy(24, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, min_tokens=10, logprobs=2)
    prompts = [[(5 * i + j) % 61 for j in range(12)] for i in range(3)]
    expected = [tokens(output) for output in generate(zoo.llm("rand"), prompts, params)]
    for drafter, gamma in (("random", 7), ("lookup", 4), ("wrong", 2)):
        found = [tokens(output) for output in generate(zoo.llm("rand", drafter, gamma), prompts, params)]
        assert found == expected, drafter


@on_every_back_end
def test_a_stop_string_is_cut_for_sampled_requests_too(zoo: Zoo) -> None:
    """With a seed and drafts accepted or not, output ends with the first stop event of what would have come."""
    llm = zoo.llm("fixed", "fixed-drafter", 3)
    whole = generate(llm, [[1]], SamplingParams(seed=3, max_tokens=60, ignore_eos=True))[0].outputs[0]
    stop = whole.text[20:23]
    cut = generate(llm, [[1]], SamplingParams(seed=3, max_tokens=60, ignore_eos=True, stop=stop))[0].outputs[0]
    end = whole.text.index(stop)
    assert cut.text == whole.text[:end]
    assert cut.token_ids == whole.token_ids[: end + len(stop)]
    assert cut.stop_reason == stop


@pytest.mark.parametrize(
    ("params", "text", "finish_reason", "stop_reason"),
    [
        ({"stop": "\n"}, "h", "stop", "\n"),
        ({"stop": "\n", "include_stop_str_in_output": True}, "h\n", "stop", "\n"),
        ({"stop": "\n\n"}, "h\n", "stop", None),
        ({"stop": "\n", "max_tokens": 2}, "h", "stop", "\n"),
        ({"stop": "\n", "max_tokens": 2, "min_tokens": 2}, "h\n", "length", None),
        ({}, "h\n", "stop", None),
    ],
)
def test_a_stop_string_in_text_that_comes_with_the_end(
    params: dict[str, Any], text: str, finish_reason: str, stop_reason: str | None
) -> None:
    """A newline that is a byte token becomes text when its run of byte tokens ends: here at the end of sequence."""
    tokenizer = sentencepiece_like()
    letter, newline, eos = tokenizer.token_to_id("h"), tokenizer.token_to_id("<0x0A>"), tokenizer.token_to_id("</s>")
    assert letter is not None
    assert newline is not None
    assert eos is not None
    request = Request.create(
        request_id="r", prompt_token_ids=(letter,), params=SamplingParams(**params), arrival_time=0.0, max_model_len=64
    )
    sequence = Sequence(index=0, request=request, seed=0, tokenizer=tokenizer, eos_token_ids=(eos,))
    sequence.take([letter, newline, eos][: params.get("max_tokens", 3)], [])
    assert (sequence.text, sequence.finish_reason, sequence.stop_reason) == (text, finish_reason, stop_reason)
