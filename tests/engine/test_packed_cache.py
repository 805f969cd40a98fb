"""Packed weights in the cache: a start from them has the bits of one without, and what does not fit is made anew."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.zoo import Zoo, generate, greedy, random_prompt, tokens
from tests.kernels import needs_kernels

from outrider.config import QuantizationName
from outrider.engine import quantization
from outrider.models import packed_weights
from outrider.models.native_decoder import pack_decoder
from outrider.models.packed_weights import PackedWeights
from outrider.models.source import load_model
from outrider.ops.native_kernels import Kernels

pytestmark = needs_kernels


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "packed"
    monkeypatch.setattr(packed_weights, "packed_directory", lambda: path)
    return path


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("outrider")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def text(zoo: Zoo, mode: QuantizationName, **args: Any) -> tuple[list[int], int]:
    """Greedy tokens and rounds."""
    output = generate(zoo.llm("rand", "random", quantization=mode, **args), [random_prompt(9, seed=1)], greedy(30))[0]
    return tokens(output), output.spec.rounds


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_start_loads_no_checkpoint_and_gives_the_same(
    mode: QuantizationName, dtype: str, zoo: Zoo, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = text(zoo, mode, dtype=dtype)
    assert len(list(directory.iterdir())) == 2  # target and drafter, nothing half written

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint was loaded though its packed weights are kept")

    for name in ("load_model", "load_drafter", "pack_decoder", "pack_drafter"):
        monkeypatch.setattr(quantization, name, refuse)
    assert text(zoo, mode, dtype=dtype) == first


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_every_tensor_comes_back_bit_for_bit(
    mode: QuantizationName, kernels: Kernels, zoo: Zoo, tmp_path: Path
) -> None:
    packed = pack_decoder(kernels, load_model(str(zoo.path("rand"))).model, quantization=mode)
    packed.save(tmp_path / "w.safetensors", key="k")
    loaded = PackedWeights.load(tmp_path / "w.safetensors", key="k")
    assert loaded is not None
    assert loaded.tensors.keys() == packed.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in packed.tensors.items())
    assert loaded.matrices.keys() == packed.matrices.keys()
    for name, matrix in packed.matrices.items():
        other = loaded.matrices[name]
        assert torch.equal(other.data, matrix.data)
        assert other.data.data_ptr() % 64 == 0
        assert (other.bias is None) == (matrix.bias is None)
        assert other.bias is None or matrix.bias is None or torch.equal(other.bias, matrix.bias)
        for field in ("weight_format", "outputs", "inputs", "error"):
            assert getattr(other, field) == getattr(matrix, field), (name, field)


def test_a_changed_checkpoint_is_packed_anew(
    zoo: Zoo, directory: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    target = shutil.copytree(zoo.path("rand"), tmp_path / "target")

    def run() -> list[int]:
        llm = zoo.llm(str(target), quantization="int8")
        return tokens(generate(llm, [random_prompt(9)], greedy(20, ignore_eos=True))[0])

    before = run()
    shutil.copy(zoo.path("cycle") / "model.safetensors", target / "model.safetensors")
    assert run() != before
    assert "was made from other weights or by another version" in log.text
    assert len(list(directory.iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage"])
def test_a_damaged_file_is_reported_and_replaced(
    damage: str, zoo: Zoo, directory: Path, log: pytest.LogCaptureFixture
) -> None:
    first = text(zoo, "int8")
    for path in directory.iterdir():
        content = path.read_bytes()
        path.write_bytes({"cut": content[:-1], "empty": b"", "garbage": b"\xff" * 64 + content[64:]}[damage])
    assert text(zoo, "int8") == first
    assert log.text.count("is damaged") == 2
    log.clear()
    assert text(zoo, "int8") == first
    assert "is damaged" not in log.text


def test_a_cache_that_cannot_be_written(zoo: Zoo, directory: Path, log: pytest.LogCaptureFixture) -> None:
    directory.write_text("in the way")
    assert text(zoo, "int8")[0]
    assert log.text.count("cannot be kept") == 2
