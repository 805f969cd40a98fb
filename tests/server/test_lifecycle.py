"""Disconnects, drain, signals, metrics and the log line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.fake_engine import FakeEngine
from tests.server.live import TIMEOUT_S, LiveServer, eventually, serve

from outrider.errors import ConfigError
from outrider.outputs import SpecCounters
from outrider.server.config import ServerConfig
from outrider.server.runner import bind, progress_line

TEXT = "/v1/completions"
ENDLESS = {"prompt": "ab", "max_tokens": 250}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"prompt": ["a", "b"], "stream": True}])
def test_a_client_that_leaves_frees_its_requests(held: bool, body: dict[str, object]) -> None:
    """Also while no token comes (``held``), when nothing is sent that could fail."""
    engine = FakeEngine(max_model_len=1_000_000, step_s=0.01)
    engine.hold = held
    prompts = 2 if isinstance(body.get("prompt"), list) else 1
    content = json.dumps({"prompt": "ab", "max_tokens": 900_000, **body}).encode()
    with serve(engine) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            assert eventually(lambda: len(engine.running) == prompts)
            if body["stream"] and not held:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert eventually(lambda: len(engine.ended) == prompts)
        assert set(engine.ended.values()) == {"abort"}
        assert eventually(lambda: live.server.state.in_flight == 0)
        engine.hold = False
        with live.http() as http:  # the server is still there
            assert http.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200


class _Call:
    """A request on a thread of its own."""

    def __init__(self, live: LiveServer, body: dict[str, object]) -> None:
        self._live, self._body = live, body
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._live.http() as http:
            self.response = http.post(TEXT, json=self._body)

    def result(self) -> httpx.Response:
        self._thread.join(TIMEOUT_S)
        assert self.response is not None
        return self.response


def test_drain_finishes_what_is_in_flight_and_refuses_the_rest() -> None:
    engine = FakeEngine()
    engine.hold = True
    with serve(engine, config=ServerConfig(port=0, drain_timeout_s=30)) as live:
        whole, stream = _Call(live, ENDLESS), _Call(live, {**ENDLESS, "stream": True})
        assert eventually(lambda: len(engine.running) == 2)
        live.request_stop()
        with live.http() as http:
            assert eventually(lambda: http.get("/health").status_code == 503)
            for extra in ({}, {"stream": True}):
                late = http.post(TEXT, json={**ENDLESS, **extra})
                assert late.status_code == 503
                assert late.json()["error"]["code"] == "shutting_down"
                assert late.headers["retry-after"]
        assert not live.finished.is_set()
        engine.hold = False
        assert whole.result().json()["usage"]["completion_tokens"] == 250
        assert stream.result().text.endswith("data: [DONE]\n\n")
        assert live.finished.wait(TIMEOUT_S)
        assert live.report is not None
        assert live.report.drained
        assert live.report.stats.generation_tokens_total == 500
    assert engine.shut_down


@pytest.mark.parametrize("second_signal", [False, True])
def test_a_drain_that_takes_too_long_aborts(second_signal: bool) -> None:
    engine = FakeEngine()
    engine.hold = True
    config = ServerConfig(port=0, drain_timeout_s=60 if second_signal else 0.1)
    with serve(engine, config=config) as live:
        call = _Call(live, ENDLESS)
        assert eventually(lambda: len(engine.running) == 1)
        live.request_stop()
        if second_signal:
            live.request_stop()
        response = call.result()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "aborted")
        assert live.finished.wait(TIMEOUT_S)
        assert live.report is not None
        assert not live.report.drained
    assert set(engine.ended.values()) == {"abort"}


SIGTERM_PROGRAM = """
from outrider.server.config import ServerConfig
from outrider.server.runner import bind, run_server
from tests.server.fake_engine import FakeEngine
config = ServerConfig(port=0)
engine = FakeEngine(step_s=0.01)
report = run_server(engine, config, bound=bind(config))
print(report.drained, report.stats.generation_tokens_total)
"""


def test_sigterm_drains_and_exits_with_0() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SIGTERM_PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        url = ""
        while not url:
            line = process.stderr.readline()
            assert line, "the server ended before it served"
            url = line.partition(" on ")[2].strip()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
        stream = client.completions.create(model="fake/echo", prompt="ab", max_tokens=40, stream=True)
        chunks = [next(stream)]
        os.kill(process.pid, signal.SIGTERM)
        chunks += stream
        assert "".join(chunk.choices[0].text for chunk in chunks) == "ab" * 20
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out.strip()) == (0, "True 40")
    finally:
        process.kill()
        process.communicate()


def test_metrics() -> None:
    with serve(FakeEngine()) as live, live.http() as http:
        http.post(TEXT, json={"prompt": "abc", "max_tokens": 5})
        http.post(TEXT, json={"prompt": "abcd", "max_tokens": 9, "stop": "b"})
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake/echo"
            labels.pop("le", None)
            samples[(sample.name.removeprefix("outrider:"), *labels.values())] = sample.value
    expected = {
        ("num_requests_running",): 0, ("num_requests_waiting",): 0, ("kv_cache_usage_perc",): 0.25,
        ("prompt_tokens_total",): 7, ("generation_tokens_total",): 7, ("num_preemptions_total",): 3,
        ("prefix_cache_queries_total",): 40, ("prefix_cache_hits_total",): 10, ("engine_steps_total",): 12,
        ("request_success_total", "length"): 1, ("request_success_total", "stop"): 1,
        ("expert_rows_total", "0", "target", "0"): 5, ("expert_rows_total", "1", "target", "0"): 0,
        ("expert_rows_total", "2", "target", "1"): 7, ("expert_rows_total", "3", "target", "1"): 9,
        ("request_success_total", "abort"): 0, ("spec_decode_num_drafts_total",): 10,
        ("spec_decode_num_draft_tokens_total",): 30, ("spec_decode_num_accepted_tokens_total",): 15,
        ("spec_decode_num_undrafted_tokens_total",): 6,
        ("spec_decode_num_emitted_tokens_total",): 25, ("spec_decode_accepted_length",): 2.5,
        ("spec_decode_acceptance_rate",): 0.5, ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 9,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 1,
        ("spec_decode_num_draft_tokens_per_pos_total", "2"): 10, ("time_to_first_token_seconds_count",): 2,
        ("e2e_request_latency_seconds_count",): 2, ("request_time_per_output_token_seconds_count",): 2,
    }  # fmt: skip
    assert {name: samples[name] for name in expected} == expected


def test_the_log_line_tells_of_its_interval_alone() -> None:
    before = FakeEngine().stats()
    assert progress_line(before, before, interval_s=10) == ""
    now = replace(
        before,
        prompt_tokens_total=100,
        generation_tokens_total=50,
        num_running=2,
        num_waiting=1,
        spec=SpecCounters(rounds=20, offered=50, accepted=25, emitted=55),
    )
    assert progress_line(before, now, interval_s=10) == (
        "prompt 10.0 tokens/s, generation 5.0 tokens/s, running 2, waiting 1, KV use 25.0%, "
        "accepted length 3.00, acceptance rate 50.0%"
    )
    assert progress_line(before, replace(now, spec=before.spec), interval_s=10).endswith("no rounds")


def test_an_address_in_use_is_a_config_error() -> None:
    with bind(ServerConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"port": 70000}, "port=70000"),
        ({"max_body_bytes": 0}, "max_body_bytes=0"),
        ({"max_prompts": 0}, "max_prompts=0"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s=-1"),
        ({"log_interval_s": float("nan")}, "log_interval_s=nan"),
        ({"api_key": "ключ"}, "api_key"),
    ],
)
def test_server_config_names_what_is_wrong(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**change)  # type: ignore[arg-type]
