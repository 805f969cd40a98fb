"""The fidelity benchmark on small models: a model is no way from itself, 4-bit weights are farther than 8-bit ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import fidelity
from benchmarks.fidelity import Distributions, Score, Total
from tests.engine.zoo import Zoo
from tests.kernels import needs_kernels


@pytest.fixture
def arguments(zoo: Zoo, tmp_path: Path) -> list[str]:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abc abc", "hello")), encoding="utf-8")
    chosen = ["--data", str(data), "--model", str(zoo.path("rand")), "--work", str(tmp_path / "work")]
    return [*chosen, "--tokens", "150", "--max-tokens", "12"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert fidelity.main(arguments) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return report


@needs_kernels
def test_scores_are_kept_and_a_second_run_computes_none(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(arguments, capsys)
    assert report["tokens"] >= 150
    assert list(report["scores"]) == ["float32", "bfloat16", "int8", "int4"]
    scores = {name: by_reference["float32"]["mean_kl"] for name, by_reference in report["scores"].items()}
    assert scores["float32"] == report["scores"]["bfloat16"]["bfloat16"]["mean_kl"] == 0.0
    assert report["scores"]["float32"]["float32"]["top1_agreement"] == 1.0
    assert 0.0 < scores["bfloat16"] < scores["int4"]
    assert 0.0 < scores["int8"] < scores["int4"]

    def refuse(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(fidelity, "logits", refuse)
    monkeypatch.setattr(fidelity, "answers", refuse)
    assert run(arguments, capsys) == report


@needs_kernels
def test_a_run_goes_on_where_another_was_cut(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(arguments, capsys)
    kept = Path(arguments[arguments.index("--work") + 1]) / "scores.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines()
    kept.write_text("\n".join(lines[: len(lines) // 2 + 1]) + "\n", encoding="utf-8")
    assert 0 < run([*arguments, "--kept"], capsys)["tokens"] < whole["tokens"]
    assert run(arguments, capsys) == whole
    with pytest.raises(SystemExit, match="holds the work of other settings"):
        fidelity.main([*arguments, "--tokens", "151"])


def test_divergence_is_the_definition() -> None:
    expected = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()
    found = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    score = Score.of(Distributions(expected), Distributions(found + 3.0))  # logits are free up to a constant
    divergence = 0.6 * math.log(0.6 / 0.25) + 0.4 * math.log(0.4 / 0.75)
    assert score.divergence == pytest.approx(divergence, abs=1e-6)
    assert score.agreeing == 1
    total = Total([(2, score), (2, Score(divergence=0.0, agreeing=2))])
    assert total.tokens == 4
    assert total.mean_kl == pytest.approx(divergence / 4)
    assert total.standard_error == pytest.approx(divergence / 4 / 2**0.5, rel=1e-6)
