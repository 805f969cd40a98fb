"""``outrider convert``: a model rewritten as a checkpoint of another kind, with the same function."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.json_output import print_json_line
from outrider.config import DTypeName
from outrider.errors import OutriderError
from outrider.models.source import DEFAULT_MODEL
from outrider.models.split_experts import split_experts

_MIB = 2**20

convert_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Rewrite a model as one of another kind, with the same function.",
)


class WeightType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_DTYPES: dict[WeightType, DTypeName | None] = {
    WeightType.AUTO: None,
    WeightType.FLOAT32: "float32",
    WeightType.BFLOAT16: "bfloat16",
}


@convert_app.callback()
def _commands() -> None:
    """Keeps the command's name on the command line, also while there is one only."""


@convert_app.command("split-experts")
def split_experts_command(
    num_experts: Annotated[int, typer.Option(help="Experts of each layer: a power of two that divides the MLP.")],
    output: Annotated[Path, typer.Option(help="Directory to write; it must not exist, or be empty.")],
    model: Annotated[
        str, typer.Argument(help="Dense Llama: embedded name, GGUF file, Hugging Face directory or hub id.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[WeightType, typer.Option(help="Type of the weights; auto is the checkpoint's own.")] = (
        WeightType.AUTO
    ),
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Rewrite a dense Llama as a Mixtral checkpoint whose experts are slices of its MLPs, all of them chosen.

    The result computes the same function through routers, experts and their transports.
    """
    try:
        result = split_experts(model, num_experts=num_experts, output=output, dtype=_DTYPES[dtype])
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        if json:
            print_json_line({"model": model, "output": str(output), "error": str(error)})
        raise typer.Exit(1) from error
    typer.echo(
        f"{result.path}: {num_experts} experts of {result.config.intermediate_size} columns in each of "
        f"{result.config.num_layers} layers, {result.num_tensors} tensors, {result.stored_bytes / _MIB:.1f} MiB in "
        f"{result.dtype}"
    )
    if json:
        print_json_line(
            {
                "model": model,
                "output": str(result.path),
                "num_experts": num_experts,
                "moe_intermediate_size": result.config.intermediate_size,
                "num_layers": result.config.num_layers,
                "dtype": result.dtype,
                "tensors": result.num_tensors,
                "stored_bytes": result.stored_bytes,
                "files": list(result.files),
            }
        )
