"""How far a quantised model is from the model: mean KL divergence of next-token distributions on its own answers.

    python benchmarks/fidelity.py --data examples/prompts.jsonl --tokens 20000 --work runs/fidelity

The text is what the model itself answers to the first turns of ``{"turns": [...]}`` files, sampled at temperature 1 on
the default back end: it exists wherever the model does, and on compiled passes it is the same on every machine.
Every answer is run through each candidate behind its prompt, and at each of its tokens the distribution is compared
with that of two references, float32 and bfloat16, both torch without a quantization. Candidates are the references,
each ``--quantization`` with the bfloat16 keys and values that engines give it, and, where llama-cpp-python can be
imported, llama.cpp on the model's GGUF file in each ``--formats``. Top-1 agreement is the share
of tokens where the likeliest one is the same.

Answers and scores are kept in ``--work``, and a run goes on where one before it with the same settings ended. Progress
is a bar over answers; the last line is JSON.

Shape legend: N rows of a window, V vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.bench.peers.gguf_formats import FORMATS, in_format
from outrider.bench.prompt_file import encode_prompt, read_prompts
from outrider.engine.llm import LLM
from outrider.engine.quantization import quantised_target, required_kernels
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.models.decoder import Decoder
from outrider.models.interface import DecoderOutput
from outrider.models.native_decoder import NativeDecoder
from outrider.models.source import LoadedModel, load_model, resolve_model
from outrider.sampling_params import SamplingParams

SEATS = 32  # answers written together
REFERENCES = ("float32", "bfloat16")
Logits = Callable[[Tensor], Tensor]  # fp32 [N, V] of token ids [N]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the model said; the distributions at ``token_ids[prompt_len:]`` are compared."""

    token_ids: tuple[int, ...]
    prompt_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len


class Distributions:
    """Of one model at the tokens of one answer."""

    def __init__(self, logits_NV: Tensor) -> None:
        self.log_p_NV = logits_NV.log_softmax(-1)
        self.likeliest_N = logits_NV.argmax(-1)

    @cached_property
    def probabilities(self) -> Tensor:
        """[N, V]; only a reference's are asked for."""
        return self.log_p_NV.exp()


@dataclass(frozen=True, slots=True)
class Score:
    """Of one answer and candidate against one reference."""

    divergence: float  # summed over tokens, in nats
    agreeing: int

    @classmethod
    def of(cls, expected: Distributions, found: Distributions) -> Score:
        difference_NV = expected.log_p_NV - found.log_p_NV
        return cls(
            divergence=float(difference_NV.mul_(expected.probabilities).sum(dtype=torch.float64)),
            agreeing=int((expected.likeliest_N == found.likeliest_N).sum()),
        )


@dataclass(slots=True)
class Total:
    """Of a candidate against a reference, over answers."""

    scores: list[tuple[int, Score]] = field(default_factory=list)  # with the answer's tokens

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.scores)

    @property
    def mean_kl(self) -> float:
        return math.fsum(score.divergence for _, score in self.scores) / self.tokens

    @property
    def standard_error(self) -> float:
        """Of the mean, answers being independent and their tokens not."""
        mean = self.mean_kl
        return math.sqrt(math.fsum((score.divergence - mean * n) ** 2 for n, score in self.scores)) / self.tokens

    @property
    def agreement(self) -> float:
        return sum(score.agreeing for _, score in self.scores) / self.tokens


@torch.inference_mode()
def whole_pass(
    model: Decoder | NativeDecoder, token_ids: Tensor, kv_dtype: torch.dtype, tap_layer_ids: tuple[int, ...] = ()
) -> DecoderOutput:
    """One sequence alone, from its first token, in one pass."""
    length, config = token_ids.shape[0], model.config
    shape = (length, config.num_kv_heads, config.head_dim)
    pool = [
        LayerKV(torch.zeros(shape, dtype=kv_dtype), torch.zeros(shape, dtype=kv_dtype))
        for _ in range(config.num_layers)
    ]
    metadata = CausalMetadata(
        query_start_loc_R1=torch.tensor([0, length], dtype=torch.int32),
        seq_lens_R=torch.tensor([length], dtype=torch.int32),
        block_tables_RB=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping_N=torch.arange(length),
        kv_block_size=length,
        max_query_len=length,
        max_seq_len=length,
    )
    experts = ExpertMetadata.single(length)
    output: DecoderOutput = model(token_ids, torch.arange(length), pool, metadata, tap_layer_ids, experts)
    return output


