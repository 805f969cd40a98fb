"""Compiling a few C++ loops where a compiler is at hand.

Contract: ``compiled(source)`` is the loaded library, or None where there is no compiler, the build fails, or torch
brings no OpenMP to link with (``ops.native_build`` says which, and keeps what it builds). Every caller has a torch path
that means the same. Only training uses them: the loops are about speed on a CPU, never about results.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from outrider.logger import get_logger
from outrider.ops.native_build import build_library

logger = get_logger(__name__)

_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-fopenmp", "-std=c++17")

# Ahead of every source: what the loops include, and bfloat16 as 16 bits, rounded to nearest even.
_PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

typedef uint16_t bf16;
static inline float up(bf16 x) { uint32_t b = uint32_t(x) << 16; float f; std::memcpy(&f, &b, 4); return f; }
static inline bf16 down(float f) {
  uint32_t b; std::memcpy(&b, &f, 4);
  return bf16((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
"""


@functools.cache
def compiled(source: str) -> ctypes.CDLL | None:
    """Linked against torch's own OpenMP: a second thread pool would fight the first for the cores."""
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not openmp:
        logger.info("no OpenMP beside torch: using the torch loops, which are slower")
        return None
    libraries = (str(openmp[0]), "-lm", "-lmvec")
    return build_library(
        "training", {"loops.cpp": _PRELUDE + source}, main="loops.cpp", flags=_FLAGS, libraries=libraries
    )


def pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    """Addresses of contiguous tensors; the caller keeps them alive during the call."""
    for tensor in tensors:
        assert tensor.is_contiguous(), f"a compiled loop was given strides {tensor.stride()}"
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
