"""The engine's flags: one per field of ``EngineArgs``, the same for every command that runs an engine.

A command takes ``engine_args: EngineArgs`` first and wears ``with_engine_options``; typer then sees the flags in its
place. The help text sits here and the names, types and defaults in ``EngineArgs``, so neither can be said twice.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from outrider.config import EngineArgs

P = ParamSpec("P")

MODEL_HELP = "Name of an embedded model, a GGUF file, a Hugging Face directory or a hub id."
HELP: dict[str, str] = {
    "dtype": "Type of weights and KV; a type makes --quantization auto mean none. auto: the checkpoint's own, and "
    "bfloat16 for the KV of quantized models.",
    "seed": "Seed of the engine; a request without a seed of its own draws from it.",
    "max_model_len": "Context limit in tokens; by default the model's.",
    "max_num_seqs": "Sequences decoded together at most.",
    "max_num_batched_tokens": "Tokens of one step at most.",
    "enable_chunked_prefill": "Spread long prompts over several steps.",
    "enable_prefix_caching": "Reuse the KV of prompts that begin alike.",
    "kv_block_size": "Tokens per KV page.",
    "kv_cache_memory_bytes": "Memory for KV, the drafter's layers included; by default up to 2 GiB of what is free.",
    "max_num_waiting": "Requests that may wait; more are refused.",
    "draft": "auto (the drafter bundled for the model), none, lookup (prompt lookup) or a drafter's directory.",
    "num_speculative_tokens": "Tokens proposed per round; by default all that the drafter was trained for.",
    "draft_confidence_threshold": "Verify drafts only up to the first of lower confidence; 0 verifies all.",
    "speculative_disable_by_batch_size": "Where more requests run on a rank than this, prefilling ones included, "
    "decode without drafts those whose text cannot tell: greedy ones, and sampled ones without a seed of their own "
    "(generate and bench give each a seed). By default drafts are made at any load.",
    "prompt_lookup_max": "Longest run of tokens that prompt lookup searches for; by default 3.",
    "prompt_lookup_min": "Shortest run of tokens that prompt lookup searches for; by default 1.",
    "draft_self_test": "Hold the drafter against the figure stored beside it when it is loaded.",
    "device": "cpu, cuda, or auto (a CUDA device where there is one).",
    "attention_backend": "Attention implementation: auto (the device's), reference, or static (shapes that a GPU can "
    "capture).",
    "quantization": "Weights of compiled CPU passes: int8, int4 or none (torch). auto: int4 for 4-bit GGUF files and "
    "int8 for others, where passes can be compiled, cover the model and no --dtype is given; else none.",
    "enforce_eager": "Capture no tiers; by default so on a CPU, where they only pad, and not on accelerators.",
    "mask_padded_tokens": "Keep padding rows from experts: auto (with expert parallelism over ranks), on or off.",
    "data_parallel_size": "Ranks with requests of their own; limits such as max-num-seqs are per such rank.",
    "tensor_parallel_size": "Ranks that share the attention heads, MLP columns and LM head of each of those.",
    "enable_expert_parallel": "Spread whole experts over all ranks instead of slices of every expert.",
    "all2all_backend": "How rows reach experts of other ranks; alltoall sends each row only where it is needed, and "
    "needs --enable-expert-parallel.",
    "nnodes": "Machines; each runs this command, with its own --node-rank, and an equal share of the ranks.",
    "node_rank": "This machine's number; machine 0 takes the requests.",
    "master_addr": "Address of machine 0, where several meet.",
    "master_port": "Port there; by default a free one, with several machines 29501.",
    "distributed_timeout_seconds": "A process of an engine that does not answer for so long ends the engine; by "
    "default 300.",
}


def with_engine_options(command: Callable[Concatenate[EngineArgs, P], None]) -> Callable[..., None]:
    """``command`` with its first parameter replaced by the engine's flags. Raises ConfigError on bad values."""
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [*_engine_parameters(), *own]

    def run(**given: Any) -> None:
        args = EngineArgs(**{name: given.pop(name) for name in names})
        command(args, **given)  # type: ignore[call-arg]  # typer calls by the signature below

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _engine_parameters() -> list[inspect.Parameter]:
    hints = typing.get_type_hints(EngineArgs)
    parameters = []
    for field in dataclasses.fields(EngineArgs):
        if field.name == "model":
            info: Any = typer.Argument(help=MODEL_HELP)
        else:
            info = typer.Option(help=HELP[field.name], rich_help_panel="Engine")
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=field.default,
                annotation=Annotated[hints[field.name], info],
            )
        )
    return parameters
