"""``outrider generate`` and ``outrider demo`` on small checkpoints: results, failures of single prompts, flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests import fixtures
from typer.testing import CliRunner, Result

from outrider.cli.demo import demo_command
from outrider.cli.generate import generate_command
from outrider.cli.json_output import print_json_line
from outrider.cli.main import main
from outrider.errors import ConfigError, QueueFullError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fixtures.make_cycle_target(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fixtures.make_perfect_drafter(tmp_path_factory.mktemp("drafter")))


def _run(command: Any, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def _last_json(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return report


def test_results_of_a_perfect_drafter(model: str, drafter: str) -> None:
    result = _run(generate_command, model, "--draft", drafter, "--prompt", "a", "--raw", "--max-tokens", "17", "--json")
    assert result.exit_code == 0
    report = _last_json(result)
    expected = fixtures.continuation([0], 17)
    assert report["results"] == [
        {
            "prompt": "a",
            "token_ids": expected,
            "text": "".join(fixtures.CHARACTERS[token_id] for token_id in expected),
            "finish_reason": "length",
            "usage": {"prompt_tokens": 1, "completion_tokens": 17, "total_tokens": 18},
        }
    ]
    assert (report["spec"]["rounds"], report["spec"]["accepted_length"]) == (2, 8.0)


def test_a_prompt_that_is_refused_fails_alone(model: str) -> None:
    arguments = ("--draft", "none", "--raw", "--max-tokens", "3", "--max-num-waiting", "1")
    result = _run(
        generate_command, model, *arguments, "--prompt", "a" * 2000, "--prompt", "a", "--prompt", "", "--json"
    )
    assert result.exit_code == 1
    long, good, empty = _last_json(result)["results"]
    assert (long["finish_reason"], good["finish_reason"], empty["finish_reason"]) == ("error", "length", "error")
    assert good["token_ids"] == fixtures.continuation([0], 3)
    assert "error" not in good
    assert "2000 tokens" in long["error"]
    assert "0 tokens" in empty["error"]
    assert "error: prompt 1: " in result.stderr
    assert "error: prompt 3: " in result.stderr


def test_more_completions_than_may_wait_are_refused(model: str) -> None:
    """And not waited for without an end."""
    with pytest.raises(QueueFullError, match="max_waiting=2"):
        _run(generate_command, model, "--draft", "none", "--prompt", "a", "--n", "3", "--max-num-waiting", "2")


def test_a_limit_without_a_file_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="limit=1"):
        _run(generate_command, model, "--prompt", "a", "--limit", "1")


def test_errors_end_in_a_json_line_where_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "none.jsonl"
    for extra, lines in (([], 0), (["--json"], 1)):
        monkeypatch.setattr(sys, "argv", ["outrider", "generate", "--prompt-file", str(prompts), *extra])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"error: prompt file {prompts} cannot be read")
        assert len(captured.out.splitlines()) == lines
    assert "cannot be read" in json.loads(captured.out)["error"]


def test_the_json_line_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    """A stdout of another encoding, or a path that is no UTF-8, must not keep it from being written."""
    print_json_line({"text": "é \ud800"})
    line = capsys.readouterr().out
    assert line.isascii()
    assert json.loads(line) == {"text": "é \ud800"}


def test_demo_compares_three_ways_with_flags_of_its_drafter(model: str, drafter: str) -> None:
    """The baselines have no confidence head for the threshold to look at."""
    result = _run(
        demo_command, model, "--draft", drafter, "--draft-confidence-threshold", "0.01", "--num-speculative-tokens",
        "3", "--prompt", "ab", "--max-tokens", "9", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    report = _last_json(result)
    assert [run["draft"] for run in report["runs"]] == [drafter, "none", "lookup"]
    assert [run["tokens"] for run in report["runs"]] == [9, 9, 9]
    assert report["identical"]
    assert len(report["runs"][0]["spec"]["per_position"]) == 3


def test_demo_of_a_baseline_runs_it_once(model: str) -> None:
    report = _last_json(_run(demo_command, model, "--draft", "none", "--prompt", "ab", "--max-tokens", "9", "--json"))
    assert [run["draft"] for run in report["runs"]] == ["none", "lookup"]
    assert report["identical"]
