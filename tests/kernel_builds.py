"""Kernels for other instruction sets than this machine's."""

from __future__ import annotations

import pytest

from outrider.ops.native_kernels import Kernels, build_kernels

WHOLE_VECTORS = ("-march=native", "-mprefer-vector-width=512")
VECTORS = (*WHOLE_VECTORS, "-mno-amx-bf16")  # without the matrix unit in attention, which adds in another order
EMULATED = (*WHOLE_VECTORS, "-DOUTRIDER_EMULATE_TILES")  # the matrix unit's order, where there are bfloat16 products


def built(architecture: tuple[str, ...], *, threads: int = 1) -> Kernels:
    kernels = build_kernels(architecture, threads=threads)
    if kernels is None:
        pytest.skip("this compiler builds for another family of processors")
    return kernels
