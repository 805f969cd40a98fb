"""The two interactive commands as processes, on a small checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from tests import fixtures
from tests.processes import children

pytestmark = pytest.mark.slow
TIMEOUT_S = 200
OUTRIDER = [sys.executable, "-m", "outrider.cli.main"]


@pytest.fixture(scope="module")
def engine_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    target, drafter = fixtures.make_cycle_target(root / "cycle"), fixtures.make_half_drafter(root / "half")
    return [str(target), "--draft", str(drafter)]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("more", [[], ["--disable-frontend-multiprocessing"]], ids=["own process", "in process"])
def test_serve_until_sigterm(engine_flags: list[str], more: list[str]) -> None:
    command = [*OUTRIDER, "serve", *engine_flags, "--port", "0", "--served-model-name", "c", "--json", *more]
    with started(command) as process:
        assert process.stderr is not None
        seen = []
        while " on http" not in (line := process.stderr.readline()):
            seen.append(line)
            assert line, "".join(seen)
        url = line.rpartition(" on ")[2].strip()
        prompt = fixtures.orbit_prompt(8)
        body = {"model": "c", "prompt": prompt, "max_tokens": 9, "temperature": 0}
        assert len(children(process.pid)) == (0 if more else 1)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
        expected = fixtures.continuation(prompt, 9)
        assert answer["choices"][0]["text"] == "".join(fixtures.CHARACTERS[token_id] for token_id in expected)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        report = json.loads(out.splitlines()[-1])
        assert (report["drained"], report["generation_tokens"], report["spec"]["rounds"]) == (True, 9, 2)


def test_serve_ends_with_its_engine(engine_flags: list[str]) -> None:
    with started([*OUTRIDER, "serve", *engine_flags, "--port", "0"]) as process:
        assert process.stderr is not None
        while " on http" not in process.stderr.readline():
            pass
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1


def test_chat_from_a_pipe(engine_flags: list[str]) -> None:
    command = [*OUTRIDER, "chat", *engine_flags, "--temperature", "0", "--max-tokens", "5", "--json"]
    with started(command) as process:
        out, _ = process.communicate("hi\n/stats\nhi\n", timeout=TIMEOUT_S)
        assert process.returncode == 0
    newline = fixtures.CHARACTERS.index("\n")
    answer = "".join(fixtures.CHARACTERS[token_id] for token_id in fixtures.continuation([newline], 5))
    assert out.count(answer) == 2
    assert "turns 1," in out
    figures = json.loads(out.splitlines()[-1])
    assert (figures["turns"], figures["usage"]["completion_tokens"]) == (2, 10)


def test_what_cannot_be_served_is_one_line_and_status_1(engine_flags: list[str]) -> None:
    result = subprocess.run(
        [*OUTRIDER, "serve", *engine_flags, "--port", "70000"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "error: port=70000 must lie in 0..65535"
    assert "Traceback" not in result.stderr
