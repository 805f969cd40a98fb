"""How far a quantised model is from the model: mean KL divergence of next-token distributions on text.

    python benchmarks/fidelity.py --data prompts.jsonl --model smollm2-135m --quantization int8 --quantization int4

The reference is the model in ``--dtype`` without quantization, on the text of ``{"turns": [...]}`` files cut into
windows. Beside each quantization: bfloat16 without one, and ``q4_0``, the reference with its layers' weights rounded as
a Q4_0 file rounds them (the LM head kept), as marks on the scale. Top-1 agreement is the share of positions with the
same likeliest token. The last line is JSON.

Shape legend: N positions of a window, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.engine.quantization import quantised_target, required_kernels
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.layers.linear import Linear
from outrider.models.decoder import Decoder
from outrider.models.native_decoder import NativeDecoder
from outrider.models.source import load_model
from outrider.models.weights import TORCH_DTYPES

GROUP = 32


@dataclass(slots=True)
class Score:
    positions: int = 0
    divergence: float = 0.0  # summed, in nats
    agreeing: int = 0

    def add(self, expected_NV: Tensor, found_NV: Tensor) -> None:
        expected_NV, found_NV = expected_NV.log_softmax(-1), found_NV.log_softmax(-1)
        self.positions += expected_NV.shape[0]
        self.divergence += float((expected_NV.exp() * (expected_NV - found_NV)).sum())
        self.agreeing += int((expected_NV.argmax(-1) == found_NV.argmax(-1)).sum())


@torch.inference_mode()
def logits(model: Decoder | NativeDecoder, window_N: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """fp32 [N, V] of one window in one pass."""
    length, config = window_N.shape[0], model.config
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
    output = model(window_N, torch.arange(length), pool, metadata, (), ExpertMetadata.single(length))
    return model.compute_logits(output.hidden_ND)


def round_as_q4_0(model: Decoder) -> Decoder:
    """The layers' weights on Q4_0's grid: per group of 32, d = extreme / -8 and q in 0..15 around 8."""
    for module in model.layers.modules():
        if isinstance(module, Linear):
            groups = module.weight.data.float().view(-1, GROUP)
            extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True))
            d = (extreme / -8).half().float()
            inverse = torch.where(d == 0, 0.0, 1 / d)
            q = (groups * inverse + 8.5).floor().clamp(0, 15)
            module.weight.data.copy_(((q - 8) * d).view(module.weight.shape))
    return model


def windows(texts: Sequence[list[int]], *, length: int, tokens: int) -> Iterator[Tensor]:
    """Whole windows over the texts laid end to end."""
    stream = torch.tensor([token for text in texts for token in text][:tokens])
    for start in range(0, len(stream) - length + 1, length):
        yield stream[start : start + length]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True, help='files of lines {"turns": ["..."]}')
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the reference")
    parser.add_argument("--quantization", choices=("int8", "int4"), action="append")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args(argv)
    args.quantization = args.quantization or ["int8", "int4"]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    loaded = load_model(args.model, dtype=args.dtype)
    lines = [line for path in args.data for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [
        loaded.tokenizer.encode(turn, add_special_tokens=False) for line in lines for turn in json.loads(line)["turns"]
    ]
    candidates: dict[str, tuple[Decoder | NativeDecoder, torch.dtype]] = {}
    for name in args.quantization:
        required_kernels()
        model = quantised_target(loaded.model, name)
        candidates[name] = (model, torch.float32)
        candidates[f"{name}, bfloat16 KV"] = (model, torch.bfloat16)
    candidates["bfloat16"] = (load_model(args.model, dtype="bfloat16").model, torch.bfloat16)
    candidates["q4_0"] = (round_as_q4_0(load_model(args.model, dtype=args.dtype).model), TORCH_DTYPES[args.dtype])
    scores = {name: Score() for name in candidates}
    for window_N in windows(texts, length=args.window, tokens=args.tokens):
        expected_NV = logits(loaded.model, window_N, TORCH_DTYPES[args.dtype])
        for name, (model, kv_dtype) in candidates.items():
            scores[name].add(expected_NV, logits(model, window_N, kv_dtype))
    print(f"{'':24} {'mean KL (nats)':>15} {'top-1':>8}   over {next(iter(scores.values())).positions} tokens")
    report = {}
    for name, score in scores.items():
        mean, agreement = score.divergence / score.positions, score.agreeing / score.positions
        print(f"{name:24} {mean:15.3e} {agreement:8.4f}")
        report[name] = {"mean_kl": mean, "top1_agreement": agreement}
    print(json.dumps({"benchmark": "fidelity", "model": args.model, "reference": args.dtype, "scores": report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
