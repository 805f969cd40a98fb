"""``outrider bench peers``: ours and transformers end to end on a small model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import fixtures
from typer.testing import CliRunner, Result

from outrider.cli.bench import bench_app
from outrider.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fixtures.make_cycle_target(tmp_path_factory.mktemp("model")))


def _invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(bench_app, ["peers", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
def test_ours_and_transformers(model: str, tmp_path: Path) -> None:
    drafter = str(fixtures.make_perfect_drafter(tmp_path / "drafter"))
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"turns": ["hello"]}\n{"turns": ["and more"]}\n{"turns": ["last"]}\n', encoding="utf-8")
    result = _invoke(
        model, "--draft", drafter, "--data", str(data), "--limit", "2", "--max-tokens", "12", "--streams", "1,3",
        "--temperatures", "0,0.8", "--repeat", "2", "--threads", "1", "--lookup-tokens", "4", "--json",
    )  # fmt: skip
    report: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    ran = {"outrider-none", "outrider-lookup", "outrider-dspark", "transformers-bfloat16"}
    assert [(cell["streams"], cell["temperature"]) for cell in report["cells"]] == [(1, 0), (1, 0.8), (3, 0), (3, 0.8)]
    for cell in report["cells"]:
        lookup = {"transformers-bfloat16-lookup-4"}
        assert cell["peers"].keys() == (ran | lookup if cell["streams"] == 1 else ran)
        assert cell["skipped"].keys() == (set() if cell["streams"] == 1 else lookup)
        for peer in cell["peers"].values():
            assert peer["figures"]["num_tokens"] == 2 * 12 * (2 if cell["streams"] == 1 else 3)
            assert peer["figures"]["output_tokens_per_s"]["median"] > 0
            assert peer["peak_rss_bytes"] > 2**20
        assert cell["best_peer"] in ran | lookup
        assert cell["peers"][cell["best_peer"]]["over_best_peer"]["output_tokens_per_s"]["median"] == 1.0
    answers = {peer["first_answer"] for peer in report["cells"][0]["peers"].values()}
    assert len(answers) == 1  # CYCLE leads by 8 logits: greedy answers are one, whoever gives them
    assert report["cells"][0]["peers"]["outrider-dspark"]["figures"]["spec"]["accepted_length"] > 4
    assert {"llama.cpp-q4_0", "openvino-q8_0-lookup-4"} <= report["skipped"].keys()
    assert {"torch", "transformers"} <= report["settings"]["versions"].keys()
    assert report["settings"]["threads"] == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--streams", "1,x"), "streams='1,x' must be whole numbers from 1"),
        (("--streams", "0"), "streams='0' must be"),
        (("--streams", "65"), "streams='65' exceeds max_num_seqs=64"),
        (("--temperatures", "-1"), "temperatures='-1' must be finite numbers from 0"),
        (("--formats", "q3"), "formats='q3' must be some of file, q4_0, q8_0"),
        (("--lookup-tokens", "0"), "lookup_tokens='0' must be"),
        (("--repeat", "0"), "repeat=0 must be at least 1"),
        (("--threads", "0"), "threads=0 must be at least 1"),
        (("--limit", "2"), "limit=2 is a number of lines"),
        (("--data-parallel-size", "2"), "one rank; there are 2"),
        (("--peers", "vllm"), "peers='vllm' is none of outrider-none"),
    ],
)
def test_wrong_values_are_named(model: str, arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _invoke(model, *arguments)
