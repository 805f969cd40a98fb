"""``outrider train``: a drafter for a target, from nothing but the target.

The target asks itself questions, answers them (and templated ones), and the drafter learns from what it was computing
while it did. Every option has a default that trains the bundled drafter's recipe; an interrupted run is continued with
``--resume`` and the same options.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.cli.json_output import print_json_line
from outrider.config import EngineArgs, QuantizationOption
from outrider.engine.quantization import resolve_quantization
from outrider.errors import ConfigError, OutriderError
from outrider.models.describe import describe_model
from outrider.models.source import DEFAULT_MODEL
from outrider.train.generate import GenerationSettings
from outrider.train.recipe import DrafterShape, Recipe, Run, evenly_spaced_layers
from outrider.train.trainer import TrainSettings


class Optimizer(StrEnum):
    ADAMW = "adamw"
    MUON = "muon"


class MarkovHead(StrEnum):
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class MatmulType(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def train_command(
    output: Annotated[Path, typer.Option(help="Run directory; the drafter ends up in its drafter/ folder.")],
    model: Annotated[
        str, typer.Argument(help="Target: embedded name, GGUF file, HF directory or hub id.")
    ] = DEFAULT_MODEL,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Tokens proposed per round.")] = 4,
    target_layer_ids: Annotated[
        str, typer.Option(help="Tapped target layers, comma-separated; by default three, evenly spaced.")
    ] = "",
    init_layer_ids: Annotated[
        str, typer.Option(help="Target layers the draft layers start from; by default the last two.")
    ] = "",
    markov_rank: Annotated[int, typer.Option(min=0, help="Rank of the Markov head; 0 for none.")] = 48,
    markov_head_type: Annotated[MarkovHead, typer.Option(help="Kind of Markov head.")] = MarkovHead.VANILLA,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Vocabulary entries that can be drafted.")] = 16384,
    generate_tokens: Annotated[int, typer.Option(min=1, help="Tokens of data at most, prompts included.")] = 1_400_000,
    generate_minutes: Annotated[float, typer.Option(min=0.0, help="Minutes of generation at most.")] = 20.0,
    quantization: Annotated[
        QuantizationOption,
        typer.Option(
            help="Weights the target answers with, whatever --dtype; auto: those it is served with, none: --dtype's."
        ),
    ] = "auto",
    lanes: Annotated[int, typer.Option(min=1, help="Sequences generated together.")] = 256,
    max_question_tokens: Annotated[int, typer.Option(min=1, help="Longer questions are dropped.")] = 100,
    max_answer_tokens: Annotated[int, typer.Option(min=2, help="Answers are cut at half of this to all of it.")] = 200,
    temperatures: Annotated[str, typer.Option(help="Temperatures of the answers, in turn.")] = "0,0.7,1",
    own_question_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of questions that the target asks itself.")
    ] = 0.5,
    questions: Annotated[
        list[Path] | None,
        typer.Option(help="File of questions to ask before templated ones, in random order; may be repeated."),
    ] = None,
    exclude_prompts: Annotated[
        list[Path] | None, typer.Option(help="File of questions that must not be trained on; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps; the schedule ends with them.")] = 3000,
    train_minutes: Annotated[
        float, typer.Option(min=0.0, help="End the schedule after these minutes if the steps take longer; 0: no limit.")
    ] = 0.0,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 12,
    anchors: Annotated[int, typer.Option(min=1, help="Anchors per sequence and step.")] = 48,
    optimizer: Annotated[Optimizer, typer.Option(help="Optimiser of the backbone's matrices.")] = Optimizer.ADAMW,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-3,
    slot_decay: Annotated[
        float, typer.Option(min=0.01, help="Slot k of a block weighs exp(-k / this) in the loss.")
    ] = 2.5,
    ce_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of the cross-entropy on the tokens of answers at temperature 0.")
    ] = 0.0,
    loss_columns: Annotated[
        int, typer.Option(min=0, help="Vocabulary entries a step's loss looks at, a quarter of them drawn; 0: all.")
    ] = 0,
    feature_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of the distance to the target's own hidden states.")
    ] = 0.0,
    held_out: Annotated[int, typer.Option(min=1, help="Sequences kept from training for evaluation.")] = 96,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: only at the end.")] = 250,
    evaluate_prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with turns: measure closed-loop acceptance on the first ones.")
    ] = None,
    evaluate_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt of that measurement.")] = 128,
    dtype: Annotated[
        MatmulType, typer.Option(help="Type of training's matmuls, and of an unquantised target's weights.")
    ] = MatmulType.BFLOAT16,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's own choice.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, anchors and order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Train a DSpark drafter for a model: generate data, train, measure, export."""
    try:
        if threads:
            torch.set_num_threads(threads)
        description = describe_model(model)
        layers = description.config.num_layers
        answers_in = resolve_quantization(EngineArgs(model=model, quantization=quantization), description, device="cpu")
        taps = _integers("target_layer_ids", target_layer_ids) or evenly_spaced_layers(layers, 3)
        starts = _integers("init_layer_ids", init_layer_ids) or (layers - 2, layers - 1)
        for name, ids in (("target_layer_ids", taps), ("init_layer_ids", starts)):
            if not all(0 <= i < layers for i in ids):
                raise ConfigError(f"{name}={list(ids)} must lie in 0..{layers - 1}, the target's layers")
        recipe = Recipe(
            model=model,
            output=output,
            shape=DrafterShape(
                num_speculative_tokens=num_speculative_tokens,
                target_layer_ids=taps,
                init_layer_ids=starts,
                markov_rank=markov_rank,
                markov_head_type=markov_head_type.value,
                draft_vocab_size=draft_vocab_size,
            ),
            generation=GenerationSettings(
                lanes=lanes,
                max_question_tokens=max_question_tokens,
                max_answer_tokens=max_answer_tokens,
                temperatures=_numbers("temperatures", temperatures),
                question_temperature=0.75,
                question_top_p=0.95,
                own_question_share=own_question_share,
                quantization=answers_in,
                seed=seed,
            ),
            generate_tokens=generate_tokens,
            generate_minutes=generate_minutes,
            training=TrainSettings(
                steps=steps,
                max_minutes=train_minutes,
                sequences=sequences,
                anchors=anchors,
                optimizer=optimizer.value,
                learning_rate=learning_rate,
                seed=seed,
                slot_decay=slot_decay,
                ce=ce_weight,
                loss_columns=loss_columns,
                feature=feature_weight,
            ),
            dtype=dtype.value,
            held_out=held_out,
            questions=tuple(questions or ()),
            exclude_prompts=tuple(exclude_prompts or ()),
            evaluate_prompts=evaluate_prompts,
            evaluate_tokens=evaluate_tokens,
            checkpoint_every=checkpoint_every,
        )
        summary = Run(recipe, resume=resume).execute()
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        if json:
            print_json_line({"model": model, "output": str(output), "error": str(error)})
        raise typer.Exit(1) from error
    for measurement in summary["measurements"]:
        typer.echo(
            f"{measurement['data']}, temperature {measurement['temperature']:g}: "
            f"accepted length {measurement['accepted_length']:.3f}"
        )
    typer.echo(f"drafter: {summary['drafter']}")
    if json:
        print_json_line(summary)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} must be numbers separated by commas") from error
    if not values or min(values) < 0:
        raise ConfigError(f"{name}={text!r} must hold at least one number, none negative")
    return values


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} must be layer ids separated by commas") from error
