"""``outrider VERB``: finds the verb's module and runs it. A verb is imported only when it is used, so that ``--help``
answers at once. Errors a user can meet end in one line on stderr, with ``--json`` in a JSON line too, and status 1.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.json_output import print_json_line
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True)
class Verb:
    module: str
    attribute: str  # a command function, or a typer app with commands of its own
    help: str


VERBS: dict[str, Verb] = {
    "serve": Verb("outrider.cli.serve", "serve_command", "Serve a model over an OpenAI-compatible HTTP API."),
    "chat": Verb("outrider.cli.chat", "chat_command", "Talk to a model in the terminal."),
    "generate": Verb("outrider.cli.generate", "generate_command", "Complete prompts from the command line or a file."),
    "demo": Verb("outrider.cli.demo", "demo_command", "Stream one answer, then compare with drafting off."),
    "bench": Verb("outrider.cli.bench", "bench_app", "Measure latency, throughput or acceptance."),
    "train": Verb("outrider.cli.train", "train_command", "Train a DSpark drafter for a model."),
    "convert": Verb("outrider.cli.convert", "convert_app", "Rewrite a model as one of another kind."),
    "inspect": Verb("outrider.cli.inspect", "inspect_command", "Print what is understood of a checkpoint."),
    "explain": Verb("outrider.cli.explain", "explain_command", "Print what every rank runs in a step, and why."),
}


def build_app(verb: str) -> typer.Typer:
    """The command line with ``verb`` imported; of the others only what ``--help`` lists. "" imports none."""
    app = typer.Typer(
        help="An LLM inference engine whose decoding is DSpark speculative decoding, with exactly the target's output.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, entry in VERBS.items():
        if name != verb:
            app.command(name=name, help=entry.help)(_not_imported)
            continue
        with _collector_paused():
            target = getattr(importlib.import_module(entry.module), entry.attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=entry.help)
        else:
            app.command(name=name, help=target.__doc__)(target)
    return app


@contextmanager
def _collector_paused() -> Iterator[None]:
    """What modules make while they are imported stays: looking for garbage in it takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options ahead of the verb."""


def _not_imported() -> None:
    raise AssertionError("the verb on the command line is the one that is imported")


def main() -> None:
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    try:
        build_app(verb)(prog_name="outrider")
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        if "--json" in sys.argv:
            print_json_line({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
