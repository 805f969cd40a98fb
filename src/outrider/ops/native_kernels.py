"""The compiled kernels: the C interface of ``native/decoder.cpp`` mirrored for ctypes, built and loaded on first use.

Contract: ``load_kernels()`` is the one set of kernels of this process, or None (reason in the log) without a compiler.
Structs hold addresses: whoever fills one keeps the tensors behind it alive. Every tensor is checked for type, device
and contiguity where its address is taken, since the worst fault here is an address that does not mean what C++ reads.

Shape legend: N rows of a pass, R requests, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from outrider.logger import get_logger
from outrider.ops.native_build import build_library

logger = get_logger(__name__)

_FOLDER = Path(__file__).parent / "native"
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-std=c++17", "-Wno-psabi", "-fvisibility=hidden")


# As the C enum Stage.
STAGES = ("norm", "qkv", "rotary", "attention", "output", "gate_up", "down", "linear", "sampling")


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("panels", c_int32),
        ("groups", c_int32),
        ("unused", c_int32),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down", "key_value")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        ("eps", c_float),
        ("scale", c_float),
    )


class CacheStruct(ctypes.Structure):
    _fields_ = (("key", c_void_p), ("value", c_void_p))


class PassStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "embedding_bf16", "token_ids", "positions", "cos", "sin")),
        ("caches", ctypes.POINTER(CacheStruct)),
        *((name, c_void_p) for name in ("slots", "starts", "lengths", "tables")),
        ("tap_layers", ctypes.POINTER(c_int32)),
        ("taps", c_void_p),
        ("hidden", c_void_p),
        *((name, c_int32) for name in ("rows", "requests", "table_width", "block_size", "num_taps", "kv_is_bf16")),
        *((name, c_int32) for name in ("vocab_size", "num_positions", "block_width", "mask_id")),
    )


class ContextStruct(ctypes.Structure):
    _fields_ = (
        ("fc", ctypes.POINTER(MatrixStruct)),
        *((name, c_void_p) for name in ("norm", "taps", "positions", "cos", "sin")),
        ("caches", ctypes.POINTER(CacheStruct)),
        ("slots", c_void_p),
        *((name, c_int32) for name in ("rows", "taps_width", "kv_is_bf16", "num_positions")),
    )


class SampledStruct(ctypes.Structure):
    """How a request samples in one round; the C struct says more."""

    _fields_ = (
        ("seed", c_uint64),
        ("position", c_int64),
        ("anchor", c_int64),
        ("top_p", c_double),
        ("log_min_p", c_double),
        ("temperature", c_float),
        ("top_k", c_int32),
    )


class WalkStruct(ctypes.Structure):
    _fields_ = (
        ("bias", ctypes.POINTER(MatrixStruct)),
        *((name, c_void_p) for name in ("features", "features_bf16", "base", "hidden", "confidence", "anchors")),
        ("sampled", ctypes.POINTER(SampledStruct)),
        ("draft_to_target", c_void_p),
        ("ids", ctypes.POINTER(c_int64)),
        ("q", c_void_p),
        ("confidences", c_void_p),
        *((name, c_int32) for name in ("requests", "slots", "depth", "draft_vocab", "vocab", "rank", "hidden_size")),
        *((name, c_int32) for name in ("hidden_stride", "confidence_size", "keeps_q")),
    )


class VerificationStruct(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("starts", ctypes.POINTER(c_int32)),
        ("drafts", ctypes.POINTER(c_int64)),
        ("sampled", ctypes.POINTER(SampledStruct)),
        ("q", ctypes.POINTER(c_void_p)),
        ("draft_to_target", c_void_p),
        ("column_of_id", c_void_p),
        ("accepted", ctypes.POINTER(c_int32)),
        ("last", ctypes.POINTER(c_int64)),
        *((name, c_int32) for name in ("requests", "vocab", "draft_vocab", "mapped_ids")),
    )


def address(tensor: Tensor, *dtypes: torch.dtype) -> int:
    """Where a contiguous CPU tensor of one of ``dtypes`` lies."""
    readable = tensor.dtype in dtypes and tensor.is_cpu and tensor.is_contiguous()
    assert readable, (
        f"a kernel was given {tensor.dtype} on {tensor.device} with strides {tensor.stride()} for "
        f"{tuple(tensor.shape)}, not contiguous {dtypes} on the CPU"
    )
    return tensor.data_ptr()


class Kernels:
    """The library's functions with Python's types."""

    def __init__(self, library: ctypes.CDLL, *, threads: int) -> None:
        library.outrider_isa.restype = ctypes.c_char_p
        library.outrider_packed_bytes.restype = c_int64
        library.outrider_pack.restype = c_double
        library.outrider_pack.argtypes = (c_void_p, c_int, c_int, c_void_p, c_int, c_int, c_void_p)
        library.outrider_linear.argtypes = (ctypes.POINTER(MatrixStruct), c_void_p, c_int, c_int, c_void_p, c_int)
        library.outrider_pass.argtypes = (ctypes.POINTER(DecoderStruct), ctypes.POINTER(PassStruct))
        library.outrider_write_context.argtypes = (ctypes.POINTER(DecoderStruct), ctypes.POINTER(ContextStruct))
        library.outrider_finite_rows.argtypes = (c_void_p, c_int, c_int, ctypes.POINTER(c_int32))
        library.outrider_walk.argtypes = (ctypes.POINTER(WalkStruct),)
        library.outrider_verify.argtypes = (ctypes.POINTER(VerificationStruct),)
        library.outrider_set_threads(threads)
        self._library = library
        self.threads = threads
        self.isa: str = library.outrider_isa().decode()

    def pack(self, weight_OI: Tensor, order_X: Tensor, *, format_code: int, panels: int) -> tuple[Tensor, float]:
        """Packed bytes and the squared error relative to the weights' squares (NaN: something is not finite)."""
        inputs = weight_OI.shape[1]
        assert order_X.numel() == panels * 16, f"{order_X.numel()} outputs for {panels} panels of 16"
        assert int(order_X.max()) < weight_OI.shape[0], "an output beyond the weight's rows"
        size = self._library.outrider_packed_bytes(format_code, panels, inputs)
        data = torch.zeros(size, dtype=torch.uint8)
        error = self._library.outrider_pack(
            address(weight_OI, torch.float32, torch.bfloat16),
            weight_OI.dtype == torch.bfloat16,
            inputs,
            address(order_X, torch.int64),
            panels,
            format_code,
            data.data_ptr(),
        )
        return data, float(error)

    def linear(self, matrix: MatrixStruct, x_NI: Tensor, *, outputs: int) -> Tensor:
        """fp32 [N, O]."""
        rows, inputs = x_NI.shape
        assert -(-inputs // 32) == matrix.groups, f"{inputs} inputs for a matrix of {matrix.groups} groups of 32"
        assert -(-outputs // 16) == matrix.panels, f"{outputs} outputs of a matrix of {matrix.panels} panels of 16"
        out_NO = torch.empty(rows, outputs)
        self._library.outrider_linear(
            ctypes.byref(matrix), address(x_NI, torch.float32), rows, inputs, out_NO.data_ptr(), outputs
        )
        return out_NO

    def stage_seconds(self) -> dict[str, float]:
        """Time by stage since the last call; "linear" is every call of ``linear`` and the bias of a walk."""
        seconds = (c_double * len(STAGES))()
        self._library.outrider_stage_seconds(seconds)
        return dict(zip(STAGES, seconds, strict=True))

    def read(self, data: Tensor) -> None:
        """Read all of a buffer once with every thread, whole pieces of 64 KiB."""
        self._library.outrider_read(c_void_p(address(data, torch.uint8)), c_int64(data.numel()))

    def multiply(self, matrix: MatrixStruct, x_NI: Tensor, *, rounds: int) -> None:
        """``rounds`` times the first panel by 16 rows, spread over the threads; no result."""
        assert x_NI.shape == (16, matrix.groups * 32), f"{tuple(x_NI.shape)}"
        self._library.outrider_multiply(ctypes.byref(matrix), c_void_p(address(x_NI, torch.float32)), rounds)

    def run_pass(self, decoder: DecoderStruct, arguments: PassStruct) -> None:
        _check(self._library.outrider_pass(ctypes.byref(decoder), ctypes.byref(arguments)))

    def write_context(self, decoder: DecoderStruct, arguments: ContextStruct) -> bool:
        """False: a position lies beyond the rotary tables, and nothing was written."""
        fault: int = self._library.outrider_write_context(ctypes.byref(decoder), ctypes.byref(arguments))
        return fault == 0

    def finite_rows(self, x_NI: Tensor) -> tuple[bool, ...]:
        """Of each fp32 row, whether all of it is finite."""
        rows, size = x_NI.shape
        finite = (c_int32 * rows)()
        self._library.outrider_finite_rows(address(x_NI, torch.float32), rows, size, finite)
        return tuple(map(bool, finite))

    def walk(self, arguments: WalkStruct) -> None:
        """Draft through a block: fills ids, q and confidences."""
        _check(self._library.outrider_walk(ctypes.byref(arguments)))

    def verify(self, arguments: VerificationStruct) -> None:
        """Fills what each request accepts, and the token behind."""
        _check(self._library.outrider_verify(ctypes.byref(arguments)))


def _check(fault: int) -> None:
    assert fault == 0, {1: "a token id beyond the vocabulary", 2: "a position beyond the rotary tables"}[fault]


def build_kernels(architecture: Sequence[str], *, threads: int) -> Kernels | None:
    """Kernels for the given -march (and like) flags; all architectures give the same results."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.iterdir())}
    library = build_library(
        "decoder", sources, main="decoder.cpp", flags=(*_FLAGS, *architecture), libraries=("-lpthread", "-lm")
    )
    return None if library is None else Kernels(library, threads=threads)


@functools.cache
def load_kernels() -> Kernels | None:
    """This machine's kernels, with as many threads as torch has when they are first asked for."""
    kernels = build_kernels(("-march=native", "-mprefer-vector-width=512"), threads=torch.get_num_threads())
    if kernels is not None:
        logger.info("kernels for %s, %d threads", kernels.isa, kernels.threads)
    return kernels
