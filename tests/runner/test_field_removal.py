"""Leaving any one field out of a pass's builder fails, at construction and in the type checker.

The builder's own source is edited: one keyword of one constructor call is removed at a time. An edit that nobody
notices would be the fault that a half-filled draft batch once was.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runner.test_batch_builder import MAX_LEN, SIZE, decode_plan, draft_rows, find, prefill_plan, verify_rows

import outrider
from outrider.batch.attention_metadata import BlockMetadata, CausalMetadata
from outrider.batch.expert_metadata import ExpertMetadata
from outrider.batch.forward_batch import DraftBatch, PrefillBatch, VerifyBatch
from outrider.batch.step_plan import PassKind
from outrider.runner import batch_builder
from outrider.runner.batch_builder import PrefillRow

SOURCE = Path(batch_builder.__file__).read_text(encoding="utf-8")
CLASSES = (PrefillBatch, DraftBatch, VerifyBatch, ExpertMetadata, CausalMetadata, BlockMetadata)
REMOVALS = [(cls.__name__, field.name) for cls in CLASSES for field in dataclasses.fields(cls)]


def source_without(class_name: str, field: str) -> str:
    """The builder's source with one keyword of the one call of ``class_name`` removed."""
    tree = ast.parse(SOURCE)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == class_name
    ]
    assert len(calls) == 1, f"{class_name} is built in {len(calls)} places"
    kept = [keyword for keyword in calls[0].keywords if keyword.arg != field]
    assert len(kept) == len(calls[0].keywords) - 1, f"{class_name}.{field} is not filled by its builder"
    calls[0].keywords = kept
    return ast.unparse(tree)


def build_all_three(source: str) -> None:
    """Every method of the builder that ``source`` defines."""
    module: dict[str, Any] = {"__name__": batch_builder.__name__}  # dataclasses look their module up by it
    exec(compile(source, "batch_builder_variant", "exec"), module)
    builder = module["BatchBuilder"](rank=0, kv_block_size=SIZE, max_model_len=MAX_LEN, mask_padded_tokens=True)
    decode = decode_plan([1], tiers=(2,))
    builder.prefill(prefill_plan([2], 1), [PrefillRow(token_ids=[1, 2], start=0, block_ids=[0], samples=True)])
    builder.draft(find(decode, PassKind.DRAFT), draft_rows(1))
    builder.verify(find(decode, PassKind.VERIFY), verify_rows(1))


def test_the_builder_as_it_is_builds_all_three() -> None:
    build_all_three(ast.unparse(ast.parse(SOURCE)))


@pytest.mark.parametrize(("class_name", "field"), REMOVALS)
def test_a_builder_without_a_field_does_not_build(class_name: str, field: str) -> None:
    with pytest.raises(TypeError, match=f"{class_name}.*missing 1 required keyword-only argument: '{field}'"):
        build_all_three(source_without(class_name, field))


@pytest.mark.slow
def test_a_builder_without_a_field_does_not_type_check(tmp_path: Path) -> None:
    """One run of mypy over all variants, and one over the source itself, which has no error."""
    (tmp_path / "unchanged.py").write_text(ast.unparse(ast.parse(SOURCE)), encoding="utf-8")
    for class_name, field in REMOVALS:
        variant = tmp_path / f"without_{class_name}_{field}.py"
        variant.write_text(source_without(class_name, field), encoding="utf-8")
    root = Path(outrider.__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(tmp_path)]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    lines = [line for line in output.splitlines() if ": error:" in line]
    for class_name, field in REMOVALS:
        expected = f'Missing named argument "{field}" for "{class_name}"'
        found = [line for line in lines if f"without_{class_name}_{field}.py" in line]
        assert len(found) == 1, output
        assert expected in found[0]
    assert len(lines) == len(REMOVALS), output
