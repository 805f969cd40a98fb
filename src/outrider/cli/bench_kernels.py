"""``outrider bench kernels``: milliseconds of a target's pass by rows, beside the machine's limits."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from outrider.bench.kernels import KernelFigures, measure_kernels
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line
from outrider.config import EngineArgs, EngineConfig
from outrider.engine.quantization import quantised_target, required_kernels
from outrider.engine.setup import resolve
from outrider.errors import ConfigError
from outrider.models.source import load_model
from outrider.ops.native_kernels import STAGES

_MOST_ROWS = 4096


@with_engine_options
def kernels_command(
    engine_args: EngineArgs,
    rows: Annotated[str, typer.Option(help="Rows of the passes to time, as 1,8,32.")] = "1,2,4,8,16,32,64,128,256",
    context: Annotated[int, typer.Option(help="Positions every request attends to.")] = 256,
    rows_per_request: Annotated[int, typer.Option(help="A pass of more rows is made of several requests.")] = 8,
    repeat: Annotated[int, typer.Option(help="Passes of each size; they take turns.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Time a pass of the target over 1 to 256 rows, its stages, and what the machine would allow."""
    sizes = _sizes(rows)
    for name, value, least in (
        ("context", context, 0),
        ("rows_per_request", rows_per_request, 1),
        ("repeat", repeat, 1),
    ):
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    resolved = resolve(engine_args)
    config = resolved.config
    if resolved.topology.world_size > 1:
        raise ConfigError(f"bench kernels times one rank; there are {resolved.topology.world_size}")
    if config.device != "cpu":
        raise ConfigError(f"bench kernels times passes on the CPU; device={config.device!r}")
    if context + rows_per_request > config.max_model_len:
        raise ConfigError(
            f"context={context} and rows_per_request={rows_per_request} exceed max_model_len={config.max_model_len}"
        )
    loaded = load_model(config.model, dtype=config.dtype, attention_backend=config.attention_backend)
    with tqdm(desc="bench", unit="pass") as bar:
        figures = measure_kernels(
            quantised_target(loaded.model, config.quantization),
            None if config.quantization == "none" else required_kernels(),
            kv_dtype=config.kv_dtype,
            rows=sizes,
            context=context,
            rows_per_request=rows_per_request,
            repeat=repeat,
            on_pass=bar.update,
        )
    native = config.quantization != "none"
    threads = required_kernels().threads if native else torch.get_num_threads()
    console = Console()
    console.print(_headline(figures, config, context=context, threads=threads))
    console.print(_table(figures, native=native))
    if native:
        console.print(_shares(figures))
    if json:
        settings = {"context": context, "rows_per_request": rows_per_request, "repeat": repeat}
        print_json_line(_json(figures, config, threads=threads) | {"settings": settings})


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"rows={text!r} must be numbers with commas between them") from None
    if not 1 <= sizes[0] <= sizes[-1] <= _MOST_ROWS:
        raise ConfigError(f"rows={text!r} must lie in 1..{_MOST_ROWS}")
    return sizes


def _limits(figures: KernelFigures, rows: int) -> tuple[float, float]:
    """Milliseconds of a pass whose only cost is reading the weights, or multiplying."""
    read_ms = figures.weight_bytes / figures.bandwidth_gb_s / 1e6
    return read_ms, rows * 2 * figures.multiplications / figures.giga_operations / 1e6


def _headline(figures: KernelFigures, config: EngineConfig, *, context: int, threads: int) -> str:
    text = f"{config.model}, quantization {config.quantization}, {config.kv_dtype} KV, context {context}"
    text += f", {threads} threads; {figures.weight_bytes / 1e6:.0f} MB of weights"
    if config.quantization != "none":
        text += f"; {figures.bandwidth_gb_s:.1f} GB/s, {figures.giga_operations:.0f} int8 GOP/s"
    return text


def _table(figures: KernelFigures, *, native: bool) -> Table:
    table = Table()
    for name in ("rows", "ms", "fastest", "rows/s", *(("x limit",) if native else ())):
        table.add_column(name, justify="right")
    for rows, ms in figures.milliseconds.items():
        cells = [str(rows), f"{ms:.2f}", f"{figures.fastest[rows]:.2f}", f"{1e3 * rows / ms:.0f}"]
        table.add_row(*cells, *((f"{ms / max(_limits(figures, rows)):.2f}",) if native else ()))
    return table


def _shares(figures: KernelFigures) -> Table:
    table = Table()
    for name in ("rows", *STAGES):
        table.add_column(name, justify="right")
    for rows, shares in figures.shares.items():
        table.add_row(str(rows), *(f"{100 * shares[stage]:.0f}%" for stage in STAGES))
    return table


def _json(figures: KernelFigures, config: EngineConfig, *, threads: int) -> dict[str, object]:
    def by_rows(values: dict[int, float]) -> dict[str, float]:
        return {str(rows): round(value, 4) for rows, value in values.items()}

    shares = {str(rows): {stage: round(x, 4) for stage, x in each.items()} for rows, each in figures.shares.items()}
    return {
        "benchmark": "kernels",
        "model": config.model,
        "quantization": config.quantization,
        "dtype": config.dtype,
        "threads": threads,
        "rows": by_rows(figures.milliseconds),
        "fastest": by_rows(figures.fastest),
        "shares": shares,
        "bandwidth_gb_s": round(figures.bandwidth_gb_s, 2),
        "giga_operations": round(figures.giga_operations, 1),
        "weight_bytes": figures.weight_bytes,
    }
