"""Prompt files: what is read, and how a bad one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.prompt_file import read_prompts
from outrider.errors import ConfigError


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_first_turns_in_order_up_to_the_limit(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.jsonl", '{"turns": ["eins ü", "x"]}\n\n{"turns": ["two"], "id": 4}\r\n{"turns": ["3"]}')
    assert read_prompts(path) == ["eins ü", "two", "3"]
    assert read_prompts(path, 2) == ["eins ü", "two"]
    assert read_prompts(str(path), 9) == ["eins ü", "two", "3"]


def test_lines_behind_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    assert read_prompts(_write(tmp_path / "p.jsonl", '{"turns": ["one"]}\nnonsense'), 1) == ["one"]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", '{"turn": ["x"]}', '{"turns": "x"}', '{"turns": []}', '{"turns": [1]}', '{"turns": [" "]}'],
)
def test_a_bad_line_is_named_by_number(tmp_path: Path, line: str) -> None:
    path = _write(tmp_path / "p.jsonl", f'{{"turns": ["fine"]}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 3"):
        read_prompts(path)


def test_files_that_give_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.jsonl cannot be read"):
        read_prompts(tmp_path / "bytes.jsonl")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(_write(tmp_path / "empty.jsonl", "\n \n"))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match=f"limit={limit} must be at least 1"):
        read_prompts(tmp_path / "any.jsonl", limit)
