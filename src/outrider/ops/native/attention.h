// Paged attention for ragged rows, causal or over a bidirectional block, grouped query heads.
//
// A unit of work is some consecutive query rows of one request and one key/value head: all query heads that share it.
// Three sweeps over the positions it sees: scores (keys transposed tile by tile, so that a vector holds positions),
// softmax, and the mix of values. A row's sums run in ascending head dimension or position, whatever other rows do, so
// a row's result depends on what it sees alone: not on its neighbours in the pass, nor on how a prompt was cut.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace outrider {

constexpr int TILE = 32, TILE_VECS = TILE / LANES, ROW_BLOCK = 6;
constexpr int UNIT_ROWS = 32, UNIT_SCORES = 1 << 16;  // a unit has at most so many rows, and about so many scores

// Where keys and values of one request and head lie: pool slots below `context`, behind them the block's own rows.
template <class T>
struct Positions {
  const T* key;  // of slot 0, this head
  const T* value;
  size_t slot_stride;
  const int32_t* blocks;
  int block_size;
  int context;
  const float* own_key;  // of the block's first row, this head; unused where length == context
  const float* own_value;
  size_t own_stride;

  size_t slot(int position) const { return size_t(blocks[position / block_size]) * block_size + position % block_size; }
};

INLINE int padded(int x) { return (x + LANES - 1) / LANES * LANES; }

template <class T>
INLINE void load_row(const T* from, float* to, int dim) {
  int d = 0;
  for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
  for (; d < dim; ++d) to[d] = value(from[d]);
}

