"""Packed weights in the cache: a start from them has the bits of one without, and what does not fit is made anew.

Files that nobody will read again go, and the total is bounded; what is in use stays.
"""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.zoo import Zoo, generate, greedy, random_prompt, tokens
from tests.kernels import needs_kernels

from outrider.config import QuantizationName
from outrider.engine import quantization
from outrider.models import packed_cache
from outrider.models.native_decoder import pack_decoder
from outrider.models.packed_cache import prune
from outrider.models.packed_weights import Origin, PackedWeights
from outrider.models.source import load_model
from outrider.ops.native_kernels import Kernels

pytestmark = needs_kernels


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "packed"
    monkeypatch.setattr(packed_cache, "packed_directory", lambda: path)
    return path


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
    packed.save(tmp_path / "w.safetensors", origin=Origin(sources=(), variant="v", key="k"))
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
    for path in list(directory.iterdir()):
        content = path.read_bytes()
        path.write_bytes({"cut": content[:-1], "empty": b"", "garbage": b"\xff" * 64 + content[64:]}[damage])
        log.clear()
        assert text(zoo, "int8") == first
        assert log.text.count("is damaged") == 1
    log.clear()
    assert text(zoo, "int8") == first
    assert "is damaged" not in log.text


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def variant(zoo: Zoo, target: Path, mode: QuantizationName) -> None:
    """A start that leaves the packed weights of one variant."""
    zoo.llm(str(target), quantization=mode)
    gc.collect()


def test_what_nobody_will_read_again_goes_with_the_next_that_comes(
    zoo: Zoo, directory: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    gone = shutil.copytree(zoo.path("rand"), tmp_path / "gone")
    changed = shutil.copytree(zoo.path("rand"), tmp_path / "changed")
    same = shutil.copytree(zoo.path("rand"), tmp_path / "same")
    for target in (gone, changed, same):
        variant(zoo, target, "int8")
    assert len(names(directory)) == 3
    old = Origin(sources=(str(same),), variant="int8-float32", key="of other code")
    PackedWeights({}, {}).save(directory / "of another version.safetensors", origin=old)
    (directory / "of another layout.safetensors").write_bytes(b"\0" * 64)
    for name, age_s in (("a killed process's.1234", 7200), ("being written.1235", 10)):
        (directory / name).write_bytes(b"half")
        os.utime(directory / name, (0, (directory / name).stat().st_mtime - age_s))
    shutil.rmtree(gone)
    os.utime(changed / "config.json", (0, 0))
    variant(zoo, same, "int4")
    left = names(directory)
    assert {name.split("-")[0] for name in left} == {"same", "being written.1235"}
    assert len(left) == 3  # two variants of one checkpoint
    assert log.text.count("nothing will read it again") == 5
    variant(zoo, changed, "int8")
    assert left < names(directory)


def test_the_total_is_bounded_and_the_longest_unused_go_first(zoo: Zoo, directory: Path, tmp_path: Path) -> None:
    targets = [shutil.copytree(zoo.path("rand"), tmp_path / name) for name in ("a", "b", "c")]
    for target in targets:
        variant(zoo, target, "int8")
    paths = {path.name[0]: path for path in directory.iterdir()}
    size = paths["a"].stat().st_size
    for name, used_at in (("a", 2000), ("b", 1000), ("c", 3000)):
        os.utime(paths[name], (used_at, used_at))
    prune(directory, added=paths["c"], most_bytes=3 * size)
    assert names(directory) == {path.name for path in paths.values()}
    variant(zoo, targets[1], "int8")  # a start from it is a use
    prune(directory, added=paths["c"], most_bytes=2 * size)
    assert names(directory) == {paths["b"].name, paths["c"].name}
    prune(directory, added=paths["c"], most_bytes=1)
    assert names(directory) == {paths["c"].name}


def test_what_is_in_use_stays(zoo: Zoo, directory: Path, tmp_path: Path) -> None:
    target = shutil.copytree(zoo.path("rand"), tmp_path / "target")
    variant(zoo, target, "int8")
    (path,) = directory.iterdir()
    used = zoo.llm(str(target), quantization="int8")
    shutil.rmtree(target)
    other = directory / "other"
    prune(directory, added=other, most_bytes=0)
    assert names(directory) == {path.name}
    assert tokens(generate(used, [random_prompt(9)], greedy(5, ignore_eos=True))[0])
    del used
    gc.collect()
    prune(directory, added=other)
    assert names(directory) == set()


def test_a_cache_that_cannot_be_written(zoo: Zoo, directory: Path, log: pytest.LogCaptureFixture) -> None:
    directory.write_text("in the way")
    assert text(zoo, "int8")[0]
    assert log.text.count("cannot be kept") == 2
