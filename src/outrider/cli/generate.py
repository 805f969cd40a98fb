"""``outrider generate``: prompts in, completions out, with drafting counters and timings."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.machine import peak_rss_bytes
from outrider.bench.prompt_file import encode_prompt, read_prompts
from outrider.cli import PROCESS_START
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line, spec_json
from outrider.config import EngineArgs
from outrider.engine.engine import Engine
from outrider.engine.launch import make_engine
from outrider.errors import ConfigError, InvalidRequestError
from outrider.outputs import CompletionOutput, RequestOutput
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
    if limit and prompt_file is None:
        raise ConfigError(f"limit={limit} is a number of lines of --prompt-file, and none is given")
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
    with closing(make_engine(engine_args)) as engine:
        startup_s = time.perf_counter() - PROCESS_START
        began = time.perf_counter()
        outputs = run_prompts(engine, texts, params, raw=raw, stream=not json and len(texts) == 1 and n == 1)
        elapsed_s = time.perf_counter() - began
    if json:
        print_json_line(report(texts, outputs, startup_s=startup_s, elapsed_s=elapsed_s))
    elif len(texts) > 1 or n > 1:
        for text, output in zip(texts, outputs, strict=True):
            print(f">>> {text}")
            for completion in output.outputs:
                print(completion.text, end="\n\n")
    failed = [output for output in outputs if any(c.error is not None for c in output.outputs)]
    for output in failed:
        reason = next(c.error for c in output.outputs if c.error is not None)
        typer.echo(f"error: prompt {int(output.request_id) + 1}: {reason}", err=True)
    if failed:
        raise typer.Exit(1)


def run_prompts(
    engine: Engine, texts: Sequence[str], params: SamplingParams, *, raw: bool, stream: bool
) -> list[RequestOutput]:
    """All prompts through the step loop, in their order; ``stream`` prints the text of a single one as it comes.

    A prompt that is refused, for its length say, ends with an error of its own; the others go on.
    """
    pending = list(enumerate(texts))[::-1]
    finished: dict[str, RequestOutput] = {}
    shown = 0
    while len(finished) < len(texts):
        room = engine.config.max_num_waiting - params.n
        while pending and (engine.stats().num_waiting <= room or not engine.has_unfinished):
            index, text = pending.pop()
            try:
                token_ids = encode_prompt(engine.tokenizer, text, raw=raw)
                engine.add_request(request_id=str(index), prompt=text, prompt_token_ids=token_ids, params=params)
            except InvalidRequestError as error:
                finished[str(index)] = _refused(str(index), text, params, reason=str(error))
        for output in engine.step():
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


def _refused(request_id: str, text: str, params: SamplingParams, *, reason: str) -> RequestOutput:
    completions = (
        CompletionOutput(
            index=index, text="", token_ids=(), logprobs=None, finish_reason="error", stop_reason=None, error=reason
        )
        for index in range(params.n)
    )
    return RequestOutput(
        request_id=request_id, prompt=text, prompt_token_ids=(), outputs=tuple(completions), finished=True
    )


def report(
    texts: Sequence[str], outputs: Sequence[RequestOutput], *, startup_s: float, elapsed_s: float
) -> dict[str, object]:
    """The command's JSON. A result is one completion of one prompt, with an ``error`` where that failed.

    tpot_s and ttft_s are means over the requests that got so far.
    """
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
                    **({} if completion.error is None else {"error": completion.error}),
                }
            )
    new_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    ttfts = [output.timing.ttft_s for output in outputs if output.timing.ttft_s]
    tpots = [
        (output.timing.e2e_s - output.timing.ttft_s) / (longest - 1)
        for output in outputs
        if (longest := max(len(c.token_ids) for c in output.outputs)) > 1
    ]
    return {
        "results": results,
        "spec": spec_json(merge_counters(output.spec for output in outputs)),
        "timing": {
            "ttft_s": sum(ttfts) / len(ttfts) if ttfts else 0.0,
            "tpot_s": sum(tpots) / len(tpots) if tpots else 0.0,
            "output_tokens_per_s": new_tokens / elapsed_s,
            "startup_s": startup_s,
        },
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _show_progress(done: int, total: int) -> None:
    if total > 1 and sys.stderr.isatty():
        print(f"\r{done}/{total} prompts", end="\n" if done == total else "", file=sys.stderr, flush=True)
