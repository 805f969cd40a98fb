"""Every command of the README runs as written, and every file and target it names exists.

Code blocks marked ``bash`` are split into commands; ``make`` targets are checked with ``make -n``, the server block is
started, asked and stopped, the Python block is executed. The commands use the real model.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [
        line.split("  #")[0].strip() for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def run(argv: list[str], timeout: float = 280) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def test_the_readme_has_commands_and_code() -> None:
    verbs = {shlex.split(c)[1] for c in commands() if c.startswith("outrider")}
    assert {"generate", "serve", "bench", "chat", "train", "inspect", "explain", "convert"} <= verbs
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make")])
def test_make_targets_exist(command: str) -> None:
    assert run(["make", "-n", *shlex.split(command)[1:]]).returncode == 0


def test_every_relative_link_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


RUNNABLE = ("generate", "bench", "inspect", "explain")
CONVERTED = ROOT / "runs" / "smollm2-8x"


@pytest.fixture(scope="module")
def converted() -> Iterator[None]:
    """The model that the commands over ranks run on, made by the README's own command."""
    assert not CONVERTED.exists(), f"{CONVERTED} is in the way"
    command = next(c for c in commands() if c.startswith("outrider convert"))
    assert str(CONVERTED.relative_to(ROOT)) in command
    result = run(shlex.split(command))
    assert result.returncode == 0, result.stderr
    yield
    shutil.rmtree(CONVERTED)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("outrider") and c.split()[1] in RUNNABLE])
def test_commands_run(command: str, converted: None) -> None:
    result = run(shlex.split(command))
    assert result.returncode == 0, result.stderr
    if "--json" in command:
        json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.real_model
def test_the_python_example_runs() -> None:
    result = run([sys.executable, "-c", blocks("python")[0]])
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.slow
@pytest.mark.real_model
def test_chat_and_train_commands_parse() -> None:
    """They take a person or an hour: their flags are checked against what the commands know."""
    for command in commands():
        words = shlex.split(command)
        if words[0] == "outrider" and words[1] in ("chat", "train"):
            known = run([str(BIN / "outrider"), words[1], "--help"]).stdout
            assert all(flag in known for flag in words if flag.startswith("--")), command


@pytest.mark.slow
@pytest.mark.real_model
def test_the_server_answers_the_request_of_the_readme() -> None:
    serve = next(c for c in commands() if c.startswith("outrider serve"))
    curl = next(c for c in commands() if c.startswith("curl"))
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    server = subprocess.Popen(shlex.split(serve), cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None, "the server ended by itself"
                assert time.monotonic() < deadline, "the server did not become healthy"
                time.sleep(0.5)
        answer = run(shlex.split(curl))
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["choices"][0]["message"]["content"]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