@torch.inference_mode()
def logits(model: Decoder | NativeDecoder, token_ids: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """fp32 [N, V] of one window in one pass."""
    return model.compute_logits(whole_pass(model, token_ids, kv_dtype).hidden_ND).float()


def own_logits(model: Decoder | NativeDecoder, kv_dtype: torch.dtype, *, threads: int) -> Logits:
    def run(token_ids: Tensor) -> Tensor:
        torch.set_num_threads(1 if isinstance(model, NativeDecoder) else threads)  # kernels have threads of their own
        found_NV = logits(model, token_ids, kv_dtype)
        torch.set_num_threads(threads)
        return found_NV

    return run


def llama_cpp_logits(path: Path, *, length: int, threads: int) -> Logits:
    """llama.cpp with its own defaults, a window a pass."""
    from llama_cpp import Llama

    llama = Llama(
        str(path),
        n_ctx=length,
        n_batch=length,
        n_ubatch=length,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )

    def run(token_ids: Tensor) -> Tensor:
        llama.reset()
        llama.eval(token_ids.tolist())
        return torch.from_numpy(llama.scores[: token_ids.shape[0]].copy()).float()

    return run


def answers(name: str, prompts: Sequence[str], *, tokens: int, max_tokens: int) -> Iterator[list[Answer]]:
    """Rounds over the prompts, every answer of another seed, until there are ``tokens`` answer tokens."""
    llm = LLM(name, draft="none", max_num_seqs=SEATS)
    prompt_ids = [encode_prompt(llm.tokenizer, prompt, raw=False) for prompt in prompts]
    prompt_ids *= max(1, SEATS // len(prompts))
    made = 0
    for seed in count():
        params = [
            SamplingParams(temperature=1.0, seed=seed * len(prompt_ids) + i, max_tokens=max_tokens)
            for i in range(len(prompt_ids))
        ]
        outputs = llm.generate(prompt_ids, params)
        found = [
            Answer((*output.prompt_token_ids, *output.outputs[0].token_ids), len(output.prompt_token_ids))
            for output in outputs
        ]
        yield found
        made += sum(answer.num_tokens for answer in found)
        print(f"{made} of {tokens} answer tokens", file=sys.stderr, flush=True)
        if made >= tokens:
            return


class Work:
    """The folder in which a run leaves what it has, a JSON line each; all in it is of the same settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Raises SystemExit where it holds the work of other settings."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        said = folder / "settings.json"
        if said.exists() and json.loads(said.read_text(encoding="utf-8")) != settings:
            raise SystemExit(f"{folder} holds the work of other settings ({said}); name another --work")
        said.write_text(json.dumps(settings), encoding="utf-8")

    def answers(self, make: Callable[[], Iterator[list[Answer]]]) -> list[Answer]:
        """Those kept, or made and kept when they are complete."""
        path = self._folder / "answers.jsonl"
        if not path.exists():
            lines = [json.dumps(dataclasses.asdict(answer)) for found in make() for answer in found]
            staged = path.with_suffix(".new")
            staged.write_text("\n".join(lines) + "\n", encoding="utf-8")
            staged.replace(path)
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [Answer(tuple(each["token_ids"]), each["prompt_len"]) for each in found]

    def scores(self) -> dict[tuple[int, str, str], Score]:
        """By answer, candidate and reference."""
        path = self._folder / "scores.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {tuple(place): Score(**score) for place, score in map(json.loads, lines)}

    def add(self, found: dict[tuple[int, str, str], Score]) -> None:
        with (self._folder / "scores.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([place, dataclasses.asdict(score)]) + "\n" for place, score in found.items())
            file.flush()
            os.fsync(file.fileno())


def candidates(args: argparse.Namespace, loaded: LoadedModel, *, longest: int, threads: int) -> dict[str, Logits]:
    """The references first."""
    bfloat16 = load_model(args.model, dtype="bfloat16").model
    found = {
        "float32": own_logits(loaded.model, torch.float32, threads=threads),
        "bfloat16": own_logits(bfloat16, torch.bfloat16, threads=threads),
    }
    for name in args.quantization:
        required_kernels()
        found[name] = own_logits(quantised_target(loaded.model, name), torch.bfloat16, threads=threads)
    path = resolve_model(args.model)
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is left out: no package llama-cpp-python", file=sys.stderr)
    elif path.is_dir():
        print(f"llama.cpp is left out: {path} is no GGUF file", file=sys.stderr)
    else:
        for name in args.formats:
            found[f"llama.cpp {name}"] = llama_cpp_logits(in_format(path, name), length=longest, threads=threads)
    return found


def measure(work: Work, texts: Sequence[Answer], run: dict[str, Logits]) -> dict[tuple[int, str, str], Score]:
    """Every answer through every candidate; those scored already are left out."""
    scores = work.scores()
    for index, answer in enumerate(tqdm(texts, desc="fidelity", unit="answer")):
        missing = [name for name in run if any((index, name, reference) not in scores for reference in REFERENCES)]
        if not missing:
            continue
        token_ids, first = torch.tensor(answer.token_ids[:-1]), answer.prompt_len - 1
        expected = {reference: Distributions(run[reference](token_ids)[first:]) for reference in REFERENCES}
        new: dict[tuple[int, str, str], Score] = {}
        for name in missing:
            found = expected[name] if name in expected else Distributions(run[name](token_ids)[first:])
            new |= {(index, name, reference): Score.of(each, found) for reference, each in expected.items()}
        work.add(new)
        scores |= new
    return scores


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True, help='files of lines {"turns": ["..."]}')
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=("int8", "int4"), action="append")
    parser.add_argument("--formats", choices=FORMATS, action="append", help="of llama.cpp; by default all")
    parser.add_argument("--tokens", type=int, default=20000, help="of answers, at least")
    parser.add_argument("--max-tokens", type=int, default=256, help="of one answer")
    parser.add_argument("--work", type=Path, default=Path("runs/fidelity"), help="keeps answers and scores")
    parser.add_argument("--kept", action="store_true", help="report what is in --work so far, and compute nothing")
    args = parser.parse_args(argv)
    args.quantization = args.quantization or ["int8", "int4"]
    args.formats = args.formats or list(FORMATS)
    return args


def report(model: str, texts: Sequence[Answer], scores: dict[tuple[int, str, str], Score]) -> None:
    """A table of the answers that every candidate has been through, and the JSON line."""
    names = list(dict.fromkeys(name for _, name, _ in scores))
    complete = [i for i in range(len(texts)) if all((i, name, r) in scores for name in names for r in REFERENCES)]
    tokens = sum(texts[i].num_tokens for i in complete)
    print(f"{len(complete)} of {len(texts)} answers, {tokens} tokens")
    if not complete:
        return
    print(f"{'':24}" + "".join(f"{'KL to ' + reference:>20} {'+-':>9} {'top-1':>7}" for reference in REFERENCES))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        totals = {r: Total([(texts[i].num_tokens, scores[i, name, r]) for i in complete]) for r in REFERENCES}
        cells = [f"{t.mean_kl:20.3e} {t.standard_error:9.1e} {t.agreement:7.4f}" for t in totals.values()]
        print(f"{name:24}" + "".join(cells))
        found[name] = {
            r: {"mean_kl": t.mean_kl, "standard_error": t.standard_error, "top1_agreement": t.agreement}
            for r, t in totals.items()
        }
    print(json.dumps({"benchmark": "fidelity", "model": model, "tokens": tokens, "scores": found}))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    threads = torch.get_num_threads()
    prompts = [prompt for path in args.data for prompt in read_prompts(path, None)]
    settings = {"model": args.model, "tokens": args.tokens, "max_tokens": args.max_tokens, "prompts": prompts}
    work = Work(args.work, settings)
    texts = work.answers(lambda: answers(args.model, prompts, tokens=args.tokens, max_tokens=args.max_tokens))
    if args.kept:
        report(args.model, texts, work.scores())
        return 0
    loaded = load_model(args.model, dtype="float32")
    longest = max(len(answer.token_ids) for answer in texts)
    report(args.model, texts, measure(work, texts, candidates(args, loaded, longest=longest, threads=threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
