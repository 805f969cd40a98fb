"""Two inner loops of data generation, in C++ where a compiler is at hand and in torch everywhere.

Contract: ``decode_attention`` and ``sample_rows`` mean the same with and without the compiled library; the compiled
one only exists on the CPU (of attention only for bf16) and is about ten times faster there: torch's fused attention is
built for long queries, and a step of generation asks for one query row per sequence. Without a compiler, or if the
build fails, the torch path is used and said so in the log.

Shape legend: B sequences, L longest context, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.loops import compiled, pointers

_SOURCE = r"""
// query [B, H, D], key and value [B, longest, K, D], lens [B], out [B, H, D]; DIM fixes D at compile time, 0 does not
template <int DIM>
static void attend(const bf16* query, const bf16* key, const bf16* value, const int32_t* lens, bf16* out,
                   int B, int H, int K, int dim, long longest, float scale) {
  const int G = H / K, D = DIM ? DIM : dim;
  #pragma omp parallel for schedule(dynamic, 8)
  for (int unit = 0; unit < B * K; ++unit) {
    const int b = unit / K, k = unit % K, n = lens[b];
    static thread_local std::vector<float> kept;
    kept.resize(2 * D + n);
    float *qp = kept.data(), *ap = qp + D, *score = ap + D;
    const size_t stride = size_t(K) * D;
    const bf16* kb = key + (size_t(b) * longest * K + k) * D;
    const bf16* vb = value + (size_t(b) * longest * K + k) * D;
    for (int g = 0; g < G; ++g) {
      const size_t head = (size_t(b) * H + k * G + g) * D;
      for (int d = 0; d < D; ++d) qp[d] = scale * up(query[head + d]), ap[d] = 0.f;
      float top = -INFINITY, total = 0.f;
      for (int l = 0; l < n; ++l) {
        const bf16* row = kb + l * stride;
        float sum = 0.f;
        for (int d = 0; d < D; ++d) sum += qp[d] * up(row[d]);
        score[l] = sum;
        top = std::max(top, sum);
      }
      for (int l = 0; l < n; ++l) { score[l] = expf(score[l] - top); total += score[l]; }
      for (int l = 0; l < n; ++l) {
        const bf16* row = vb + l * stride;
        const float p = score[l];
        for (int d = 0; d < D; ++d) ap[d] += p * up(row[d]);
      }
      const float inverse = 1.f / total;
      for (int d = 0; d < D; ++d) out[head + d] = down(ap[d] * inverse);
    }
  }
}

extern "C" void decode_attention(const bf16* query, const bf16* key, const bf16* value, const int32_t* lens, bf16* out,
                                 int B, int H, int K, int D, long longest, float scale) {
  (D == 64 ? attend<64> : D == 128 ? attend<128> : attend<0>)(query, key, value, lens, out, B, H, K, D, longest, scale);
}

static inline float up(float x) { return x; }

// logits [B, V]; one temperature, top-p and uniform number a row -> logsumexp at temperature 1, sampled id
template <typename T>
static void sample(const T* logits, const float* temperature, const float* top_p, const double* uniform, float* lse,
                   int64_t* token, int B, int V) {
  #pragma omp parallel for schedule(dynamic, 1)
  for (int b = 0; b < B; ++b) {
    const T* row = logits + size_t(b) * V;
    static thread_local std::vector<float> kept;  // between rows: fresh pages cost more than the arithmetic
    kept.resize(2 * size_t(V));
    float *x = kept.data(), *w = x + V;
    for (int v = 0; v < V; ++v) x[v] = up(row[v]);
    float top = x[0];
    for (int v = 1; v < V; ++v) top = std::max(top, x[v]);
    float total = 0.f;
    for (int v = 0; v < V; ++v) { w[v] = expf(x[v] - top); total += w[v]; }
    lse[b] = top + logf(total);
    if (temperature[b] == 0.f) {
      token[b] = std::find(x, x + V, top) - x;
      continue;
    }
    const float inverse = 1.f / temperature[b];
    if (inverse != 1.f) for (int v = 0; v < V; ++v) w[v] = expf((x[v] - top) * inverse);
    const int chunk = 512;
    std::vector<double> sums;
    double mass = 0.0;
    for (int c = 0; c < V; c += chunk) {
      float part = 0.f;
      for (int v = c; v < std::min(V, c + chunk); ++v) part += w[v];
      sums.push_back(part); mass += part;
    }
    int64_t pick = -1;
    if (top_p[b] < 1.f) {
      std::vector<std::pair<float, int>> order;
      const float floor = float((1.0 - top_p[b]) * mass / V);  // all below it together are less than what is cut off
      for (int v = 0; v < V; ++v) if (w[v] > floor) order.emplace_back(-w[v], v);
      std::sort(order.begin(), order.end());
      double kept = 0.0; size_t count = 0;
      while (count < order.size() && kept < top_p[b] * mass) kept += -order[count++].first;
      double left = uniform[b] * kept;
      for (size_t i = 0; i < count; ++i) { pick = order[i].second; left += order[i].first; if (left < 0) break; }
    } else {
      double left = uniform[b] * mass;
      size_t c = 0;
      while (c + 1 < sums.size() && left >= sums[c]) left -= sums[c++];
      for (int v = int(c) * chunk; v < std::min(V, int(c + 1) * chunk); ++v) {
        if (w[v] > 0.f) pick = v;
        left -= w[v];
        if (left < 0) break;
      }
      if (pick < 0) pick = std::find(x, x + V, top) - x;  // rounding at the very end of the range
    }
    token[b] = pick;
  }
}

