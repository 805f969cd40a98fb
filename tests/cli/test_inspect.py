"""``outrider inspect`` on drafters, models and files that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file
from tests import fixtures
from typer.testing import CliRunner

from outrider.cli.inspect import inspect_command
from outrider.models.drafter_card import DrafterCard, SelfTest, write_card


def _inspect(*arguments: str) -> tuple[int, str, dict[str, Any]]:
    app = typer.Typer()
    app.command()(inspect_command)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    last_line = result.stdout.strip().splitlines()[-1]
    return result.exit_code, result.output, json.loads(last_line)


def test_a_drafter_is_shown_in_normal_form(tmp_path: Path) -> None:
    path = fixtures.make_random_drafter(tmp_path)
    selftest = SelfTest(prompts=((1,),), max_tokens=8, accepted_length=3.5, floor=2.5)
    write_card(DrafterCard(target="rand", selftest=selftest), path)
    status, output, report = _inspect(str(path), "--tensors")
    assert status == 0
    assert (report["kind"], report["format"], report["loadable"]) == ("drafter", "deepspec", True)
    assert report["config"]["num_speculative_tokens"] == 7
    assert report["config"]["decoder"]["num_layers"] == 2
    stored = load_file(path / "model.safetensors")
    assert report["tensors"]["used"].keys() == stored.keys()
    assert report["tensors"]["derived"].keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert report["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert report["stored_bytes"] == 4 * report["parameters"]
    assert report["kv_bytes_per_token"] == {"float32": 2 * 2 * 2 * 16 * 4, "bfloat16": 2 * 2 * 2 * 16 * 2}
    for word in ("num_speculative_tokens", "markov_head.markov_w1.weight", "accepted length 3.5"):
        assert word in output


def test_a_drafter_that_does_not_fit_its_config_names_the_tensors(tmp_path: Path) -> None:
    path = fixtures.make_random_drafter(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["hidden_norm.weight"]
    tensors["extra"] = torch.zeros(3)
    tensors["norm.weight"] = torch.zeros(65)
    fixtures.write_checkpoint(path, fixtures.drafter_config(), tensors)
    status, output, report = _inspect(str(path))
    assert status == 1
    assert not report["loadable"]
    assert report["tensors"]["missing"] == {"hidden_norm.weight": [64]}
    assert report["tensors"]["unexpected"] == {"extra": [3]}
    assert "(65,)" in report["tensors"]["mismatched"]["norm.weight"]
    assert "cannot be loaded" in output


def test_a_model_directory(tmp_path: Path) -> None:
    path = fixtures.make_rand_target(tmp_path)
    status, _, report = _inspect(str(path))
    assert status == 0
    assert (report["kind"], report["format"], report["loadable"]) == ("model", "safetensors", True)
    assert report["config"]["num_layers"] == 4
    assert len(report["tensors"]["used"]) == len(load_file(path / "model.safetensors"))


def test_a_model_directory_with_a_tensor_too_many_and_one_too_few(tmp_path: Path) -> None:
    path = fixtures.make_rand_target(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors.pop("model.layers.3.mlp.up_proj.weight")
    fixtures.write_checkpoint(path, fixtures.target_config(), tensors)
    status, _, report = _inspect(str(path))
    assert status == 1
    assert report["tensors"]["missing"] == {"layers.3.mlp.up_proj.weight": [128, 64]}
    assert report["tensors"]["unexpected"] == {"model.layers.9.mlp.up_proj.weight": [128, 64]}


def test_errors_are_one_clear_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    status, output, report = _inspect(str(tmp_path))
    assert status == 1
    assert report["loadable"] is False
    assert "mamba" in report["error"]
    assert "Traceback" not in output
    (tmp_path / "config.json").write_text('{"architectures": 5}', encoding="utf-8")
    assert "architectures" in _inspect(str(tmp_path))[2]["error"]
    (tmp_path / "weights.gguf").write_bytes(b"not a gguf file")
    assert _inspect(str(tmp_path / "weights.gguf"))[0] == 1
