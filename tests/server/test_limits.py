"""What must be refused, and how: over raw HTTP, because the official client cannot send it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.fake_engine import FakeEngine
from tests.server.live import TIMEOUT_S, LiveServer, serve

from outrider.server.config import ServerConfig

MAX_BODY = 20_000
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    config = ServerConfig(port=0, max_body_bytes=MAX_BODY, drain_timeout_s=0.0)
    with serve(FakeEngine(), config=config) as server:
        yield server


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.http() as client:
        yield client


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (TEXT, {"temperature": "hot"}, "temperature", ['"hot"', "finite number"]),
        (TEXT, {"temperature": True}, "temperature", ["true", "finite number"]),
        (TEXT, {"temperature": -1}, "temperature", ["-1", "at least 0"]),
        (TEXT, {"temperature": 10**400}, "temperature", ["finite"]),
        (TEXT, {"top_p": 0}, "top_p", ["0", "above 0"]),
        (TEXT, {"top_p": 1.5}, "top_p", ["1.5"]),
        (TEXT, {"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
        (TEXT, {"max_tokens": 3.5}, "max_tokens", ["3.5", "an integer"]),
        (TEXT, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", ["4", "3"]),
        (TEXT, {"n": 0}, "n", ["0", "at least 1"]),
        (TEXT, {"n": 129}, "n", ["129", "128"]),
        (TEXT, {"seed": 2**70}, "seed", [str(2**70)]),
        (TEXT, {"logprobs": 21}, "logprobs", ["21", "20"]),
        (TEXT, {"logprobs": True}, "logprobs", ["true", "integer"]),
        (TEXT, {"stop": [""]}, "stop", ["empty"]),
        (TEXT, {"stop": ["a"] * 65}, "stop", ["65", "64"]),
        (TEXT, {"stop": [1]}, "stop", ["[1]", "list of strings"]),
        (TEXT, {"stop_token_ids": [256]}, "stop_token_ids", ["256", "255"]),
        (TEXT, {"logit_bias": {"abc": 1}}, "logit_bias", ["abc", "token ids"]),
        (TEXT, {"logit_bias": {"300": 1}}, "logit_bias", ["300", "255"]),
        (TEXT, {"logit_bias": {"3": 101}}, "logit_bias", ["101", "100"]),
        (TEXT, {"logit_bias": {"3": "x"}}, "logit_bias", ["x", "numbers"]),
        (TEXT, {"echo": True}, "echo", ["true", "false"]),
        (TEXT, {"suffix": "end"}, "suffix", ['"end"', "not support"]),
        (TEXT, {"best_of": 2}, "best_of", ["2", "1"]),
        (TEXT, {"colour": "red"}, "colour", ["red", "unknown parameter"]),
        (TEXT, {"messages": MESSAGES}, "messages", ["unknown parameter"]),
        (TEXT, {"prompt": ""}, "prompt", ["empty"]),
        (TEXT, {"prompt": []}, "prompt", ["empty"]),
        (TEXT, {"prompt": [[]]}, "prompt", ["empty"]),
        (TEXT, {"prompt": ["a", ""]}, "prompt", ["empty"]),
        (TEXT, {"prompt": ["a", 5]}, "prompt", ['["a", 5]', "list of strings"]),
        (TEXT, {"prompt": [True]}, "prompt", ["list of"]),
        (TEXT, {"prompt": {"a": 1}}, "prompt", ["list of"]),
        (TEXT, {"prompt": None}, "prompt", ["null"]),
        (TEXT, {"prompt": [256]}, "prompt", ["256", "255"]),
        (TEXT, {"prompt": [-1]}, "prompt", ["-1"]),
        (TEXT, {"prompt": "x" * 300}, "prompt", ["300", "255"]),
        (TEXT, {"stream": "yes"}, "stream", ["yes", "true or false"]),
        (TEXT, {"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
        (TEXT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", ["unknown parameter"]),
        (TEXT, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["true or"]),
        (CHAT, {"messages": []}, "messages", ["empty"]),
        (CHAT, {"messages": "hi"}, "messages", ['"hi"', "list"]),
        (CHAT, {"messages": [5]}, "messages", ["5"]),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", ["required"]),
        (CHAT, {"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].role", ["tool", "user"]),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", ["null", "string"]),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", ["image_url", "text"]),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name", ["not support"]),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", ["unknown"]),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", ["json_object", "text"]),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", ["json_schema"]),
        (CHAT, {"tools": []}, "tools", ["not support"]),
        (CHAT, {"tool_choice": "none"}, "tool_choice", ["not support"]),
        (CHAT, {"store": False}, "store", ["not support"]),
        (CHAT, {"metadata": {}}, "metadata", ["not support"]),
        (CHAT, {"prompt": "x"}, "prompt", ["unknown parameter"]),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", ["2", "logprobs=true"]),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["top_logprobs=21", "20"]),
        (CHAT, {"logprobs": 1}, "logprobs", ["true or false"]),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", ["max_completion_tokens=0", "at least 1"]),
        (CHAT, {"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens", ["3", "4"]),
    ],
)  # fmt: skip
def test_bad_parameter(http: httpx.Client, path: str, change: dict[str, object], param: str, words: list[str]) -> None:
    body = {"prompt": "x"} if path == TEXT else {"messages": MESSAGES}
    error = refused(http.post(path, json={**body, **change}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    for word in (param.split(".")[0].split("[")[0], *words):
        assert word in error["message"]


def test_nan_is_refused_by_name(http: httpx.Client) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        error = refused(http.post(TEXT, content=f'{{"prompt": "x", "temperature": {value}}}'))
        assert error["param"] == "temperature"


def test_null_means_default(http: httpx.Client) -> None:
    names = [
        "model", "user", "stream", "stream_options", "n", "temperature", "top_p", "seed", "max_tokens", "stop",
        "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens",
        "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs",
    ]  # fmt: skip
    nulls = dict.fromkeys([*names, "suffix", "echo", "best_of"])
    answer = http.post(TEXT, json={**nulls, "prompt": "ab"})
    assert answer.json()["choices"][0]["text"] == "ab" * 8
    nulls = dict.fromkeys([*names, "tools", "response_format", "top_logprobs", "max_completion_tokens", "store"])
    assert http.post(CHAT, json={**nulls, "messages": MESSAGES}).status_code == 200
    assert refused(http.post(TEXT, json={"prompt": "ab", "colour": None}))["param"] == "colour"


def test_no_effect_values_are_accepted(http: httpx.Client) -> None:
    text = {"prompt": "ab", "echo": False, "best_of": 1, "user": "me", "n": 1}
    assert http.post(TEXT, json=text).status_code == 200
    assert http.post(CHAT, json={"messages": MESSAGES, "response_format": {"type": "text"}}).status_code == 200
    same = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 3}
    assert http.post(CHAT, json=same).json()["usage"]["completion_tokens"] == 3


def test_unknown_model(http: httpx.Client) -> None:
    error = refused(http.post(TEXT, json={"model": "gpt-9", "prompt": "x"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": }', b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 9000],
)
def test_malformed_json(http: httpx.Client, body: bytes) -> None:
    assert refused(http.post(TEXT, content=body))["code"] == "invalid_json"


def test_content_type(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "x"})
    for good in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert http.post(TEXT, content=body, headers={"Content-Type": good}).status_code == 200
    assert http.post(TEXT, content=body).status_code == 200  # none at all
    for bad in ("text/plain", "application/x-www-form-urlencoded"):
        error = refused(http.post(TEXT, content=body, headers={"Content-Type": bad}))
        assert error["code"] == "invalid_content_type"
        assert bad in error["message"]


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert "/v1/engines" in refused(http.get("/v1/engines"), 404)["message"]
    assert refused(http.get("/docs"), 404)["message"]
    assert refused(http.get(TEXT), 405)["message"]
    assert http.get(TEXT).headers["allow"] == "POST"


@pytest.mark.parametrize("size", [MAX_BODY + 1, 12 * MAX_BODY, 40 * MAX_BODY])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit(live: LiveServer, size: int, chunked: bool) -> None:
    content = b'{"prompt": "' + b"x" * size + b'"}'
    chunks = (content[i : i + 4096] for i in range(0, len(content), 4096))
    with live.http() as http:
        if size > 16 * MAX_BODY and chunked:  # cut off at some point; the client may see either
            with contextlib.suppress(httpx.TransportError):
                refused(http.post(TEXT, content=chunks), 413)
        else:
            error = refused(http.post(TEXT, content=chunks if chunked else content), 413)
            assert str(MAX_BODY) in error["message"]
    with live.http() as http:
        assert http.get("/health").status_code == 200


def test_body_at_the_limit(http: httpx.Client) -> None:
    content = b'{"prompt": "x", "max_tokens": 1' + b" " * MAX_BODY
    assert http.post(TEXT, content=content[: MAX_BODY - 1] + b"}").status_code == 200


def test_a_body_that_never_ends_is_given_up() -> None:
    with serve(FakeEngine(), config=ServerConfig(port=0, body_timeout_s=0.1)) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)
KNOWN = [
    "model", "prompt", "messages", "n", "temperature", "top_p", "seed", "max_tokens", "stop", "stream", "logit_bias",
    "stream_options", "top_k", "min_p", "stop_token_ids", "logprobs", "top_logprobs", "response_format", "tools",
    "max_completion_tokens", "echo", "best_of",
]  # fmt: skip


@given(
    path=st.sampled_from([TEXT, CHAT]),
    valid=st.booleans(),
    body=json_values | st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), json_values, max_size=4),
)
def test_random_json_is_answered_or_refused(http: httpx.Client, path: str, valid: bool, body: Any) -> None:
    if valid and isinstance(body, dict):
        body = {"prompt": "x", "max_tokens": 2, **body} if path == TEXT else {"messages": MESSAGES, **body}
    content = json.dumps(body)  # NaN and lone surrogates included
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    if answer.status_code != 200:
        refused(answer, 404 if answer.status_code == 404 else 400)


@given(body=st.binary(max_size=40))
def test_random_bytes_are_refused(http: httpx.Client, body: bytes) -> None:
    refused(http.post(TEXT, content=body))
