"""``outrider inspect``: what is understood of a drafter, a model directory or a GGUF file, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.json_output import print_json_line
from outrider.errors import OutriderError
from outrider.models.inspection import Inspection, inspect_path

_MIB = 2**20


def inspect_command(
    path: Annotated[str, typer.Argument(help="Drafter or model directory, GGUF file, built-in name or hub id.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor used, not only the others.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Print what is understood of a checkpoint: its config in normal form and what becomes of every tensor.

    Ends with status 1 if it could not be loaded.
    """
    try:
        inspection = inspect_path(path)
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        if json:
            print_json_line({"path": path, "loadable": False, "error": str(error)})
        raise typer.Exit(1) from error
    render(inspection, Console(), list_used=tensors)
    if json:
        print_json_line(inspection.to_json())
    if not inspection.loadable:
        raise typer.Exit(1)


def render(inspection: Inspection, console: Console, *, list_used: bool = False) -> None:
    """The report for people."""
    console.print(_summary(inspection))
    console.print(_config(inspection))
    rows: list[tuple[str, str, str]] = []
    if list_used:
        for name, tensor in inspection.used.items():
            stored_as = "" if tensor.name == name else f", stored as {tensor.name}"
            rows.append(("used", name, f"{tensor.shape} {tensor.dtype}{stored_as}"))
    for fate, entries in (
        ("derived", inspection.derived),
        ("dropped", inspection.dropped),
        ("missing", inspection.missing),
        ("unexpected", inspection.unexpected),
        ("mismatched", inspection.mismatched),
    ):
        rows.extend((fate, name, str(detail)) for name, detail in entries.items())
    if rows:
        table = Table("fate", "tensor", "detail", title="tensors", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if not inspection.loadable:
        count = len(inspection.missing) + len(inspection.unexpected) + len(inspection.mismatched)
        console.print(f"[bold]cannot be loaded:[/bold] {count} tensors do not fit the config")


def _summary(inspection: Inspection) -> Table:
    table = Table(show_header=False, title=str(inspection.path), title_justify="left")
    bytes_per_token = ", ".join(f"{count} in {dtype}" for dtype, count in inspection.kv_bytes_per_token.items())
    dtypes = sorted({tensor.dtype for tensor in inspection.used.values()})
    for key, value in (
        ("kind", inspection.kind),
        ("format", inspection.source_format),
        ("loadable", "yes" if inspection.loadable else "no"),
        ("parameters", f"{inspection.parameters:,} in {len(inspection.used)} tensors ({', '.join(dtypes)})"),
        ("stored", f"{inspection.stored_bytes / _MIB:.1f} MiB"),
        ("KV bytes per token", bytes_per_token),
    ):
        table.add_row(key, value)
    selftest = inspection.card.get("selftest")
    if selftest:
        table.add_row("self-test", f"accepted length {selftest['accepted_length']}, floor {selftest['floor']}")
    return table


def _config(inspection: Inspection) -> Table:
    table = Table(show_header=False, title="config in normal form", title_justify="left")
    _add_fields(table, dataclasses.asdict(inspection.config), prefix="")
    return table


def _add_fields(table: Table, fields: Mapping[str, object], *, prefix: str) -> None:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _add_fields(table, value, prefix=f"{prefix}{name}.")
        else:
            table.add_row(f"{prefix}{name}", str(value))
