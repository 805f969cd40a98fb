"""What surrounds the matrix products of a layer, as one loop each with its own gradient, for training on a CPU.

With matrix units the products of a training step take less time than norms, rotations and activations made of torch's
operators, each of which reads and writes all rows. Contract: ``fused()`` says whether these functions are to be used:
gradients are wanted, matmuls run in bfloat16 by autocast, and a compiler was at hand. They give what the torch layers
give up to the rounding of bfloat16 (they round once, at the end), and nothing else in the package calls them: decoding
wants no gradients.

Shape legend: N rows, D normalised features, H/K query and key/value heads, E head dimension, I intermediate size.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from outrider.ops.loops import compiled, pointers

_SOURCE = r"""
#include <omp.h>

static inline float up(float x) { return x; }
static inline void put(float* to, float x) { *to = x; }
static inline void put(bf16* to, float x) { *to = down(x); }

// Sums over rows are kept by thread and added in the order of threads: the same bits for the same number of threads.
struct Partial {
  int size; std::vector<float> sums;
  Partial(int size) : size(size), sums(size_t(size) * omp_get_max_threads(), 0.f) {}
  float* mine() { return sums.data() + size_t(size) * omp_get_thread_num(); }
  void add_to(float* out) {
    for (size_t at = 0; at < sums.size(); at += size) for (int i = 0; i < size; ++i) out[i] += sums[at + i];
  }
};

template <typename X>
static void norm(const X* x, const float* w, bf16* y, float* scale, int N, int D, float eps) {
  #pragma omp parallel for schedule(static)
  for (int n = 0; n < N; ++n) {
    const X* row = x + size_t(n) * D;
    bf16* out = y + size_t(n) * D;
    float sum = 0.f;
    for (int d = 0; d < D; ++d) { const float v = up(row[d]); sum += v * v; }
    const float s = scale[n] = 1.f / std::sqrt(sum / D + eps);
    for (int d = 0; d < D; ++d) out[d] = down(up(row[d]) * s * w[d]);
  }
}

template <typename X>
static void norm_backward(const bf16* gy, const X* x, const float* w, const float* scale, X* gx, float* gw,
                          int N, int D) {
  Partial partial(D);
  #pragma omp parallel
  {
    float* mine = partial.mine();
    #pragma omp for schedule(static)
    for (int n = 0; n < N; ++n) {
      const size_t at = size_t(n) * D;
      const float s = scale[n];
      float dot = 0.f;
      for (int d = 0; d < D; ++d) dot += up(gy[at + d]) * w[d] * up(x[at + d]);
      const float pull = dot * s * s * s / D;
      for (int d = 0; d < D; ++d) {
        const float g = up(gy[at + d]), v = up(x[at + d]);
        mine[d] += g * v * s;
        put(gx + at + d, g * w[d] * s - v * pull);
      }
    }
  }
  partial.add_to(gw);
}

extern "C" void norm_fp32(const float* x, const float* w, bf16* y, float* scale, int N, int D, float eps) {
  norm(x, w, y, scale, N, D, eps);
}
extern "C" void norm_bf16(const bf16* x, const float* w, bf16* y, float* scale, int N, int D, float eps) {
  norm(x, w, y, scale, N, D, eps);
}
extern "C" void norm_backward_fp32(const bf16* gy, const float* x, const float* w, const float* scale, float* gx,
                                   float* gw, int N, int D) {
  norm_backward(gy, x, w, scale, gx, gw, N, D);
}
extern "C" void norm_backward_bf16(const bf16* gy, const bf16* x, const float* w, const float* scale, bf16* gx,
                                   float* gw, int N, int D) {
  norm_backward(gy, x, w, scale, gx, gw, N, D);
}