// Columns d..d+15 of 16 rows, transposed: to[c][r] = rows[r][d + c]; the stride in floats.
template <class T>
INLINE void transpose(const T* const* rows, int d, float* to, size_t to_stride) {
#if OUTRIDER_AVX512
  __m512 a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = (__m512)load(rows[r] + d);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4)
    for (int k = 0; k < 2; ++k) {
      a[r + 2 * k] = (__m512)_mm512_unpacklo_pd((__m512d)b[r + k], (__m512d)b[r + 2 + k]);
      a[r + 2 * k + 1] = (__m512)_mm512_unpackhi_pd((__m512d)b[r + k], (__m512d)b[r + 2 + k]);
    }
  // a[4 * q + c]: of rows 4q..4q+3 the columns c, c + 4, c + 8, c + 12, one in each quarter
  for (int c = 0; c < 4; ++c) {
    const __m512 low01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), high01 = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    const __m512 low23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    const __m512 high23 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_ps(to + c * to_stride, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(to + (c + 8) * to_stride, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(to + (c + 4) * to_stride, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(to + (c + 12) * to_stride, _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
#else
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) to[c * to_stride + r] = value(rows[r][d + c]);
#endif
}

// A thread's scratch for one unit.
struct Scratch {
  std::vector<float> rows;     // [TILE][width], copies of what cannot be read in place; zeros behind a head's dimension
  std::vector<float> key_t;    // [width][TILE]
  std::vector<float> query;    // [all][width], scaled
  std::vector<float> weights;  // [all][padded length], scores and then their exponentials
  std::vector<float> sums;     // [all][width]
  std::vector<float> mass;     // [all]
};

// Sixteen or fewer rows of zeros, for positions behind the last.
template <class T>
INLINE const T* zero_row() {
  alignas(64) static const T zeros[512] = {};
  return zeros;
}

// use(pointers to TILE rows, of T or float) with the keys or values of positions start..start+count-1; zeros behind.
template <bool KEYS, class T, class Use>
INLINE void with_tile(const Positions<T>& kv, int start, int count, int dim, Scratch& s, const Use& use) {
  const size_t width = padded(dim);
  if (start + count <= kv.context && dim % LANES == 0) {
    const T* rows[TILE];
    for (int j = 0; j < TILE; ++j)
      rows[j] = j < count ? (KEYS ? kv.key : kv.value) + kv.slot(start + j) * kv.slot_stride : zero_row<T>();
    return use(rows);
  }
  const float* rows[TILE];
  for (int j = 0; j < TILE; ++j) {
    rows[j] = j < count ? &s.rows[j * width] : zero_row<float>();
    if (j >= count) continue;
    const int position = start + j;
    float* to = &s.rows[j * width];
    if (position < kv.context) load_row((KEYS ? kv.key : kv.value) + kv.slot(position) * kv.slot_stride, to, dim);
    else load_row((KEYS ? kv.own_key : kv.own_value) + (position - kv.context) * kv.own_stride, to, dim);
  }
  use(rows);
}

// Scores of R rows with a tile's positions, each summed over the head's dimension in ascending order.
template <int R>
INLINE void score(const Scratch& s, int row, size_t width, float* scores, size_t stride) {
  f32v acc[R][TILE_VECS] = {};
  const float* q = &s.query[row * width];
  for (size_t d = 0; d < width; ++d) {
    f32v k[TILE_VECS];
    for (int v = 0; v < TILE_VECS; ++v) k[v] = load(&s.key_t[d * TILE + v * LANES]);
    for (int r = 0; r < R; ++r) {
      const f32v x = splat(q[r * width + d]);
      for (int v = 0; v < TILE_VECS; ++v) acc[r][v] = fma(k[v], x, acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < TILE_VECS; ++v) store(scores + r * stride + v * LANES, acc[r][v]);
}

// Scores to exponentials of what they are below the largest, over a row's own `count` positions; returns their sum.
INLINE float soften(float* w, int count) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int whole = count / LANES * LANES;
  f32v highest = splat(-INFINITY);
  if (whole < count)
    store(w + whole, lane < splat(int32_t(count - whole)) ? load(w + whole) : splat(-INFINITY));
  for (int j = 0; j < count; j += LANES) highest = max(highest, load(w + j));
  const f32v top = splat(largest(highest));
  f32v mass = {};
  for (int j = 0; j < whole; j += LANES) {
    const f32v p = exp(load(w + j) - top);
    store(w + j, p);
    mass = mass + p;
  }
  if (whole < count) {
    const f32v p = lane < splat(int32_t(count - whole)) ? exp(load(w + whole) - top) : f32v{};
    store(w + whole, p);
    mass = mass + p;
  }
  return sum(mass);
}

// sums += weights * values over `count` positions in ascending order, for R rows and C vectors of the head from d on.
template <int R, int C, class T>
INLINE void mix(const T* const* rows, const float* weights, size_t stride, int count, int d, float* sums, size_t width) {
  f32v acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * width + d + c * LANES);
  for (int j = 0; j < count; ++j) {
    f32v v[C];
    for (int c = 0; c < C; ++c) v[c] = load(rows[j] + d + c * LANES);
    for (int r = 0; r < R; ++r) {
      const f32v p = splat(weights[r * stride + j]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(p, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * width + d + c * LANES, acc[r][c]);
}

template <int R, class T>
INLINE void mix_rows(const T* const* rows, const float* weights, size_t stride, int count, float* sums, size_t width) {
  size_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES) mix<R, 4>(rows, weights, stride, count, d, sums, width);
  for (; d < width; d += LANES) mix<R, 1>(rows, weights, stride, count, d, sums, width);
}

// call(integral constant R) with R = rows <= ROW_BLOCK known to the compiler.
template <class Call>
INLINE void with_rows(int rows, const Call& call) {
  switch (rows) {
    case 1: return call(std::integral_constant<int, 1>());
    case 2: return call(std::integral_constant<int, 2>());
    case 3: return call(std::integral_constant<int, 3>());
    case 4: return call(std::integral_constant<int, 4>());
    case 5: return call(std::integral_constant<int, 5>());
    default: return call(std::integral_constant<int, 6>());
  }
}

// One unit: query rows [rows], each of `share` heads; row i sees first_seen + i positions, or in a block all of them.
template <class T>
void attend(const Positions<T>& kv, Scratch& s, const float* query, size_t query_stride, int rows, int share, int dim,
            int first_seen, bool causal, float scale, float* out, size_t out_stride) {
  const int all = rows * share;
  const size_t width = padded(dim);
  const auto seen = [&](int i) { return causal ? first_seen + i / share : first_seen; };
  const int length = seen(all - 1);
  const size_t stride = (length + TILE - 1) / TILE * TILE;
  s.rows.assign(TILE * width, 0.f);
  s.sums.assign(all * width, 0.f);
  s.key_t.resize(TILE * width);
  s.query.resize(all * width);
  s.weights.resize(all * stride);
  s.mass.resize(all);
  for (int i = 0; i < all; ++i) {
    const float* from = query + size_t(i / share) * query_stride + size_t(i % share) * dim;
    for (int d = 0; d < int(width); ++d) s.query[i * width + d] = d < dim ? from[d] * scale : 0.f;
  }
  // The first row that sees anything of the tile at `start`; those before it see nothing of later tiles either.
  const auto first_row = [&](int start) { return causal ? std::max(0, start + 1 - first_seen) * share : 0; };
  for (int start = 0; start < length; start += TILE) {
    with_tile<true>(kv, start, std::min(TILE, length - start), dim, s, [&](const auto* const* keys) {
      for (int j = 0; j < TILE; j += LANES)
        for (size_t d = 0; d < width; d += LANES) transpose(keys + j, d, &s.key_t[d * TILE + j], TILE);
    });
    for (int row = first_row(start); row < all; row += ROW_BLOCK)
      with_rows(std::min(ROW_BLOCK, all - row), [&](auto R) {
        score<R.value>(s, row, width, &s.weights[row * stride + start], stride);
      });
  }
  for (int i = 0; i < all; ++i) s.mass[i] = soften(&s.weights[i * stride], seen(i));
  for (int start = 0; start < length; start += TILE) {
    const int count = std::min(TILE, length - start);
    with_tile<false>(kv, start, count, dim, s, [&](const auto* const* values) {
      int row = first_row(start);
      for (; row < all && seen(row) < start + count; ++row)
        mix_rows<1>(values, &s.weights[row * stride + start], stride, seen(row) - start, &s.sums[row * width], width);
      for (; row < all; row += ROW_BLOCK)
        with_rows(std::min(ROW_BLOCK, all - row), [&](auto R) {
          mix_rows<R.value>(values, &s.weights[row * stride + start], stride, count, &s.sums[row * width], width);
        });
    });
  }
  for (int i = 0; i < all; ++i) {
    float* to = out + size_t(i / share) * out_stride + size_t(i % share) * dim;
    const float inverse = 1.f / s.mass[i];
    for (int d = 0; d < dim; ++d) to[d] = s.sums[i * width + d] * inverse;
  }
}

}  // namespace outrider
