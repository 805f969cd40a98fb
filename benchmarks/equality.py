"""Is greedy text the same with and without drafting? The claim the engine stands on, on a real model.

    python benchmarks/equality.py --data prompts.jsonl --model smollm2-135m --draft auto --draft lookup

Every prompt of a ``{"turns": [...]}`` file (its first turn, through the chat template) is decoded greedily without
drafting and with each ``--draft``, at each ``--max-num-seqs``. Where two texts part, the place is listed with the
reference's top-2 gap there: in float32 a pass of another width rounds the last bits differently, so a gap below 1e-4
may fall either way, and a larger one is a fault; with --quantization any difference is one. The last line is JSON; the
exit status is 1 if there was a fault, which bfloat16 without a quantization never counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.config import EngineArgs
from outrider.engine.setup import build_engine
from outrider.models.describe import describe_model
from outrider.models.source import LoadedModel, load_model
from outrider.outputs import RequestOutput, SpecCounters

TIE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    prompt: int
    position: int
    reference_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One way of drafting at one batch size, against none at the same batch size."""

    draft: str
    max_num_seqs: int
    prompts: int
    identical: int
    differences: tuple[Difference, ...]
    accepted_length: float
    acceptance_rate: float

    @property
    def largest_gap(self) -> float:
        return max((difference.reference_gap for difference in self.differences), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    outputs: list[RequestOutput]
    spec: SpecCounters


def read_prompts(path: Path, limit: int) -> list[list[dict[str, Any]]]:
    """The first turns, as conversations."""
    lines = path.read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines if line.strip()]
    return [[{"role": "user", "content": turn}] for turn in turns[:limit]]


def run(
    args: argparse.Namespace, target: LoadedModel, conversations: list[list[dict[str, Any]]], draft: str, seats: int
) -> Run:
    engine_args = EngineArgs(
        model=args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        draft=draft,
        num_speculative_tokens=None if draft == "none" else args.num_speculative_tokens,
        max_num_seqs=seats,
        max_num_waiting=len(conversations),
        max_model_len=args.max_model_len,
        enable_prefix_caching=False,
    )
    llm = LLM.from_core(build_engine(engine_args, target=target))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, logprobs=2 if draft == "none" else None)
    return Run(outputs=llm.chat(conversations, params), spec=llm.stats().spec)


def compare(reference: Run, drafted: Run, *, draft: str, seats: int) -> Comparison:
    pairs = list(zip(reference.outputs, drafted.outputs, strict=True))
    found = [first_difference(index, expected, output) for index, (expected, output) in enumerate(pairs)]
    differences = tuple(difference for difference in found if difference is not None)
    return Comparison(
        draft=draft,
        max_num_seqs=seats,
        prompts=len(pairs),
        identical=len(pairs) - len(differences),
        differences=differences,
        accepted_length=drafted.spec.accepted_length,
        acceptance_rate=drafted.spec.acceptance_rate,
    )


def first_difference(prompt: int, reference: RequestOutput, output: RequestOutput) -> Difference | None:
    expected, found = reference.outputs[0], output.outputs[0]
    assert expected.logprobs is not None, "the reference is run with logprobs"
    for position, logprobs in enumerate(expected.logprobs):
        if position >= len(found.token_ids) or found.token_ids[position] != expected.token_ids[position]:
            first, second = logprobs.top[:2]
            return Difference(prompt=prompt, position=position, reference_gap=first.logprob - second.logprob)
    assert len(found.token_ids) == len(expected.token_ids), f"prompt {prompt}: went on where the reference ended"
    return None


def print_table(comparisons: Sequence[Comparison]) -> None:
    print(f"{'draft':24} {'seats':>5} {'identical':>11} {'largest gap':>12} {'AL':>6} {'rate':>6}")
    for c in comparisons:
        print(
            f"{c.draft[-24:]:24} {c.max_num_seqs:5} {c.identical:5}/{c.prompts:<5} {c.largest_gap:12.2e} "
            f"{c.accepted_length:6.2f} {c.acceptance_rate:6.3f}"
        )
        for d in c.differences:
            print(f"    prompt {d.prompt}: parts at token {d.position}, reference top-2 gap {d.reference_gap:.3e}")
    sys.stdout.flush()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help='a file of lines {"turns": ["..."]}')
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", action="append", help="auto, lookup or a drafter; may be given several times")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, action="append", help="batch sizes; default 1 and 8")
    parser.add_argument("--num-speculative-tokens", type=int)
    args = parser.parse_args(argv)
    args.draft = args.draft or ["auto", "lookup"]
    args.max_num_seqs = args.max_num_seqs or [1, 8]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    conversations = read_prompts(args.data, args.num_prompts)
    dtype = describe_model(args.model).dtype if args.dtype == "auto" else args.dtype
    target = load_model(args.model, dtype=dtype)
    comparisons = []
    for seats in args.max_num_seqs:
        reference = run(args, target, conversations, "none", seats)
        for draft in args.draft:
            drafted = run(args, target, conversations, draft, seats)
            comparisons.append(compare(reference, drafted, draft=draft, seats=seats))
            print_table(comparisons[-1:])  # a long run that is cut short has said what it found
    if args.quantization != "none":  # rows are bitwise the same in any company, so nothing may differ
        passed = not any(c.differences for c in comparisons)
    else:
        passed = dtype != "float32" or all(c.largest_gap <= TIE for c in comparisons)
    report = {
        "benchmark": "equality",
        "model": args.model,
        "dtype": dtype,
        "quantization": args.quantization,
        "data": args.data.name,
        "max_tokens": args.max_tokens,
        "passed": passed,
        "comparisons": [asdict(c) | {"largest_gap": c.largest_gap} for c in comparisons],
    }
    print(json.dumps(report))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
