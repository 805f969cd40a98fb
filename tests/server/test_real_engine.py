"""The server over the real engine, on the CYCLE target, whose greedy answer is known, with the HALF drafter."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests import fixtures
from tests.server.live import TIMEOUT_S, LiveServer, eventually, serve

from outrider.cli.serve import report_json
from outrider.config import EngineArgs
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.setup import build_engine
from outrider.server.config import ServerConfig
from outrider.server.engine_client import AsyncEngineClient

TEXT = "/v1/completions"
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return fixtures.make_cycle_target(root / "cycle"), fixtures.make_half_drafter(root / "half")


@pytest.fixture(scope="module")
def make_engine(checkpoints: tuple[Path, Path]) -> Callable[..., AsyncEngine]:
    def make(**changes: Any) -> AsyncEngine:
        target, drafter = checkpoints
        args = EngineArgs(model=str(target), draft=str(drafter), max_model_len=MAX_MODEL_LEN, **changes)
        return AsyncEngine(build_engine(args), model_name="cycle")

    return make


@pytest.fixture(scope="module")
def live(make_engine: Callable[..., AsyncEngine]) -> Iterator[LiveServer]:
    engine: AsyncEngineClient = make_engine(kv_cache_memory_bytes=2_000_000)
    with serve(engine, config=ServerConfig(port=0, drain_timeout_s=0.0)) as server:
        yield server


def text_of(token_ids: list[int]) -> str:
    return "".join(fixtures.CHARACTERS[token_id] for token_id in token_ids)


def test_greedy_answer_is_the_targets(live: LiveServer) -> None:
    client = live.openai()
    for length in (1, 16, 100):
        prompt = fixtures.orbit_prompt(length)
        expected = text_of(fixtures.continuation(prompt, 50))
        for given in (prompt, text_of(prompt)):
            whole = client.completions.create(model="cycle", prompt=given, max_tokens=50, temperature=0)
            assert whole.choices[0].text == expected
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (length, 50)
        chunks = list(
            client.completions.create(
                model="cycle", prompt=prompt, max_tokens=50, temperature=0, logprobs=1, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
        tokens = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.tokens or []]
        assert "".join(tokens) == expected
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 50


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_and_several_sequences(live: LiveServer, stream: bool) -> None:
    prompt = fixtures.orbit_prompt(20)
    following = text_of(fixtures.continuation(prompt, 40))
    stop = following[9:12]  # spans tokens, and ends inside an accepted run
    answer: Any = live.openai().completions.create(
        model="cycle", prompt=[prompt, prompt], n=2, max_tokens=40, temperature=0, stop=[stop], stream=stream
    )
    texts = ["", "", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [following[:9]] * 4


def test_chat_and_its_logprobs(live: LiveServer) -> None:
    answer = live.openai().chat.completions.create(
        model="cycle",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    newline = fixtures.CHARACTERS.index("\n")  # the last token of the template's prompt
    assert choice.message.content == text_of(fixtures.continuation([newline], 5))
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 5
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)


def test_the_context_limit_ends_an_answer(live: LiveServer) -> None:
    prompt = fixtures.orbit_prompt(MAX_MODEL_LEN - 10)
    answer = live.openai().completions.create(model="cycle", prompt=prompt, max_tokens=100, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == text_of(fixtures.continuation(prompt, 10))
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai().completions.create(model="cycle", prompt=fixtures.orbit_prompt(MAX_MODEL_LEN))
    assert caught.value.code == "context_length_exceeded"


def test_concurrent_clients_a_third_of_which_leave(live: LiveServer) -> None:
    """Nothing fails, every answer is its own, and all pages come back."""
    statuses: list[int] = []
    wrong: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        with live.http() as http:
            for _ in range(4):
                prompt = fixtures.orbit_prompt(rng.randint(1, 60), first_generated_index=rng.randint(0, 59))
                count = rng.randint(1, 60)
                body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
                if rng.random() < 0.33:
                    with http.stream("POST", TEXT, json={**body, "max_tokens": 150, "stream": True}) as response:
                        statuses.append(response.status_code)
                        next(response.iter_raw())
                    continue
                response = http.post(TEXT, json=body)
                statuses.append(response.status_code)
                if response.json()["choices"][0]["text"] != text_of(fixtures.continuation(prompt, count)):
                    wrong.append(response.text)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert statuses == [200] * 32
    assert wrong == []
    engine = live.server.state.engine
    assert eventually(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
    assert eventually(lambda: engine.stats().kv_blocks_free == engine.stats().kv_blocks_total)
    assert eventually(lambda: live.server.state.in_flight == 0)


def test_metrics_count_the_drafting(live: LiveServer) -> None:
    def value(name: str) -> float:
        for line in http.get("/metrics").text.splitlines():
            if line.startswith(f"outrider:{name}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no {name}")

    with live.http() as http:
        names = [f"spec_decode_num_{kind}_total" for kind in ("drafts", "accepted_tokens", "emitted_tokens")]
        before = [value(name) for name in names]
        tokens = value("generation_tokens_total")
        http.post(TEXT, json={"prompt": fixtures.orbit_prompt(8), "max_tokens": 65, "temperature": 0})
        assert eventually(lambda: value("generation_tokens_total") == tokens + 65)
        rounds, accepted, emitted = (value(name) - old for name, old in zip(names, before, strict=True))
    assert (rounds, accepted, emitted) == (16, 48, 64)  # HALF emits exactly 4 a round, after one token from prefill


def test_a_full_queue_is_a_429(make_engine: Callable[..., AsyncEngine]) -> None:
    with serve(make_engine(max_num_seqs=1, max_num_waiting=1)) as live, live.http() as http:
        answers: list[httpx.Response] = []

        def call() -> None:
            with live.http() as own:
                answers.append(own.post(TEXT, json={"prompt": "ab", "max_tokens": 200, "n": 1}))

        body = {"prompt": [[1]] * 8, "max_tokens": 200, "temperature": 0}
        response = http.post(TEXT, json=body)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(answers) == 2
        assert {answer.status_code for answer in answers} <= {200, 429}
        assert 200 in {answer.status_code for answer in answers}


def test_the_report_is_json(make_engine: Callable[..., AsyncEngine]) -> None:
    engine = make_engine()
    with serve(engine) as live, live.http() as http:
        http.post(TEXT, json={"prompt": fixtures.orbit_prompt(8), "max_tokens": 9, "temperature": 0})
    assert live.report is not None
    report = json.loads(json.dumps(report_json(live.report), allow_nan=False))
    assert (report["prompt_tokens"], report["generation_tokens"]) == (8, 9)
    assert report["spec"]["accepted_length"] == 4.0
    assert report["requests_finished"]["length"] == 1