// qkv [N, H + 2K, E] -> q [N, H, E] and k [N, K, E], normed by head and rotated, and v [N, K, E]
extern "C" void heads(const bf16* qkv, const float* qw, const float* kw, const float* cosine, const float* sine,
                      bf16* q, bf16* k, bf16* v, float* scale, int N, int H, int K, int E, float eps) {
  const int half = E / 2;
  #pragma omp parallel for schedule(static)
  for (int n = 0; n < N; ++n) {
    const bf16* row = qkv + size_t(n) * (H + 2 * K) * E;
    const float *c = cosine + size_t(n) * half, *s = sine + size_t(n) * half;
    for (int h = 0; h < H + K; ++h) {
      const bf16* x = row + h * E;
      const float* w = h < H ? qw : kw;
      bf16* out = h < H ? q + (size_t(n) * H + h) * E : k + (size_t(n) * K + h - H) * E;
      float sum = 0.f;
      for (int e = 0; e < E; ++e) sum += up(x[e]) * up(x[e]);
      const float r = scale[size_t(n) * (H + K) + h] = 1.f / std::sqrt(sum / E + eps);
      for (int e = 0; e < half; ++e) {
        const float a = up(x[e]) * r * w[e], b = up(x[half + e]) * r * w[half + e];
        out[e] = down(a * c[e] - b * s[e]);
        out[half + e] = down(b * c[e] + a * s[e]);
      }
    }
    std::memcpy(v + size_t(n) * K * E, row + (H + K) * E, sizeof(bf16) * K * E);
  }
}

extern "C" void heads_backward(const bf16* gq, const bf16* gk, const bf16* gv, const bf16* qkv, const float* qw,
                               const float* kw, const float* cosine, const float* sine, const float* scale,
                               bf16* gqkv, float* gqw, float* gkw, int N, int H, int K, int E) {
  const int half = E / 2;
  Partial partial(2 * E);
  #pragma omp parallel
  {
    float* mine = partial.mine();
    std::vector<float> kept(E);
    float* g = kept.data();
    #pragma omp for schedule(static)
    for (int n = 0; n < N; ++n) {
      const size_t at = size_t(n) * (H + 2 * K) * E;
      const float *c = cosine + size_t(n) * half, *s = sine + size_t(n) * half;
      for (int h = 0; h < H + K; ++h) {
        const bf16* x = qkv + at + h * E;
        const bf16* gy = h < H ? gq + (size_t(n) * H + h) * E : gk + (size_t(n) * K + h - H) * E;
        const float* w = h < H ? qw : kw;
        float* gw = mine + (h < H ? 0 : E);
        bf16* gx = gqkv + at + h * E;
        const float r = scale[size_t(n) * (H + K) + h];
        for (int e = 0; e < half; ++e) {
          const float a = up(gy[e]), b = up(gy[half + e]);
          g[e] = a * c[e] + b * s[e];
          g[half + e] = b * c[e] - a * s[e];
        }
        float dot = 0.f;
        for (int e = 0; e < E; ++e) dot += g[e] * w[e] * up(x[e]);
        const float pull = dot * r * r * r / E;
        for (int e = 0; e < E; ++e) {
          gw[e] += g[e] * up(x[e]) * r;
          gx[e] = down(g[e] * w[e] * r - up(x[e]) * pull);
        }
      }
      std::memcpy(gqkv + at + (H + K) * E, gv + size_t(n) * K * E, sizeof(bf16) * K * E);
    }
  }
  std::vector<float> sums(2 * E, 0.f);
  partial.add_to(sums.data());
  for (int e = 0; e < E; ++e) { gqw[e] = sums[e]; gkw[e] = sums[E + e]; }
}

// both [N, 2I], gate before up -> out [N, I]
extern "C" void swiglu(const bf16* both, bf16* out, int N, int I) {
  #pragma omp parallel for schedule(static)
  for (int n = 0; n < N; ++n) {
    const bf16 *gate = both + size_t(n) * 2 * I, *rise = gate + I;
    bf16* to = out + size_t(n) * I;
    for (int i = 0; i < I; ++i) {
      const float g = up(gate[i]);
      to[i] = down(g / (1.f + expf(-g)) * up(rise[i]));
    }
  }
}

