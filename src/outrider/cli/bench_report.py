"""What ``outrider bench`` prints: tables for people and the objects of its JSON lines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

import outrider
from outrider.bench.acceptance import Acceptance, AcceptanceReport
from outrider.bench.comparison import Comparison, ContenderFigures
from outrider.bench.contenders import Contenders
from outrider.bench.figures import Spread
from outrider.bench.machine import peak_rss_bytes
from outrider.bench.workload import BenchRequest, SamplingPlan
from outrider.cli.json_output import spec_json
from outrider.config import ProposerName
from outrider.outputs import SpecCounters

Json = dict[str, object]
NAMES: dict[ProposerName, str] = {"dspark": "DSpark", "lookup": "prompt lookup", "none": "drafting off"}


# ---- settings


def settings(
    contenders: Contenders, plan: SamplingPlan, requests: Sequence[BenchRequest], *, raw: bool
) -> dict[str, object]:
    """Everything a figure depends on, as it was resolved."""
    config = contenders.config
    return {
        "model": config.model,
        "dtype": config.dtype,
        "draft": contenders.args.draft,
        "proposer": config.proposer,
        "drafter_path": config.drafter_path or None,
        "num_speculative_tokens": config.num_speculative_tokens,
        "draft_confidence_threshold": config.draft_confidence_threshold,
        "speculative_disable_by_batch_size": config.speculative_disable_by_batch_size or None,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_block_size": config.kv_block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "device": config.device,
        "attention_backend": config.attention_backend,
        "quantization": config.quantization,
        "threads": torch.get_num_threads(),
        "torch_version": torch.__version__,
        "input_tokens": sum(len(request.token_ids) for request in requests),
        **workload_settings(plan, requests, raw=raw),
    }


def workload_settings(plan: SamplingPlan, requests: Sequence[BenchRequest], *, raw: bool) -> dict[str, object]:
    return {
        "version": outrider.__version__,
        "cpu_count": os.cpu_count(),
        "num_requests": len(requests),
        "raw": raw,
        **dataclasses.asdict(plan),
    }


# ---- acceptance


def acceptance_json(report: AcceptanceReport, *, settings: Mapping[str, object]) -> Json:
    return {
        "benchmark": "acceptance",
        **_acceptance(report.pooled.chosen),
        "lookup": _acceptance(report.pooled.lookup),
        "data": [
            {"data": name, **_acceptance(compared.chosen), "lookup": _acceptance(compared.lookup)}
            for name, compared in report.by_data.items()
        ],
        "peak_rss_bytes": peak_rss_bytes(),
        "settings": dict(settings),
    }


def acceptance_table(report: AcceptanceReport, *, proposer: ProposerName) -> Table:
    table = Table(title="acceptance (accepted length: tokens per round, the bonus token included)")
    table.add_column("data")
    table.add_column("drafting")
    for name in ("prompts", "rounds", "accepted length", "95 %", "per prompt", "rate", "acceptance per position"):
        table.add_column(name, justify="right")
    sets = list(report.by_data.items())
    for name, compared in sets if len(sets) == 1 else [*sets, ("all", report.pooled)]:
        rows = [(NAMES[proposer], compared.chosen)]
        if proposer != "lookup":
            rows.append((NAMES["lookup"], compared.lookup))
        for index, (label, figures) in enumerate(rows):
            table.add_row(
                os.path.basename(name) if index == 0 else "",
                label,
                str(figures.num_prompts),
                str(figures.spec.rounds),
                f"{figures.spec.accepted_length:.3f}",
                f"{figures.ci95[0]:.3f} to {figures.ci95[1]:.3f}",
                _spread(figures.per_prompt, "{:.2f}"),
                f"{figures.spec.acceptance_rate:.1%}",
                _per_position(figures.spec),
            )
    return table


def _acceptance(figures: Acceptance) -> Json:
    return {
        **_spec(figures.spec),
        "ci95": list(figures.ci95),
        "per_prompt": dataclasses.asdict(figures.per_prompt),
        "num_prompts": figures.num_prompts,
        "output_tokens": figures.num_tokens,
    }


# ---- latency and throughput


def comparison_json(benchmark: str, comparison: Comparison, *, settings: Mapping[str, object]) -> Json:
    equal = comparison.equal_output
    return {
        "benchmark": benchmark,
        "modes": {name: figures_json(figures) for name, figures in comparison.figures.items()},
        "ratios": {name: dataclasses.asdict(ratio) for name, ratio in comparison.ratios.items()},
        "equal_output": None if equal is None else {"compared": equal.compared, "equal": dict(equal.equal)},
        "peak_rss_bytes": peak_rss_bytes(),
        "settings": dict(settings),
    }


def server_json(figures: ContenderFigures, *, settings: Mapping[str, object]) -> Json:
    """Of a server elsewhere: nothing to compare it with, and its memory is not ours to see."""
    return {
        "benchmark": "throughput",
        "modes": {"server": figures_json(figures)},
        "ratios": {},
        "equal_output": None,
        "peak_rss_bytes": None,
        "settings": dict(settings),
    }


def print_comparison(console: Console, comparison: Comparison, *, title: str) -> None:
    table = _comparison_table(title)
    for contender, figures in comparison.figures.items():
        table.add_row(NAMES[contender], *_cells(figures))
    console.print(table)
    ratios = Table(title="ratios within a repetition: median (lowest to highest)")
    for column in ("", "output tokens/s", "tokens/s after the first"):
        ratios.add_column(column, justify="left" if not column else "right")
    for name, ratio in comparison.ratios.items():
        decode = ratio.decode_tokens_per_s
        ratios.add_row(
            name.replace("_over_", " / "),
            _spread(ratio.output_tokens_per_s, "{:.2f}x"),
            "-" if decode is None else _spread(decode, "{:.2f}x"),
        )
    console.print(ratios)
    if comparison.equal_output is not None:
        for proposer, count in comparison.equal_output.equal.items():
            console.print(
                f"{NAMES[proposer]}: {count} of {comparison.equal_output.compared} answers equal drafting off, "
                "token for token"
            )
    console.print(f"peak memory of this process, all engines included: {peak_rss_bytes() / 2**20:.0f} MiB")


def server_table(figures: ContenderFigures, *, title: str) -> Table:
    table = _comparison_table(title)
    table.add_row("server", *_cells(figures))
    return table


def _comparison_table(title: str) -> Table:
    table = Table(title=title)
    table.add_column("drafting")
    for column in ("requests/s", "output tokens/s", "first token p50/p99 ms", "per token p50/p99 ms", "accepted length",
                 "acceptance rate"):  # fmt: skip
        table.add_column(column, justify="right")
    return table


def _cells(figures: ContenderFigures) -> list[str]:
    tpot, spec = figures.tpot_s, figures.spec
    return [
        f"{figures.requests_per_s.median:.2f}",
        _spread(figures.output_tokens_per_s, "{:.1f}"),
        f"{figures.ttft_s.p50 * 1000:.0f} / {figures.ttft_s.p99 * 1000:.0f}",
        "-" if tpot is None else f"{tpot.p50 * 1000:.1f} / {tpot.p99 * 1000:.1f}",
        f"{spec.accepted_length:.2f}" if spec.rounds else "-",
        f"{spec.acceptance_rate:.1%}" if spec.offered else "-",
    ]


def figures_json(figures: ContenderFigures) -> Json:
    return {**dataclasses.asdict(figures), "spec": _spec(figures.spec), "accepted_length": figures.spec.accepted_length}


# ---- shared


def _spec(spec: SpecCounters) -> Json:
    return {**spec_json(spec), "acceptance_rate": spec.acceptance_rate}


def _spread(spread: Spread, form: str) -> str:
    return f"{form.format(spread.median)} ({form.format(spread.min)} to {form.format(spread.max)})"


def _per_position(spec: SpecCounters) -> str:
    return " ".join(f"{accepted / offered:.2f}" for offered, accepted in spec.per_position if offered) or "-"
