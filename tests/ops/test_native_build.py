"""Builds are kept by what shaped them, and used without a compiler; where there is neither, one line says so."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from outrider.ops.native_build import build_library

SOURCES = {"answer.cpp": 'extern "C" int answer() { return 42; }\n'}
has_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def build(sources: dict[str, str] = SOURCES) -> ctypes.CDLL | None:
    return build_library("answer", sources, main="answer.cpp", flags=("-O1",))


@has_compiler
def test_a_build_is_used_again_and_without_a_compiler(
    cache: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        library = build()
        assert library is not None
        assert library.answer() == 42
    assert len(list(cache.iterdir())) == 1
    assert [record.getMessage() for record in log.records] == ["compiling answer for this processor, once"]
    monkeypatch.setattr("outrider.ops.native_build.shutil.which", lambda _: None)
    again = build()
    assert again is not None
    assert again.answer() == 42
    assert build({"answer.cpp": SOURCES["answer.cpp"].replace("42", "43")}) is None, "that is of other sources"


def test_without_a_compiler_and_a_build_one_line_says_so(
    cache: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.ops.native_build.shutil.which", lambda _: None)
    assert build() is None
    (line,) = [record.getMessage() for record in log.records]
    assert line.startswith("no C++ compiler (g++ or clang++): answer runs on torch")


@has_compiler
def test_a_build_that_fails_is_reported_and_keeps_nothing(cache: Path, log: pytest.LogCaptureFixture) -> None:
    assert build({"answer.cpp": "no C++"}) is None
    assert "compiling answer failed, torch is used" in log.text
    assert not cache.exists()
