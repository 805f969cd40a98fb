"""The API as the official client sees it, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.server.fake_engine import FakeEngine
from tests.server.live import TIMEOUT_S, LiveServer, eventually, serve

from outrider.server.config import ServerConfig

MODEL = "fake/echo"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def live(engine: FakeEngine) -> Iterator[LiveServer]:
    with serve(engine, config=ServerConfig(port=0, drain_timeout_s=0.0, max_prompts=8)) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> OpenAI:
    return live.openai()


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"
    assert "other/model" in caught.value.message
    assert MODEL in caught.value.message


def test_whole_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "abcabca"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 7, 10)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_completion_defaults_to_sixteen_tokens_and_chat_to_the_context(client: OpenAI, engine: FakeEngine) -> None:
    assert client.completions.create(model=MODEL, prompt="ab").choices[0].text == "ab" * 8
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert chat.usage is not None
    assert chat.usage.total_tokens == engine.max_model_len


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab", "baba"]),
        (["ab", "xy"], ["abab", "baba", "xyxy", "yxyx"]),
        ([97, 98], ["abab", "baba"]),
        ([[97, 98], [99]], ["abab", "baba", "cccc", "cccc"]),
    ],
)
def test_prompt_forms_and_choice_order(client: OpenAI, prompt: list[str], texts: list[str]) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * len(texts)
    streamed = dict.fromkeys(range(len(texts)), "")
    for chunk in client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts


def test_completion_stream_adds_up(client: OpenAI) -> None:
    text = "naïve 日本 🎉 "  # tokens are bytes: characters span several
    size = 2 * len(text.encode())
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=text, max_tokens=size, stream=True, logprobs=2, stream_options={"include_usage": True}
        )
    )
    assert len(chunks) > 10
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text * 2
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    tokens = [
        token for c in chunks for choice in c.choices if choice.logprobs for token in choice.logprobs.tokens or []
    ]
    assert len(tokens) == size
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == size
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_logprobs_are_parallel_lists(client: OpenAI) -> None:
    def logprobs(num: int) -> openai.types.completion_choice.Logprobs:
        found = client.completions.create(model=MODEL, prompt="abc", max_tokens=5, logprobs=num).choices[0].logprobs
        assert found is not None
        return found

    two = logprobs(2)
    assert two.tokens == list("abcab")
    assert two.token_logprobs == [-1.0] * 5
    assert two.text_offset == [0, 1, 2, 3, 4]
    assert two.top_logprobs is not None
    assert two.top_logprobs[0] == {"b": -0.5, "a": -1.0}
    none = logprobs(0)
    assert none.top_logprobs is not None
    assert none.top_logprobs[0] == {"a": -1.0}
    five = logprobs(5).top_logprobs
    assert five is not None
    assert min(five[0].values()) == -9999.0  # JSON has no infinity


def test_whole_chat(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
        max_completion_tokens=6,
        user="somebody",
    )
    prompt = "system:be kind\nuser:one\ntwo\nassistant:"
    assert engine.seen_prompts[-1] == (prompt, tuple(prompt.encode()))
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "system")
    assert answer.choices[0].finish_reason == "length"
    history: Any = [{"role": "user", "content": "x"}, message.model_dump()]  # nulls of an answer are taken back
    again = client.chat.completions.create(model=MODEL, messages=history, max_tokens=1)
    assert again.choices[0].message.content == "u"


def test_chat_stream_begins_with_the_role_and_adds_up(client: OpenAI) -> None:
    parameters = {"model": MODEL, "messages": [{"role": "user", "content": "héllo"}], "n": 2, "max_tokens": 40}
    whole = client.chat.completions.create(**parameters)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(**parameters, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in choices[1:])
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_chat_logprobs_one_entry_a_token(client: OpenAI) -> None:
    parameters = {
        "model": MODEL, "messages": [{"role": "user", "content": "é"}], "max_tokens": 12, "logprobs": True,
        "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**parameters)  # type: ignore[call-overload]
    content = whole.choices[0].logprobs.content
    assert len(content) == 12 == whole.usage.completion_tokens
    assert (content[0].token, content[0].bytes, content[0].logprob) == ("u", [117], -1.0)
    assert (content[5].token, content[5].bytes) == ("\ufffd", None)  # the first byte of the é
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("v", -0.5), ("u", -1.0)]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**parameters, stream=True)  # type: ignore[call-overload]
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    bare = client.chat.completions.create(**{**parameters, "top_logprobs": None})  # type: ignore[call-overload]
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(model=MODEL, prompt="abcdef", max_tokens=30, stop="ef", stream=stream)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    assert "".join(choice.text for choice in choices) == "abcd"
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == "ef"


def test_every_parameter_reaches_the_engine(client: OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        max_completion_tokens=5,
        stop=["q", "zz"],
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": 1, "6": -100},
        logprobs=True,
        top_logprobs=3,
        extra_body={
            "top_k": 4, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9],
            "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
        },
    )  # fmt: skip
    seen = engine.seen_params[-1]
    assert (seen.n, seen.temperature, seen.top_p, seen.seed, seen.max_tokens) == (2, 0.5, 0.9, -7, 5)
    assert (seen.stop, seen.presence_penalty, seen.frequency_penalty) == (("q", "zz"), 0.1, -0.2)
    assert (dict(seen.logit_bias), seen.logprobs, seen.top_k, seen.min_p) == ({5: 1.0, 6: -100.0}, 3, 4, 0.05)
    assert (seen.repetition_penalty, seen.min_tokens, seen.stop_token_ids) == (1.1, 2, (9,))
    assert (seen.ignore_eos, seen.include_stop_str_in_output, seen.skip_special_tokens) == (True, True, False)


def test_a_context_that_is_full_is_refused_with_both_numbers(client: OpenAI, engine: FakeEngine) -> None:
    longest = "x" * (engine.max_model_len - 1)
    answer = client.completions.create(model=MODEL, prompt=longest)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=longest + "x")
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert "256" in caught.value.message
    assert "255" in caught.value.message


def test_too_many_prompts(client: OpenAI) -> None:
    assert len(client.completions.create(model=MODEL, prompt=["a"] * 8, max_tokens=1).choices) == 8
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt=["a"] * 9, max_tokens=1)
    assert (caught.value.status_code, caught.value.param) == (413, "prompt")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=["a"] * 8, n=2, max_tokens=1)
    assert refused.value.param == "n"


def test_a_template_that_rejects_the_messages(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "assistant", "content": "hi"}])
    assert caught.value.param == "messages"
    assert "begin with the assistant" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue(stream: bool) -> None:
    engine = FakeEngine(queue_limit=0)
    with serve(engine) as live, pytest.raises(openai.RateLimitError) as caught:
        live.openai().completions.create(model=MODEL, prompt="a", stream=stream)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.code == "queue_full"


def test_a_full_queue_refuses_all_prompts_of_a_request() -> None:
    engine = FakeEngine(queue_limit=2)
    engine.hold = True
    with serve(engine) as live:
        with pytest.raises(openai.RateLimitError):
            live.openai().completions.create(model=MODEL, prompt=["a", "b", "c"])
        assert eventually(lambda: not engine.running)
        assert set(engine.ended.values()) == {"abort"}


def test_an_engine_that_dies() -> None:
    engine = FakeEngine()
    engine.crash_next = True
    with serve(engine) as live:
        with live.http() as http:
            assert http.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError) as caught:
            live.openai().completions.create(model=MODEL, prompt="a")
        assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
        assert "secret" not in str(caught.value.body)
        assert live.finished.wait(TIMEOUT_S), "the server ends with its engine"
        assert live.report is not None
        assert live.report.engine_died


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    engine = FakeEngine(step_s=0.002)
    with serve(engine) as live:
        stream = live.openai().completions.create(model=MODEL, prompt="ab", max_tokens=200, stream=True)
        first = next(iter(stream))
        assert first.choices[0].text == "ab"
        engine.crash_next = True
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "engine_dead"


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_that_fails_is_a_500_of_its_own(stream: bool) -> None:
    engine = FakeEngine()
    engine.fail_requests = True
    with serve(engine) as live:
        with pytest.raises(openai.InternalServerError) as caught:
            live.openai().completions.create(model=MODEL, prompt="a", stream=stream)
        assert caught.value.code == "request_failed"
        engine.fail_requests = False
        assert live.openai().completions.create(model=MODEL, prompt="a", max_tokens=1).choices[0].text == "a"


def test_api_key() -> None:
    with serve(FakeEngine(), config=ServerConfig(port=0, api_key="sesame", served_model_name="mine")) as live:
        assert [model.id for model in live.openai("sesame").models.list()] == ["mine"]
        for wrong in ("sesam", "sesamee", "none", "ключ".encode().hex()):
            with pytest.raises(openai.AuthenticationError) as caught:
                live.openai(wrong).models.list()
            assert caught.value.code == "invalid_api_key"
        with live.http() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 401
            assert http.post("/v1/completions", content=b"{").status_code == 401
            assert http.get("/v1/models", headers={"Authorization": "Basic sesame"}).status_code == 401
