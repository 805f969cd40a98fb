"""Commands over several ranks as a user starts them: one machine, two, torchrun; signals, and a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from tests import fixtures
from tests.engine.groups import EXIT_S, is_running, within
from tests.processes import children

pytestmark = pytest.mark.slow
TIMEOUT_S = 200
OUTRIDER = [sys.executable, "-m", "outrider.cli.main"]
PROMPT = fixtures.orbit_prompt(8)
RANKS = ["--data-parallel-size", "2", "--kv-cache-memory-bytes", "4000000", "--no-draft-self-test"]


@pytest.fixture(scope="module")
def engine_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    target, drafter = fixtures.make_cycle_target(root / "cycle"), fixtures.make_half_drafter(root / "half")
    return [str(target), "--draft", str(drafter), *RANKS]


class Serving:
    """``outrider serve`` in a process of its own, its ranks below it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        seen = []
        while " on http" not in (line := process.stderr.readline()):
            seen.append(line)
            assert line, "".join(seen)
        self.url = line.rpartition(" on ")[2].strip()
        self.ranks = children(process.pid)
        self._drain = threading.Thread(target=process.stderr.read, daemon=True)  # a full pipe would stop it
        self._drain.start()

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def wait(self) -> tuple[int, str]:
        """Exit status and standard output; by then no rank is left."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        status = self.process.wait(TIMEOUT_S)
        assert within(EXIT_S, lambda: not any(map(is_running, self.ranks)))
        return status, out


@contextmanager
def serving(flags: list[str]) -> Iterator[Serving]:
    process = subprocess.Popen(
        [*OUTRIDER, "serve", *flags, "--port", "0", "--served-model-name", "c", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        server = Serving(process)
        assert len(server.ranks) == 2
        yield server
    finally:
        process.kill()
        process.wait()


def text_of(length: int) -> str:
    return "".join(fixtures.CHARACTERS[token] for token in fixtures.continuation(PROMPT, length))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain_all_ranks(number: signal.Signals, engine_flags: list[str]) -> None:
    with serving(engine_flags) as server:
        streams = [
            server.openai().completions.create(model="c", prompt=PROMPT, max_tokens=300, temperature=0, stream=True)
            for _ in range(4)
        ]
        texts = [next(iter(stream)).choices[0].text for stream in streams]
        server.process.send_signal(number)
        for index, stream in enumerate(streams):
            texts[index] += "".join(chunk.choices[0].text for chunk in stream)
        status, out = server.wait()
        assert texts == [text_of(300)] * 4
        report = json.loads(out.splitlines()[-1])
        assert (status, report["drained"], report["engine_died"]) == (0, True, False)
        assert report["generation_tokens"] == 4 * 300


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_server(rank: int, engine_flags: list[str]) -> None:
    with serving(engine_flags) as server:
        metrics = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
        assert 'outrider:rank_num_requests_running{dp_rank="1"' in metrics
        streams = [
            server.openai().completions.create(model="c", prompt=PROMPT, max_tokens=900, temperature=0, stream=True)
            for _ in range(4)
        ]
        began = time.monotonic()
        os.kill(server.ranks[rank], signal.SIGKILL)
        ends = []
        for stream in streams:
            try:
                ends.append("".join(chunk.choices[0].text for chunk in stream))
            except openai.APIError as error:
                ends.append(str(error.code))
        status, out = server.wait()
        assert time.monotonic() - began < EXIT_S
        assert set(ends) <= {"engine_dead", text_of(900)}
        assert status == 1
        assert json.loads(out.splitlines()[-1])["engine_died"]


def test_a_server_without_requests_ends_with_its_ranks_too(engine_flags: list[str]) -> None:
    with serving(engine_flags) as server:
        os.kill(server.ranks[1], signal.SIGKILL)
        status, _ = server.wait()
        assert status == 1


def test_ranks_do_not_outlive_a_server_that_is_killed(engine_flags: list[str]) -> None:
    with serving(engine_flags) as server:
        server.process.kill()
        server.process.wait()
        assert within(EXIT_S, lambda: not any(map(is_running, server.ranks)))


def generate_flags(engine_flags: list[str]) -> list[str]:
    prompts = [flag for length in (3, 9, 14) for flag in ("--prompt", text_of(60)[:length])]
    return ["generate", *engine_flags, "--raw", "--max-tokens", "30", "--json", *prompts]


def check_generated(out: str) -> None:
    results = json.loads(out.splitlines()[-1])["results"]
    for length, result in zip((3, 9, 14), results, strict=True):
        prompt = fixtures.continuation(PROMPT, length)
        assert result["token_ids"] == fixtures.continuation(prompt, 30)


def test_generate(engine_flags: list[str]) -> None:
    result = subprocess.run(
        [*OUTRIDER, *generate_flags(engine_flags)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr
    check_generated(result.stdout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_nodes(engine_flags: list[str]) -> None:
    """Two commands on one machine, as on two: each starts its rank, the first takes the requests."""
    command = [*OUTRIDER, *generate_flags(engine_flags), "--nnodes", "2", "--master-port", str(free_port())]
    second = subprocess.Popen([*command, "--node-rank", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first = subprocess.run([*command, "--node-rank", "0"], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert first.returncode == 0, first.stderr
        check_generated(first.stdout)
        out, err = second.communicate(timeout=TIMEOUT_S)
        assert (second.returncode, out) == (0, ""), err
    finally:
        second.kill()
        second.communicate()


def test_nodes_with_different_flags_are_refused(engine_flags: list[str]) -> None:
    command = [*OUTRIDER, *generate_flags(engine_flags), "--nnodes", "2", "--master-port", str(free_port())]
    second = subprocess.Popen(
        [*command, "--node-rank", "1", "--max-num-seqs", "7"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = subprocess.run([*command, "--node-rank", "0"], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert first.returncode == 1
        assert "max_num_seqs=64 here, 7 on the machine of rank 1" in first.stderr
        second.communicate(timeout=TIMEOUT_S)
        assert second.returncode == 1
    finally:
        second.kill()
        second.communicate()


def test_torchrun(engine_flags: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    result = subprocess.run(
        [*command, "outrider.cli.main", *generate_flags(engine_flags)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr
    check_generated(result.stdout)
