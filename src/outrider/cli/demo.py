"""``outrider demo``: one streamed answer with drafting, the same without and with prompt lookup, and one table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.bench.machine import peak_rss_bytes
from outrider.bench.prompt_file import encode_prompt
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line, spec_json
from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.engine.launch import refuse_timeout
from outrider.engine.quantization import load_shared_target
from outrider.engine.setup import build_engine, resolve
from outrider.errors import ConfigError
from outrider.outputs import RequestOutput, SpecCounters
from outrider.runner.kv_memory import KVLayout
from outrider.sampling_params import SamplingParams

DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue, and why sunsets are red."
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One mode's answer. ``tokens_per_s`` counts decoding only, prefill apart."""

    draft: str
    output: RequestOutput

    @property
    def tokens_per_s(self) -> float:
        decode_s = self.output.timing.e2e_s - self.output.timing.ttft_s
        return (len(self.output.outputs[0].token_ids) - 1) / decode_s if decode_s > 0 else 0.0


@with_engine_options
def demo_command(
    engine_args: EngineArgs,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = DEFAULT_PROMPT,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Stream an answer with the drafter, then run the same without drafting and with prompt lookup, and compare."""
    console = Console()
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=engine_args.seed)
    refuse_timeout(engine_args)
    resolved = resolve(engine_args.drafting_with(engine_args.draft))
    if resolved.topology.world_size > 1:
        raise ConfigError(
            f"data_parallel_size={engine_args.data_parallel_size} and tensor_parallel_size="
            f"{engine_args.tensor_parallel_size}: the demo compares engines of one rank; see bench for more"
        )
    target = load_shared_target(resolved.config)
    runs = []
    for draft in dict.fromkeys((engine_args.draft, "none", "lookup")):
        first = draft == engine_args.draft
        args = engine_args.drafting_with(draft)
        args = dataclasses.replace(args, kv_cache_memory_bytes=_small_kv(engine_args, resolved.layout))
        core = build_engine(args, target=target)
        if first:
            console.print(f"[bold]{prompt}[/bold]")
        else:
            console.print(f"[dim]the same with drafting {draft} ...[/dim]")
        runs.append(Run(draft=draft, output=_answer(core, prompt, params, stream=first)))
    console.print(_table(runs))
    same = runs[0].output.outputs[0].token_ids == runs[1].output.outputs[0].token_ids
    if params.is_greedy:
        parted = "different: a near-tie fell the other way in low precision; --dtype float32 compares exactly"
        console.print(f"Tokens with and without drafting: {'identical' if same else parted}.")
    if json:
        print_json_line(_report(runs, identical=same))


def _small_kv(engine_args: EngineArgs, layout: KVLayout) -> int:
    """One request needs little; the page-by-page default would be touched for nothing."""
    if engine_args.kv_cache_memory_bytes is not None:
        return engine_args.kv_cache_memory_bytes
    blocks = -(-(engine_args.max_model_len or 0) // layout.kv_block_size)
    return max(256 * 2**20, blocks * layout.kv_block_size * layout.bytes_per_token)


def _answer(core: EngineCore, prompt: str, params: SamplingParams, *, stream: bool) -> RequestOutput:
    """The answer, after a short warm-up on another prompt."""
    warm_up = dataclasses.replace(params, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    core.add_request(
        request_id="warm-up",
        prompt=None,
        prompt_token_ids=encode_prompt(core.tokenizer, "Hello", raw=False),
        params=warm_up,
    )
    while core.has_unfinished:
        core.step()
    core.add_request(
        request_id="demo",
        prompt=prompt,
        prompt_token_ids=encode_prompt(core.tokenizer, prompt, raw=False),
        params=params,
    )
    shown, latest = 0, None
    while core.has_unfinished:
        for latest in core.step():
            text = latest.outputs[0].text
            if stream:
                print(text[shown:], end="", flush=True)
                shown = len(text)
    if stream:
        print("\n")
    assert latest is not None
    return latest


def _table(runs: list[Run]) -> Table:
    table = Table(title="one stream, same prompt, same process")
    table.add_column("drafting")
    for run in runs:
        table.add_column({"none": "off", "lookup": "prompt lookup"}.get(run.draft, "DSpark"), justify="right")
    plain = next(run for run in runs if run.draft == "none").tokens_per_s
    specs = [run.output.spec for run in runs]
    table.add_row("tokens/s", *(f"{run.tokens_per_s:.1f}" for run in runs))
    table.add_row("ratio to off", *(f"{run.tokens_per_s / plain:.2f}x" if plain else "-" for run in runs))
    table.add_row("rounds", *(str(spec.rounds) for spec in specs))
    table.add_row("accepted length", *(f"{spec.accepted_length:.2f}" for spec in specs))
    table.add_row("acceptance per position", *(_per_position(spec) for spec in specs))
    table.add_row("time to first token", *(f"{run.output.timing.ttft_s * 1000:.0f} ms" for run in runs))
    return table


def _per_position(spec: SpecCounters) -> str:
    return " ".join(f"{accepted / offered:.2f}" for offered, accepted in spec.per_position if offered) or "-"


def _report(runs: list[Run], *, identical: bool) -> dict[str, object]:
    return {
        "runs": [
            {
                "draft": run.draft,
                "output_tokens_per_s": run.tokens_per_s,
                "ttft_s": run.output.timing.ttft_s,
                "tokens": len(run.output.outputs[0].token_ids),
                "spec": spec_json(run.output.spec),
            }
            for run in runs
        ],
        "text": runs[0].output.outputs[0].text,
        "identical": identical,
        "peak_rss_bytes": peak_rss_bytes(),
    }
