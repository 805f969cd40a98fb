"""``outrider bench peers``: other engines beside ours, on the same prompts in one run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import outrider
from outrider.bench.contenders import Contenders
from outrider.bench.figures import Spread
from outrider.bench.machine import cpu_name, physical_cores
from outrider.bench.peers.catalog import OURS, candidates, chosen, obstacle, versions
from outrider.bench.peers.gguf_formats import FORMATS
from outrider.bench.peers.measure import Cell, CellReport, PeersLoad, PeersReport, measure_peers
from outrider.bench.peers.protocol import Limits, PeerSpec
from outrider.bench.prompt_file import encode_prompt, read_prompts
from outrider.bench.workload import BUILT_IN_PROMPTS
from outrider.cli.bench_report import figures_json
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line
from outrider.config import EngineArgs
from outrider.errors import ConfigError
from outrider.models.source import resolve_model
from outrider.models.tokenizer import Tokenizer
from outrider.sampling_params import SamplingParams

Value = TypeVar("Value")


@with_engine_options
def peers_command(
    engine_args: EngineArgs,
    data: Annotated[list[Path] | None, typer.Option(help='JSON lines {"turns": [...]}; the first turn counts.')] = None,
    limit: Annotated[int | None, typer.Option(help="Use only so many lines of each file.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens of every request; end-of-text is ignored.")] = 128,
    temperatures: Annotated[str, typer.Option(help="As 0,0.8; 0 is greedy.")] = "0,0.8",
    streams: Annotated[str, typer.Option(help="Requests in flight, as 1,8,32.")] = "1,8,32",
    repeat: Annotated[int, typer.Option(help="Rounds; ratios are taken within each.")] = 3,
    peers: Annotated[str, typer.Option(help="Names to run, as outrider-*,llama.cpp-q4_0; * is all of them.")] = "*",
    formats: Annotated[str, typer.Option(help=f"GGUF formats: {', '.join(FORMATS)}.")] = "q4_0,q8_0",
    lookup_tokens: Annotated[str, typer.Option(help="Tokens that peers' prompt lookup proposes, as 3,10.")] = "3,10",
    threads: Annotated[int | None, typer.Option(help="Of every peer; by default one a physical core.")] = None,
    sampling_seed: Annotated[int, typer.Option(help="Request i has this seed plus i.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """llama.cpp, OpenVINO GenAI, transformers and this engine on the same prompts, round by round."""
    for name, value in (("max_tokens", max_tokens), ("repeat", repeat), ("threads", 1 if threads is None else threads)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if limit is not None and not data:
        raise ConfigError(f"limit={limit} is a number of lines of --data, and none is given")
    if engine_args.world_size > 1:
        raise ConfigError(f"bench peers compares engines of one rank; there are {engine_args.world_size}")
    counts = sorted(_list("streams", streams, int, lambda n: n >= 1, "whole numbers from 1"))
    if counts[-1] > engine_args.max_num_seqs:
        raise ConfigError(f"streams={streams!r} exceeds max_num_seqs={engine_args.max_num_seqs}")
    heats = _list("temperatures", temperatures, float, lambda t: 0 <= t < float("inf"), "finite numbers from 0")
    lookups = _list("lookup_tokens", lookup_tokens, int, lambda n: n >= 1, "whole numbers from 1")
    kinds = _list("formats", formats, str, lambda name: name in FORMATS, f"some of {', '.join(FORMATS)}")
    for heat in heats:
        SamplingParams(temperature=heat, max_tokens=max_tokens, seed=sampling_seed)
    texts = [text for path in data or () for text in read_prompts(path, limit)] or list(BUILT_IN_PROMPTS)

    contenders = Contenders.resolved(engine_args)
    prompts = [tuple(encode_prompt(contenders.tokenizer, text, raw=False)) for text in texts]
    limits = Limits(
        threads=threads or physical_cores(),
        max_streams=counts[-1],
        max_request_tokens=max(map(len, prompts)) + max_tokens,
    )
    model = resolve_model(contenders.config.model)
    wanted = chosen(
        candidates(contenders, model, limits, formats=kinds, lookup_tokens=lookups),
        _list("peers", peers, str, bool, "names with commas between them"),
    )
    obstacles = {each.name: reason for each in wanted if (reason := obstacle(each, model))}
    taking_part = [each for each in wanted if each.name not in obstacles]
    specs: dict[str, PeerSpec] = {each.name: each.make() for each in taking_part}
    load = PeersLoad(
        prompts=prompts,
        cells=[Cell(streams=count, temperature=heat) for count in counts for heat in heats],
        max_tokens=max_tokens,
        seed=sampling_seed,
        repeat=repeat,
    )
    ours = {each.name for each in taking_part if each.is_ours}
    with tqdm(total=len(specs) * len(load.cells) * repeat, desc="bench", unit="turn") as bar:
        report = measure_peers(
            specs, load, threads=limits.threads, is_ours=lambda name: name in ours, on_turn=bar.update
        )
    report = dataclasses.replace(report, skipped=obstacles | dict(report.skipped))
    settings: dict[str, object] = {
        "model": contenders.config.model,
        "quantization": contenders.config.quantization,
        "dtype": contenders.config.dtype,
        "cpu": cpu_name(),
        "threads": limits.threads,
        "python": sys.version.split()[0],
        "version": outrider.__version__,
        "versions": versions(taking_part),
        "num_prompts": len(prompts),
        "input_tokens": sum(map(len, prompts)),
        "max_tokens": max_tokens,
        "repeat": repeat,
        "sampling_seed": sampling_seed,
    }
    _print(Console(), report, contenders.tokenizer, settings)
    if json:
        print_json_line(_json(report, contenders.tokenizer, settings))


def _list(
    name: str, text: str, convert: Callable[[str], Value], allowed: Callable[[Value], bool], rule: str
) -> list[Value]:
    """Comma-separated values, each once, in the order given."""
    try:
        values = list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))
    except ValueError:
        values = []
    if not values or not all(map(allowed, values)):
        raise ConfigError(f"{name}={text!r} must be {rule}, with commas between them")
    return values


def _print(console: Console, report: PeersReport, tokenizer: Tokenizer, settings: dict[str, object]) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in settings.items()), highlight=False)
    for cell in report.cells:
        console.print(_table(cell))
        for name, reason in cell.skipped.items():
            console.print(f"{name}: skipped, {reason}", markup=False, highlight=False)
    for name, reason in report.skipped.items():
        console.print(f"{name}: skipped, {reason}", markup=False, highlight=False)
    for name, peer in report.cells[0].peers.items():
        text = tokenizer.decode(peer.first_answer, skip_special_tokens=True)
        console.print(f"{name} says {text[:60]!r}", markup=False, highlight=False)


def _table(report: CellReport) -> Table:
    cell = report.cell
    table = Table(title=f"{cell.streams} streams, temperature {cell.temperature:g}")
    table.add_column("peer", overflow="fold")  # names differ at their ends
    for column in ("output tokens/s", f"x {report.best_peer or 'best peer'}", "prompt tokens/s", "peak MiB"):
        table.add_column(column, justify="right")
    for name, peer in report.peers.items():
        prefill = peer.prefill_tokens_per_s
        table.add_row(
            name,
            _spread(peer.figures.output_tokens_per_s, "{:.1f}"),
            "-" if peer.over_best_peer is None else _spread(peer.over_best_peer.output_tokens_per_s, "{:.2f}"),
            "-" if prefill is None else f"{prefill:.0f}",
            f"{peer.peak_rss_bytes / 2**20:.0f}",
            style="bold" if name.startswith(OURS) else None,
        )
    return table


def _spread(spread: Spread, form: str) -> str:
    return f"{form.format(spread.median)} ({form.format(spread.min)} to {form.format(spread.max)})"


def _json(report: PeersReport, tokenizer: Tokenizer, settings: dict[str, object]) -> dict[str, object]:
    cells: list[dict[str, object]] = []
    for each in report.cells:
        peers = {}
        for name, peer in each.peers.items():
            peers[name] = dataclasses.asdict(peer) | {
                "figures": figures_json(peer.figures),
                "first_answer": tokenizer.decode(peer.first_answer, skip_special_tokens=True),
            }
        cells.append(
            dataclasses.asdict(each.cell)
            | {"best_peer": each.best_peer or None, "peers": peers, "skipped": dict(each.skipped)}
        )
    return {
        "benchmark": "peers",
        "cells": cells,
        "load_s": dict(report.load_s),
        "skipped": dict(report.skipped),
        "settings": settings,
    }
