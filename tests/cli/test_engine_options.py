"""The flags follow EngineArgs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.engine_options import HELP, with_engine_options
from outrider.config import EngineArgs
from outrider.errors import ConfigError


def run(*arguments: str) -> tuple[EngineArgs, int]:
    seen: list[tuple[EngineArgs, int]] = []

    @with_engine_options
    def command(engine_args: EngineArgs, own: Annotated[int, typer.Option(help="Its own.")] = 5) -> None:
        """What it does."""
        seen.append((engine_args, own))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


def test_every_field_has_a_help_text_and_no_other_has() -> None:
    assert set(HELP) == {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}


def test_defaults_are_those_of_engine_args() -> None:
    assert run() == (EngineArgs(), 5)


def test_flags_are_spelled_as_the_fields() -> None:
    args, own = run(
        "some/model", "--dtype", "bfloat16", "--max-model-len", "128", "--no-enable-prefix-caching", "--draft", "none",
        "--draft-confidence-threshold", "0.5", "--own", "6",
    )  # fmt: skip
    assert own == 6
    assert args == EngineArgs(
        model="some/model",
        dtype="bfloat16",
        max_model_len=128,
        enable_prefix_caching=False,
        draft="none",
        draft_confidence_threshold=0.5,
    )


def test_a_bad_value_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="kv_block_size=0"):
        run("--kv-block-size", "0")
