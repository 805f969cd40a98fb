"""``outrider chat``: an interactive terminal over the same engine as the server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer

from outrider.cli.chat_session import ChatSession
from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line, spec_json
from outrider.config import EngineArgs
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.launch import make_engine
from outrider.sampling_params import SamplingParams

PROMPT = ">>> "


@with_engine_options
def chat_command(
    engine_args: EngineArgs,
    system: Annotated[str, typer.Option(help="System text; see also /system.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one answer at most; by default to the end of the context.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total mass.")] = 1.0,
    sampling_seed: Annotated[
        int | None, typer.Option(help="Seed of every answer; by default each draws its own.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line of figures.")] = False,
) -> None:
    """Chat with a model in the terminal. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=sampling_seed)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and recall where the platform has it
    engine = AsyncEngine(make_engine(engine_args), model_name=engine_args.model)
    with asyncio.Runner() as runner:
        try:
            session = ChatSession(engine, params=params, system=system, write=_write)
            chat_loop(session, read_line=lambda: input(PROMPT), run=runner.run)
        finally:
            runner.run(engine.shutdown(0.0))
    if json:
        totals = session.totals
        print_json_line(
            {
                "turns": totals.turns,
                "usage": {"prompt_tokens": totals.prompt_tokens, "completion_tokens": totals.completion_tokens},
                "spec": spec_json(totals.spec),
                "timing": {"ttft_s": totals.last_ttft_s, "output_tokens_per_s": totals.tokens_per_s},
            }
        )


def chat_loop(
    session: ChatSession, *, read_line: Callable[[], str], run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """Turn after turn until /exit, end of input or the end of the engine.

    ``run`` carries an answer out and, like ``asyncio.Runner.run``, turns an interrupt into its cancellation followed
    by KeyboardInterrupt.
    """
    while session.alive:
        try:
            line = read_line().strip()
        except EOFError:
            session.write("\n")
            return
        except KeyboardInterrupt:
            session.write("\n[/exit or Ctrl-D leaves]\n")
            continue
        if line.startswith("/"):
            if not session.command(line):
                return
        elif line:
            with contextlib.suppress(KeyboardInterrupt):
                run(session.answer(line))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
