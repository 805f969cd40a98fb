"""``outrider generate``: prompts in, completions out, with drafting counters and timings."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.figures import peak_rss_bytes
from outrider.bench.prompt_file import encode_prompt, read_prompts
from outrider.cli import PROCESS_START
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line, spec_json
from outrider.config import EngineArgs
from outrider.engine.engine_core import EngineCore
from outrider.engine.setup import build_engine
from outrider.errors import InvalidRequestError
from outrider.outputs import RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.counters import merge_counters

PANEL = "Sampling"


@with_engine_options
def generate_command(
    engine_args: EngineArgs,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help='JSON lines {"turns": [...]}; the first turn is the prompt.')
    ] = None,
    limit: Annotated[int, typer.Option(help="Use only so many lines of the file; 0 means all.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.", rich_help_panel=PANEL)] = 128,
    min_tokens: Annotated[int, typer.Option(help="No stop before so many.", rich_help_panel=PANEL)] = 0,
    n: Annotated[int, typer.Option(help="Completions per prompt.", rich_help_panel=PANEL)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=PANEL)] = 0.0,
    top_p: Annotated[float, typer.Option(rich_help_panel=PANEL)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 or -1: all tokens.", rich_help_panel=PANEL)] = 0,
    min_p: Annotated[float, typer.Option(rich_help_panel=PANEL)] = 0.0,
    presence_penalty: Annotated[float, typer.Option(rich_help_panel=PANEL)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(rich_help_panel=PANEL)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(rich_help_panel=PANEL)] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.", rich_help_panel=PANEL)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=PANEL)] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Complete prompts. ``--seed`` is every request's seed, so that a prompt's result does not depend on the others."""
    texts = list(prompt or [])
    if prompt_file is not None:
        texts += read_prompts(prompt_file, limit or None)
    if not texts:
        raise InvalidRequestError("give --prompt or --prompt-file: there is nothing to complete", param="prompt")
    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=engine_args.seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
    )
    core = build_engine(engine_args)
    startup_s = time.perf_counter() - PROCESS_START
    began = time.perf_counter()
    outputs = run_prompts(core, texts, params, raw=raw, stream=not json and len(texts) == 1 and n == 1)
    elapsed_s = time.perf_counter() - began
    if json:
        print_json_line(report(texts, outputs, startup_s=startup_s, elapsed_s=elapsed_s))
    elif len(texts) > 1 or n > 1:
        for text, output in zip(texts, outputs, strict=True):
            print(f">>> {text}")
            for completion in output.outputs:
                print(completion.text, end="\n\n")


def run_prompts(
    core: EngineCore, texts: Sequence[str], params: SamplingParams, *, raw: bool, stream: bool
) -> list[RequestOutput]:
    """All prompts through the step loop, in their order; ``stream`` prints the text of a single one as it comes."""
    pending = [(str(i), text, encode_prompt(core.tokenizer, text, raw=raw)) for i, text in enumerate(texts)]
    pending.reverse()
    finished: dict[str, RequestOutput] = {}
    shown = 0
    while len(finished) < len(texts):
        while pending and core.stats().num_waiting < core.config.max_num_waiting // max(params.n, 1):
            request_id, text, token_ids = pending.pop()
            core.add_request(request_id=request_id, prompt=text, prompt_token_ids=token_ids, params=params)
        for output in core.step():
            if stream:
                text = output.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
            if output.finished:
                finished[output.request_id] = output
                _show_progress(len(finished), len(texts))
    if stream:
        print()
    return [finished[str(i)] for i in range(len(texts))]


def report(
    texts: Sequence[str], outputs: Sequence[RequestOutput], *, startup_s: float, elapsed_s: float
) -> dict[str, object]:
    """The command's JSON. tpot_s and ttft_s are means over requests; a result is one completion of one prompt."""
    results = []
    for text, output in zip(texts, outputs, strict=True):
        for completion in output.outputs:
            prompt_tokens, new_tokens = len(output.prompt_token_ids), len(completion.token_ids)
            results.append(
                {
                    "prompt": text,
                    "token_ids": list(completion.token_ids),
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "usage": {
                        "prompt_tokens": prompt_tokens,
                        "completion_tokens": new_tokens,
                        "total_tokens": prompt_tokens + new_tokens,
                    },
                }
            )
    new_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    tpots = [
        (output.timing.e2e_s - output.timing.ttft_s) / (longest - 1)
        for output in outputs
        if (longest := max(len(c.token_ids) for c in output.outputs)) > 1
    ]
    return {
        "results": results,
        "spec": spec_json(merge_counters(output.spec for output in outputs)),
        "timing": {
            "ttft_s": sum(output.timing.ttft_s for output in outputs) / len(outputs),
            "tpot_s": sum(tpots) / len(tpots) if tpots else 0.0,
            "output_tokens_per_s": new_tokens / elapsed_s,
            "startup_s": startup_s,
        },
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _show_progress(done: int, total: int) -> None:
    if total > 1 and sys.stderr.isatty():
        print(f"\r{done}/{total} prompts", end="\n" if done == total else "", file=sys.stderr, flush=True)
