"""Milliseconds of a target's pass over 1 to 256 rows, what its stages take, and what the machine would allow.

A pass of N rows is made of requests of at most ``rows_per_request`` rows, each over ``context`` positions, with logits
for every row: what verifying drafts asks for. Rows differ in number only, so passes of all sizes alternate within each
round and ratios are taken between medians of one run. The machine's bandwidth is that of reading a buffer as large as
the weights, which is what a pass over few rows does, once in each round: read again and again it would come from a
large last cache, which the passes between do not leave to the weights. Its arithmetic is that of the same products out
of the nearest cache.

Shape legend: N rows, R requests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import DTypeName, ModelConfig
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.models.decoder import Decoder
from outrider.models.native_decoder import NativeDecoder
from outrider.models.weights import TORCH_DTYPES
from outrider.ops.native_kernels import Kernels
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat

_KV_BLOCK_SIZE = 16
_WARM_UP = 2
_MULTIPLY_INPUTS, _MULTIPLY_ROUNDS = 1024, 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    milliseconds: dict[int, float]  # rows -> median of a pass
    fastest: dict[int, float]  # rows -> shortest of them
    shares: dict[int, dict[str, float]]  # rows -> stage -> share of the pass; {} for torch
    weight_bytes: int  # read by a pass of any size
    multiplications: int  # by one row of a pass
    bandwidth_gb_s: float  # median; 0 without kernels
    giga_operations: float  # int8 operations a second, 0 without kernels


@dataclass(frozen=True, slots=True)
class _Pass:
    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    metadata: CausalMetadata


def measure_kernels(
    model: Decoder | NativeDecoder,
    kernels: Kernels | None,
    *,
    kv_dtype: DTypeName,
    rows: Sequence[int],
    context: int,
    rows_per_request: int,
    repeat: int,
    on_pass: Callable[[], object],
) -> KernelFigures:
    """``kernels``: those ``model`` runs on, None for torch. Passes are timed ``repeat`` times each, in turn."""
    config = model.config
    requests = -(-max(rows) // rows_per_request)
    pool = _pool(config, kv_dtype, requests * (context + rows_per_request + _KV_BLOCK_SIZE))
    passes = {n: _pass(config, n, context=context, rows_per_request=rows_per_request) for n in rows}
    seconds: dict[int, list[float]] = {n: [] for n in rows}
    stages: dict[int, dict[str, float]] = {n: {} for n in rows}
    weight_bytes = model.weight_bytes if isinstance(model, NativeDecoder) else _parameter_bytes(model)
    as_weights = torch.ones(weight_bytes if kernels is not None else 0, dtype=torch.uint8)
    reads: list[float] = []
    for round_ in range(_WARM_UP + repeat):
        if kernels is not None:
            start = time.perf_counter()
            kernels.read(as_weights)
            reads.append(time.perf_counter() - start)
        for n, each in passes.items():
            if kernels is not None:
                kernels.stage_seconds()
            start = time.perf_counter()
            _run(model, each, pool)
            took = time.perf_counter() - start
            on_pass()
            if round_ < _WARM_UP:
                continue
            seconds[n].append(took)
            for stage, part in (kernels.stage_seconds() if kernels is not None else {}).items():
                stages[n][stage] = stages[n].get(stage, 0.0) + part
    return KernelFigures(
        milliseconds={n: 1e3 * statistics.median(each) for n, each in seconds.items()},
        fastest={n: 1e3 * min(each) for n, each in seconds.items()},
        shares={n: {stage: part / sum(seconds[n]) for stage, part in each.items()} for n, each in stages.items()},
        weight_bytes=weight_bytes,
        multiplications=_multiplications(config),
        bandwidth_gb_s=weight_bytes / statistics.median(reads[_WARM_UP:]) / 1e9 if reads else 0.0,
        giga_operations=_arithmetic(kernels) if kernels is not None else 0.0,
    )


@torch.inference_mode()
def _run(model: Decoder | NativeDecoder, each: _Pass, pool: Sequence[LayerKV]) -> None:
    experts = ExpertMetadata.single(each.token_ids_N.shape[0])
    output = model(each.token_ids_N, each.positions_N, pool, each.metadata, (), experts)
    model.compute_logits(output.hidden_ND)


def _pool(config: ModelConfig, dtype: DTypeName, slots: int) -> list[LayerKV]:
    """Keys and values of all positions, random: a context need not have been computed to be attended to."""
    shape = (slots, config.num_kv_heads, config.head_dim)
    return [
        LayerKV(torch.randn(shape, dtype=TORCH_DTYPES[dtype]), torch.randn(shape, dtype=TORCH_DTYPES[dtype]))
        for _ in range(config.num_layers)
    ]


def _pass(config: ModelConfig, rows: int, *, context: int, rows_per_request: int) -> _Pass:
    lengths = [min(rows_per_request, rows - start) for start in range(0, rows, rows_per_request)]
    width = -(-(context + rows_per_request) // _KV_BLOCK_SIZE)
    positions_N = torch.cat([torch.arange(context, context + length) for length in lengths])
    request_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(rows)
    return _Pass(
        token_ids_N=torch.randint(config.vocab_size, (rows,), generator=generator),
        positions_N=positions_N,
        metadata=CausalMetadata(
            query_start_loc_R1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens_R=torch.tensor([context + length for length in lengths], dtype=torch.int32),
            block_tables_RB=torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width),
            slot_mapping_N=request_N * width * _KV_BLOCK_SIZE + positions_N,
            kv_block_size=_KV_BLOCK_SIZE,
            max_query_len=max(lengths),
            max_seq_len=context + max(lengths),
        ),
    )


def _multiplications(config: ModelConfig) -> int:
    """By the weights, for one row; attention left out."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def _parameter_bytes(model: Decoder) -> int:
    """A tied embedding is read once; an untied one is looked up, not read."""
    unread = set() if model.config.tie_word_embeddings else {id(model.embed_tokens.weight)}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in unread)


def _arithmetic(kernels: Kernels) -> float:
    """10^9 int8 operations a second, additions counted, of the fastest of some runs."""
    weight, x = torch.randn(16, _MULTIPLY_INPUTS), torch.randn(16, _MULTIPLY_INPUTS)
    matrix = PackedMatrix.pack(kernels, weight, None, weight_format=WeightFormat.INT8, name="weight")
    operations = 2 * 16 * 16 * _MULTIPLY_INPUTS * _MULTIPLY_ROUNDS
    return operations / _fastest(lambda: kernels.multiply(matrix.struct, x, rounds=_MULTIPLY_ROUNDS)) / 1e9


def _fastest(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
