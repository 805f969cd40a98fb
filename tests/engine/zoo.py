"""Fixture models by name, engines over them, and the comparisons that the engine's tests share.

A zoo's engines run on one back end: torch modules, or compiled passes over int8 or 4-bit weights, whose keys and values
are bfloat16. The fixtures' answers are the same on all of them. On torch greedy texts may part at numerical ties; on
compiled passes a row's bits do not depend on the pass, so nothing may.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file
from tests import fixtures

from outrider import LLM, SamplingParams
from outrider.engine.engine import Engine
from outrider.outputs import RequestOutput

TARGET_PROBABILITIES = {7: 0.10, 8: 0.60, 9: 0.30}  # of case T5
DRAFT_PROBABILITIES = {7: 0.45, 8: 0.10, 9: 0.45}
TIE = 1e-4  # a top-2 gap below this may fall either way when rows are batched differently, in torch
SMALL_POOL = 1 << 22  # bytes; 170 blocks with a drafter, twice as many in bfloat16
_BLOCK_ELEMENTS = 16 * 2 * (fixtures.LAYERS + fixtures.DRAFT_LAYERS) * fixtures.KV_HEADS * fixtures.HEAD_DIM  # the same

BackEnd = Literal["torch", "int8", "int4"]
on_every_back_end = pytest.mark.parametrize("zoo", ["torch", "int8", "int4"], indirect=True)
Config = dict[str, Any]
Fault = Callable[[Config, fixtures.TensorDict], None]

_MAKERS: dict[str, Callable[[Path], Path]] = {
    "cycle": fixtures.make_cycle_target,
    "layered": fixtures.make_layered_target,
    "rand": fixtures.make_rand_target,
    "fixed": lambda path: fixtures.make_fixed_target(path, probabilities=TARGET_PROBABILITIES),
    "perfect": fixtures.make_perfect_drafter,
    "wrong": fixtures.make_wrong_drafter,
    "half": fixtures.make_half_drafter,
    "context": lambda path: fixtures.make_context_drafter(path, lookback=fixtures.GAMMA),  # newest position included
    "random": fixtures.make_random_drafter,
    "fixed-drafter": lambda path: fixtures.make_fixed_drafter(path, probabilities=DRAFT_PROBABILITIES),
}


class Zoo:
    """Writes each model once, on first use."""

    def __init__(self, root: Path, *, back_end: BackEnd = "torch") -> None:
        self._root = root
        self.back_end = back_end

    @property
    def block_bytes(self) -> int:
        """Of a KV block of 16 tokens with a drafter."""
        return _BLOCK_ELEMENTS * (4 if self.back_end == "torch" else 2)

    @property
    def quantization(self) -> Literal["none", "int8", "int4"]:
        return "none" if self.back_end == "torch" else self.back_end

    @property
    def tie(self) -> float:
        """Top-2 gaps below it may fall either way."""
        return TIE if self.back_end == "torch" else 0.0

    def path(self, name: str) -> Path:
        path = self._root / name
        return path if path.is_dir() else _MAKERS[name](path)

    def edited(self, name: str, **config_changes: Any) -> Path:
        """A copy of a model with a changed configuration and the same tensors."""
        path = self._root / f"{name} with {json.dumps(config_changes)}"
        if not path.is_dir():
            shutil.copytree(self.path(name), path)
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            (path / "config.json").write_text(json.dumps({**config, **config_changes}), encoding="utf-8")
        return path

    def llm(self, target: str, drafter: str = "none", gamma: int | None = None, **engine_args: Any) -> LLM:
        """An engine over a small pool. Both models: a name of the zoo or a path; drafter also "none" or "lookup"."""
        model = str(self.path(target)) if target in _MAKERS else target
        draft = str(self.path(drafter)) if drafter in _MAKERS else drafter
        args: dict[str, Any] = {
            "kv_cache_memory_bytes": SMALL_POOL,
            "quantization": self.quantization,
            **engine_args,
        }
        return LLM(model, draft=draft, num_speculative_tokens=gamma, **args)


def edited(path: Path, source: Path, fault: Fault) -> str:
    """A copy of a checkpoint at ``path`` after ``fault`` changed its configuration and tensors."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(source / "model.safetensors")
    fault(config, tensors)
    return str(fixtures.write_checkpoint(path, config, tensors))


def decode(token_id: int) -> str:
    """The fixture tokenizer's text of one token."""
    vocabulary: list[str] = [*fixtures.CHARACTERS, *fixtures.SPECIAL_TOKENS]
    return vocabulary[token_id]


def greedy(max_tokens: int = 64, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate(list(prompts), params, use_tqdm=False)


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    return list(output.outputs[index].token_ids)


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    """Tokens that are not on CYCLE's orbit in order; specials left out."""
    return [(37 * i * i + 11 * i + 17 * seed + 5) % fixtures.CYCLE for i in range(length)]


def run_to_end(core: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the finished outputs by request id."""
    finished: dict[str, RequestOutput] = {}
    while core.has_unfinished:
        finished |= {output.request_id: output for output in core.step() if output.finished}
    return finished


@dataclass(frozen=True, slots=True)
class Difference:
    position: int  # of the output
    reference_gap: float  # the reference's top-2 gap there


def first_difference(reference: RequestOutput, other: RequestOutput) -> Difference | None:
    """Where two greedy outputs part; the reference was run with ``logprobs`` of at least 2."""
    expected, found = tokens(reference), tokens(other)
    logprobs = reference.outputs[0].logprobs
    assert logprobs is not None, "the reference needs logprobs=2"
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            first, second = logprobs[position].top[:2]
            return Difference(position, first.logprob - second.logprob)
    assert len(expected) == len(found), (len(expected), len(found))
    return None


def assert_same_but_for_ties(reference: RequestOutput, other: RequestOutput, what: str, *, tie: float = TIE) -> None:
    """Identical, or parted at a numerical tie, which is printed."""
    difference = first_difference(reference, other)
    if difference is not None:
        print(f"{what}: differs at {difference.position}, reference top-2 gap {difference.reference_gap:.2e}")
        assert difference.reference_gap < tie, f"{what}: {difference}"
