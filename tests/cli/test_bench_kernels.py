"""``outrider bench kernels`` on a tiny model: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import fixtures
from tests.kernels import needs_kernels
from typer.testing import CliRunner

from outrider.cli.main import build_app
from outrider.errors import ConfigError
from outrider.ops.native_kernels import STAGES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.make_rand_target(tmp_path_factory.mktemp("target"))


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(build_app("bench"), ["bench", "kernels", *arguments, "--repeat", "2", "--json"])
    if result.exception is not None:
        raise result.exception
    last: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return last


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_figures_of_compiled_passes(model: Path, quantization: str) -> None:
    report = run(str(model), "--draft", "none", "--quantization", quantization, "--rows", "1,9,20", "--context", "33")
    assert list(report["rows"]) == ["1", "9", "20"]
    for rows, milliseconds in report["rows"].items():
        assert 0.0 < report["fastest"][rows] <= milliseconds
        assert set(report["shares"][rows]) == set(STAGES)
        assert 0 < sum(report["shares"][rows].values()) < 1.2
    assert report["bandwidth_gb_s"] > 0.1
    assert report["giga_operations"] > 0.1
    bytes_per_weight = report["weight_bytes"] / fixtures_weights()
    assert bytes_per_weight == pytest.approx(0.75 if quantization == "int4" else 1.1, abs=0.15)


def fixtures_weights() -> int:
    heads = 2 * fixtures.HEADS + 2 * fixtures.KV_HEADS
    layer = fixtures.HIDDEN * (heads * fixtures.HEAD_DIM + 3 * fixtures.INTERMEDIATE)
    return fixtures.LAYERS * layer + fixtures.VOCAB * fixtures.HIDDEN


def test_torch_passes_have_no_stages(model: Path) -> None:
    report = run(str(model), "--draft", "none", "--quantization", "none", "--rows", "4", "--context", "0")
    assert report["quantization"] == "none"
    assert report["shares"] == {"4": {}}
    assert report["weight_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "1,x"), "rows='1,x'"),
        (("--rows", "0"), "rows='0' must lie in 1..4096"),
        (("--context", "-1"), "context=-1"),
        (("--context", "100000"), "exceed max_model_len"),
        (("--data-parallel-size", "2"), "times one rank; there are 2"),
    ],
)
def test_refusals(model: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(str(model), "--draft", "none", *arguments)
