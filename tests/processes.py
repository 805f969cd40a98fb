"""Processes that tests start, and theirs."""

from __future__ import annotations

from pathlib import Path


def children(process_id: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process_id}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found
