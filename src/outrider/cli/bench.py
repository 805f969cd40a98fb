"""``outrider bench``: flags in, a table and a JSON line out; the package ``bench`` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tqdm import tqdm

from outrider.bench.acceptance import measure_acceptance, require_drafts
from outrider.bench.contenders import Contenders
from outrider.bench.http_load import HttpTarget
from outrider.bench.latency import measure_latency
from outrider.bench.prompt_file import read_prompts
from outrider.bench.throughput import Load, measure_server, measure_throughput
from outrider.bench.workload import (
    BUILT_IN_PROMPTS,
    BenchRequest,
    SamplingPlan,
    poisson_arrivals,
    random_requests,
    requests_of_texts,
)
from outrider.cli import bench_report
from outrider.cli.bench_kernels import kernels_command
from outrider.cli.bench_peers import peers_command
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line
from outrider.config import EngineArgs
from outrider.engine.setup import resolve
from outrider.errors import ConfigError
from outrider.models.tokenizer import Tokenizer

WORKLOAD, SAMPLING = "Workload", "Sampling"
DATA_HELP = 'JSON lines {"turns": [...]}, the first turn is the prompt; may be given several times.'

Data = Annotated[list[Path] | None, typer.Option(help=DATA_HELP, rich_help_panel=WORKLOAD)]
Limit = Annotated[int | None, typer.Option(help="Use only so many lines of each file.", rich_help_panel=WORKLOAD)]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="A prompt; may be given several times.", rich_help_panel=WORKLOAD)
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.", rich_help_panel=WORKLOAD)
]
InputLen = Annotated[
    int | None,
    typer.Option(
        help="Random tokens of this number instead of text: for timing prefill, not for acceptance.",
        rich_help_panel=WORKLOAD,
    ),
]
OutputLen = Annotated[int, typer.Option(help="New tokens per request, at most.", rich_help_panel=WORKLOAD)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Sample from the likeliest tokens of this total mass.", rich_help_panel=SAMPLING)
]
SamplingSeed = Annotated[
    int, typer.Option(help="Request i has this seed plus i; arrivals are drawn from it too.", rich_help_panel=SAMPLING)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Always generate the full length.", rich_help_panel=SAMPLING)
]
Repeat = Annotated[int, typer.Option(help="Repetitions; ratios are taken within each.")]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON line.")]

bench_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure speed or acceptance, always against drafting off or prompt lookup in the same run. Prefix caching is "
    "off throughout, whatever its flag says: a repetition would find its own prompts in the cache.",
)

bench_app.command("kernels")(kernels_command)
bench_app.command("peers")(peers_command)


@bench_app.command("acceptance")
@with_engine_options
def acceptance_command(
    engine_args: EngineArgs,
    data: Data = None,
    limit: Limit = None,
    raw: Raw = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt, at most.", rich_help_panel=WORKLOAD)] = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    sampling_seed: SamplingSeed = 0,
    ignore_eos: IgnoreEos = False,
    json: Json = False,
) -> None:
    """How many tokens a round emits, per data set, beside prompt lookup of the same depth on the same prompts."""
    if not data:
        raise ConfigError("data is missing: give at least one --data FILE of prompts")
    if len(set(data)) < len(data):
        raise ConfigError(f"data={[str(path) for path in data]} names a file twice")
    texts = {str(path): read_prompts(path, limit) for path in data}
    plan = _plan(max_tokens, temperature, top_p, ignore_eos, sampling_seed)
    drafting = resolve(engine_args.drafting_with(engine_args.draft)).config
    require_drafts(drafting.proposer, draft=engine_args.draft, model=engine_args.model)
    contenders = Contenders.load(engine_args)
    requests = {
        name: requests_of_texts(each, plan, tokenizer=contenders.tokenizer, raw=raw) for name, each in texts.items()
    }
    proposers = 1 if contenders.config.proposer == "lookup" else 2
    with _bar(sum(len(each) for each in requests.values()) * proposers) as bar:
        report = measure_acceptance(contenders, requests, on_served=bar.update)
    Console().print(bench_report.acceptance_table(report, proposer=contenders.config.proposer))
    if json:
        settings = bench_report.settings(contenders, plan, [r for each in requests.values() for r in each], raw=raw)
        print_json_line(bench_report.acceptance_json(report, settings=settings))


@bench_app.command("latency")
@with_engine_options
def latency_command(
    engine_args: EngineArgs,
    prompt: Prompts = None,
    data: Data = None,
    limit: Limit = None,
    raw: Raw = False,
    input_len: InputLen = None,
    output_len: OutputLen = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    sampling_seed: SamplingSeed = 0,
    ignore_eos: IgnoreEos = False,
    repeat: Repeat = 3,
    json: Json = False,
) -> None:
    """One request at a time: with the drafter, with prompt lookup and without drafting, prompt by prompt in turn."""
    _require_at_least("repeat", repeat, 1)
    texts = _texts(prompt, data, limit, input_len)
    plan = _plan(output_len, temperature, top_p, ignore_eos, sampling_seed)
    contenders = Contenders.load(engine_args)
    requests = _requests(texts, plan, tokenizer=contenders.tokenizer, raw=raw, input_len=input_len)
    with _bar(len(requests) * repeat * len(contenders.names)) as bar:
        comparison = measure_latency(contenders, requests, repeat=repeat, on_served=bar.update)
    settings = bench_report.settings(contenders, plan, requests, raw=raw) | {"repeat": repeat}
    bench_report.print_comparison(Console(), comparison, title="one request at a time")
    if json:
        print_json_line(bench_report.comparison_json("latency", comparison, settings=settings))


@bench_app.command("throughput")
@with_engine_options
def throughput_command(
    engine_args: EngineArgs,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests; the prompts are taken in turn. By default one per prompt.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    prompt: Prompts = None,
    data: Data = None,
    limit: Limit = None,
    raw: Raw = False,
    input_len: InputLen = None,
    output_len: OutputLen = 128,
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="Requests in flight at most; by default all of them.", rich_help_panel=WORKLOAD),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests per second, arriving at random (Poisson); inf: a closed loop.", rich_help_panel=WORKLOAD
        ),
    ] = float("inf"),
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    sampling_seed: SamplingSeed = 0,
    ignore_eos: IgnoreEos = False,
    repeat: Repeat = 1,
    http: Annotated[bool, typer.Option("--http", help="Through a server in this process, on a free port.")] = False,
    base_url: Annotated[
        str, typer.Option(help="Through the server that runs there; no engine of one's own, so no ratios.")
    ] = "",
    api_key: Annotated[str, typer.Option(help="Key for --base-url.")] = "",
    json: Json = False,
) -> None:
    """Many requests together: with the drafter, with prompt lookup and without drafting, workload by workload."""
    _require_at_least("repeat", repeat, 1)
    for name, value in (("num_prompts", num_prompts), ("max_concurrency", max_concurrency)):
        if value is not None:
            _require_at_least(name, value, 1)
    if base_url:
        given = [f.name for f in dataclasses.fields(EngineArgs) if getattr(engine_args, f.name) != f.default]
        if given:
            raise ConfigError(f"base_url={base_url!r} runs no engine here, so {', '.join(given)} would have no effect")
    elif api_key:
        raise ConfigError("api_key is for base_url, and none is given")
    if base_url and input_len is not None:
        raise ConfigError(f"input_len={input_len} needs a vocabulary; base_url={base_url!r} does not tell its own")
    texts = _taken_in_turn(_texts(prompt, data, limit, input_len), num_prompts)
    plan = _plan(output_len, temperature, top_p, ignore_eos, sampling_seed)
    arrivals_s = None
    if request_rate != float("inf"):
        arrivals_s = poisson_arrivals(len(texts), request_rate=request_rate, seed=sampling_seed)

    load = Load(
        requests=(),
        max_concurrency=max_concurrency or len(texts),
        arrivals_s=arrivals_s,
        repeat=repeat,
    )
    arrival_settings: dict[str, object] = {
        "repeat": repeat,
        "max_concurrency": max_concurrency,
        "request_rate": None if arrivals_s is None else request_rate,
        "http": http or bool(base_url),
    }
    if base_url:
        target = HttpTarget(base_url=base_url.rstrip("/").removesuffix("/v1"), api_key=api_key, in_this_process=False)
        requests = requests_of_texts(texts, plan, tokenizer=None, raw=raw)
        with _bar(len(requests) * repeat) as bar:
            figures = measure_server(target, dataclasses.replace(load, requests=requests, on_served=bar.update))
        Console().print(bench_report.server_table(figures, title=base_url))
        settings = {"base_url": base_url} | bench_report.workload_settings(plan, requests, raw=raw) | arrival_settings
        report = bench_report.server_json(figures, settings=settings)
    else:
        contenders = Contenders.load(engine_args)
        requests = _requests(texts, plan, tokenizer=contenders.tokenizer, raw=raw, input_len=input_len)
        with _bar(len(requests) * repeat * len(contenders.names)) as bar:
            load = dataclasses.replace(load, requests=requests, on_served=bar.update)
            comparison = measure_throughput(contenders, load, http=http)
        title = f"{len(requests)} requests{' over HTTP' if http else ''}"
        bench_report.print_comparison(Console(), comparison, title=title)
        settings = bench_report.settings(contenders, plan, requests, raw=raw) | arrival_settings
        report = bench_report.comparison_json("throughput", comparison, settings=settings)
    if json:
        print_json_line(report)


def _texts(
    prompts: Sequence[str] | None, data: Sequence[Path] | None, limit: int | None, input_len: int | None
) -> list[str]:
    """What was asked for, or the built-in prompts; with random tokens they only say how many requests there are."""
    if limit is not None and not data:
        raise ConfigError(f"limit={limit} is a number of lines of --data, and none is given")
    texts = list(prompts or ()) + [text for path in data or () for text in read_prompts(path, limit)]
    if input_len is not None and texts:
        raise ConfigError(f"input_len={input_len} makes prompts of random tokens; give it without --prompt and --data")
    if "" in texts:
        raise ConfigError("prompt='' is empty")
    return texts or list(BUILT_IN_PROMPTS)


def _requests(
    texts: Sequence[str], plan: SamplingPlan, *, tokenizer: Tokenizer, raw: bool, input_len: int | None
) -> tuple[BenchRequest, ...]:
    if input_len is not None:
        return random_requests(len(texts), plan, input_len=input_len, tokenizer=tokenizer)
    return requests_of_texts(texts, plan, tokenizer=tokenizer, raw=raw)


def _taken_in_turn(texts: Sequence[str], num_prompts: int | None) -> list[str]:
    return [texts[i % len(texts)] for i in range(num_prompts or len(texts))]


def _plan(max_tokens: int, temperature: float, top_p: float, ignore_eos: bool, sampling_seed: int) -> SamplingPlan:
    plan = SamplingPlan(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        ignore_eos=ignore_eos,
        sampling_seed=sampling_seed,
    )
    plan.params(0)  # refuses wrong values before a model is loaded
    return plan


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} must be at least {least}")


def _bar(total: int) -> tqdm[None]:
    return tqdm(total=total, desc="bench", unit="req")