extern "C" void swiglu_backward(const bf16* gout, const bf16* both, bf16* gboth, int N, int I) {
  #pragma omp parallel for schedule(static)
  for (int n = 0; n < N; ++n) {
    const bf16 *gate = both + size_t(n) * 2 * I, *rise = gate + I, *from = gout + size_t(n) * I;
    bf16 *to_gate = gboth + size_t(n) * 2 * I, *to_rise = to_gate + I;
    for (int i = 0; i < I; ++i) {
      const float g = up(gate[i]), d = up(from[i]), s = 1.f / (1.f + expf(-g));
      to_gate[i] = down(d * up(rise[i]) * s * (1.f + g * (1.f - s)));
      to_rise[i] = down(d * g * s);
    }
  }
}
"""


def fused() -> bool:
    """Whether a layer should use these functions now."""
    wanted = torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    return wanted and torch.get_autocast_dtype("cpu") == torch.bfloat16 and compiled(_SOURCE) is not None


def _library() -> ctypes.CDLL:
    library = compiled(_SOURCE)
    assert library is not None, "called without asking fused()"
    return library


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_ND = x_ND.contiguous()
        if x_ND.dtype != torch.float32:
            x_ND = _bf16(x_ND)
        size = x_ND.shape[-1]
        rows = x_ND.numel() // size
        out_ND, scale_N, weight_D = torch.empty_like(x_ND, dtype=torch.bfloat16), torch.empty(rows), weight_D.float()
        run = _library().norm_fp32 if x_ND.dtype == torch.float32 else _library().norm_bf16
        run(*pointers(x_ND, weight_D, out_ND, scale_N), rows, size, ctypes.c_float(eps))
        ctx.save_for_backward(x_ND, weight_D, scale_N)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, scale_N = ctx.saved_tensors
        gradient_ND, weight_gradient_D = torch.empty_like(x_ND), torch.zeros_like(weight_D)
        run = _library().norm_backward_fp32 if x_ND.dtype == torch.float32 else _library().norm_backward_bf16
        tensors = (_bf16(outer[0]), x_ND, weight_D, scale_N, gradient_ND, weight_gradient_D)
        run(*pointers(*tensors), len(scale_N), x_ND.shape[-1])
        return gradient_ND, weight_gradient_D, None


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in fp32, rounded to bfloat16."""
    out_ND: Tensor = _Norm.apply(x_ND, weight_D, eps)  # type: ignore[no-untyped-call]
    return out_ND


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_NHE: Tensor,
        query_weight_E: Tensor,
        key_weight_E: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_heads: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_NHE = _bf16(qkv_NHE)
        rows, total, size = qkv_NHE.shape
        heads = total - 2 * kv_heads
        query = qkv_NHE.new_empty(rows, heads, size)
        key, value = qkv_NHE.new_empty(2, rows, kv_heads, size)
        scale = torch.empty(rows, heads + kv_heads)
        weights = (query_weight_E.float(), key_weight_E.float())
        cos, sin = cos.contiguous(), sin.contiguous()
        tensors = pointers(qkv_NHE, *weights, cos, sin, query, key, value, scale)
        _library().heads(*tensors, rows, heads, kv_heads, size, ctypes.c_float(eps))
        ctx.save_for_backward(qkv_NHE, *weights, cos, sin, scale)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        qkv_NHE, query_weight_E, key_weight_E, cos, sin, scale = ctx.saved_tensors
        given = [_bf16(gradient) for gradient in outer]
        rows, total, size = qkv_NHE.shape
        kv_heads = given[2].shape[1]
        gradient, query_weights, key_weights = torch.empty_like(qkv_NHE), torch.empty(size), torch.empty(size)
        saved = (qkv_NHE, query_weight_E, key_weight_E, cos, sin, scale)
        tensors = pointers(*given, *saved, gradient, query_weights, key_weights)
        _library().heads_backward(*tensors, rows, total - 2 * kv_heads, kv_heads, size)
        return gradient, query_weights, key_weights, None, None, None, None


def normed_rotated_heads(
    qkv_NHE: Tensor,
    query_weight_E: Tensor,
    key_weight_E: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key heads normed and rotated (half-split), value heads as they are; bfloat16.

    qkv_NHE holds query, key and value heads in this order, perhaps no query heads; ``cos`` and ``sin`` are fp32
    [N, E / 2].
    """
    query, key, value = _Heads.apply(  # type: ignore[no-untyped-call]
        qkv_NHE, query_weight_E, key_weight_E, cos, sin, num_kv_heads, eps
    )
    return query, key, value


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_NX: Tensor) -> Tensor:
        both_NX = _bf16(both_NX)
        rows, size = both_NX.shape[0], both_NX.shape[1] // 2
        out_NI = both_NX.new_empty(rows, size)
        _library().swiglu(*pointers(both_NX, out_NI), rows, size)
        ctx.save_for_backward(both_NX)
        return out_NI

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        (both_NX,) = ctx.saved_tensors
        gradient_NX = torch.empty_like(both_NX)
        _library().swiglu_backward(*pointers(_bf16(outer[0]), both_NX, gradient_NX), *outer[0].shape)
        return gradient_NX


def swiglu(gate_up_NX: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2 I], gate first: bfloat16 [N, I]."""
    out_NI: Tensor = _Swiglu.apply(gate_up_NX)  # type: ignore[no-untyped-call]
    return out_NI