extern "C" void sample_rows_bf16(const bf16* logits, const float* temperature, const float* top_p,
                                 const double* uniform, float* lse, int64_t* token, int B, int V) {
  sample(logits, temperature, top_p, uniform, lse, token, B, V);
}

extern "C" void sample_rows_fp32(const float* logits, const float* temperature, const float* top_p,
                                 const double* uniform, float* lse, int64_t* token, int B, int V) {
  sample(logits, temperature, top_p, uniform, lse, token, B, V);
}
"""


def _library() -> ctypes.CDLL | None:
    return compiled(_SOURCE)


def decode_attention(
    query_BHD: Tensor, key_BLKD: Tensor, value_BLKD: Tensor, lens_B: Tensor, *, scale: float
) -> Tensor:
    """One query row per sequence over its first ``lens_B`` positions (each at least 1); lens int32. [B, H, D]."""
    B, H, D = query_BHD.shape
    L, K = key_BLKD.shape[1], key_BLKD.shape[2]
    library = _library() if query_BHD.dtype == torch.bfloat16 and query_BHD.device.type == "cpu" else None
    if library is not None:
        query_BHD = query_BHD.contiguous()
        assert lens_B.dtype == torch.int32
        out_BHD = torch.empty_like(query_BHD)
        tensors = pointers(query_BHD, key_BLKD, value_BLKD, lens_B, out_BHD)
        library.decode_attention(*tensors, B, H, K, D, ctypes.c_long(L), ctypes.c_float(scale))
        return out_BHD
    longest = int(lens_B.max()) if B else 0
    seen_B11L = (torch.arange(longest, device=lens_B.device) < lens_B[:, None])[:, None, None, :]
    out_BKGD = F.scaled_dot_product_attention(
        query_BHD.view(B, K, H // K, D),
        key_BLKD[:, :longest].transpose(1, 2),
        value_BLKD[:, :longest].transpose(1, 2),
        attn_mask=seen_B11L,
        scale=scale,
    )
    return out_BKGD.reshape(B, H, D)


def sample_rows(
    logits_BV: Tensor, *, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp at temperature 1 (fp32 [B]) and one sampled id a row (int64 [B]); temperature 0 is the argmax.

    temperature and top_p fp32 [B], uniform fp64 [B] in [0, 1): the draw is the inverse of the cumulative distribution.
    """
    B, V = logits_BV.shape
    library = _library() if logits_BV.device.type == "cpu" else None
    if library is not None:
        run = {torch.bfloat16: library.sample_rows_bf16, torch.float32: library.sample_rows_fp32}[logits_BV.dtype]
        logits_BV = logits_BV.contiguous()
        lse_B, token_B = torch.empty(B), torch.empty(B, dtype=torch.int64)
        run(*pointers(logits_BV, temperature_B, top_p_B, uniform_B, lse_B, token_B), B, V)
        return lse_B, token_B
    return _sample_rows_torch(logits_BV, temperature_B=temperature_B, top_p_B=top_p_B, uniform_B=uniform_B)


def _sample_rows_torch(
    logits_BV: Tensor, *, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    V = logits_BV.shape[1]
    logits_BV = logits_BV.float()
    lse_B = torch.logsumexp(logits_BV, -1)
    greedy_B = logits_BV.argmax(-1)
    probs_BV = torch.softmax(logits_BV / temperature_B.clamp(min=1e-6)[:, None], -1).double()
    sorted_BV, order_BV = probs_BV.sort(-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = torch.where(before_BV < top_p_B[:, None], sorted_BV, 0.0).cumsum(-1)
    drawn_B = torch.searchsorted(kept_BV, (uniform_B * kept_BV[:, -1])[:, None], right=True)[:, 0].clamp(max=V - 1)
    sampled_B = order_BV.gather(1, drawn_B[:, None])[:, 0]
    return lse_B, torch.where(temperature_B == 0, greedy_B, sampled_B)
