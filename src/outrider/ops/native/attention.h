// Paged attention for ragged rows, causal or over a bidirectional block, grouped query heads.
//
// A unit of work is some consecutive query rows of one request and one key/value head: all query heads that share it.
// Keys and values come tile by tile into scratch (keys transposed), and the softmax runs along the tiles. Tiles start at
// multiples of TILE positions and a row's sums run in ascending position, so a row's result depends on what it sees
// alone: not on its neighbours in the pass, nor on how a prompt was cut into chunks.
#pragma once

#include <algorithm>

#include "pool.h"
#include "vec.h"

namespace outrider {

constexpr int TILE = 32, TILE_VECS = TILE / LANES, ROW_BLOCK = 4;

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
};

INLINE int padded(int x) { return (x + LANES - 1) / LANES * LANES; }

template <class T>
INLINE void load_row(const T* from, float* to, int dim) {
  int d = 0;
  for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
  for (; d < dim; ++d) to[d] = value(from[d]);
}

// 16 rows of 16 floats, transposed: to[c][r] = from[r][c]; both strides in floats.
INLINE void transpose(const float* from, size_t from_stride, float* to, size_t to_stride) {
#if OUTRIDER_AVX512
  __m512 a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_ps(from + r * from_stride);
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
    for (int c = 0; c < 16; ++c) to[c * to_stride + r] = from[r * from_stride + c];
#endif
}

// A thread's scratch for one unit.
struct Scratch {
  std::vector<float> key, key_t, value, query, sums, weights, top, mass;

  void resize(int rows, int dim) {
    const size_t width = padded(dim);
    key.assign(TILE * width, 0.f);
    key_t.resize(TILE * width);
    value.assign(TILE * width, 0.f);
    query.resize(rows * width);
    sums.assign(rows * width, 0.f);
    weights.resize(size_t(rows) * TILE);
    top.assign(rows, -INFINITY);
    mass.assign(size_t(rows) * LANES, 0.f);
  }
};

// Positions start..start+count-1 into scratch; rows behind are zero.
template <class T>
INLINE void load_tile(const Positions<T>& kv, int start, int count, int dim, Scratch& s) {
  const size_t width = padded(dim);
  for (int j = 0; j < count; ++j) {
    const int position = start + j;
    float *key = &s.key[j * width], *value = &s.value[j * width];
    if (position < kv.context) {
      const size_t slot = size_t(kv.blocks[position / kv.block_size]) * kv.block_size + position % kv.block_size;
      load_row(kv.key + slot * kv.slot_stride, key, dim);
      load_row(kv.value + slot * kv.slot_stride, value, dim);
    } else {
      load_row(kv.own_key + (position - kv.context) * kv.own_stride, key, dim);
      load_row(kv.own_value + (position - kv.context) * kv.own_stride, value, dim);
    }
  }
  std::fill(s.key.begin() + count * width, s.key.end(), 0.f);
  for (int j = 0; j < padded(count); j += LANES)
    for (size_t d = 0; d < width; d += LANES) transpose(&s.key[j * width + d], width, &s.key_t[d * TILE + j], TILE);
}

// Scores of R rows with the tile's positions into s.weights. Sums run over even and odd d apart.
template <int R>
INLINE void score(Scratch& s, int row, int vecs, int dim) {
  const size_t width = padded(dim);
  for (int v = 0; v < vecs; ++v) {
    f32v acc[R][2] = {};
    for (size_t d = 0; d < width; d += 2) {
      const f32v even = load(&s.key_t[d * TILE + v * LANES]), odd = load(&s.key_t[(d + 1) * TILE + v * LANES]);
      for (int r = 0; r < R; ++r) {
        const float* q = &s.query[(row + r) * width + d];
        acc[r][0] = fma(even, splat(q[0]), acc[r][0]);
        acc[r][1] = fma(odd, splat(q[1]), acc[r][1]);
      }
    }
    for (int r = 0; r < R; ++r) store(&s.weights[size_t(row + r) * TILE + v * LANES], acc[r][0] + acc[r][1]);
  }
}

// Scores to weights exp(score - top), with what came before scaled to the new top. Sees `count` of the tile's positions.
INLINE void soften(Scratch& s, int row, int count, int dim) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float* w = &s.weights[size_t(row) * TILE];
  const int vecs = (count + LANES - 1) / LANES;
  f32v highest = splat(-INFINITY);
  for (int v = 0; v < vecs; ++v) {
    const f32v seen = lane + splat(int32_t(v * LANES)) < splat(int32_t(count)) ? load(w + v * LANES) : splat(-INFINITY);
    store(w + v * LANES, seen);
    highest = max(highest, seen);
  }
  const float top = std::max(s.top[row], largest(highest));
  const f32v keep = s.top[row] == top ? splat(1.f) : s.top[row] == -INFINITY ? f32v{} : exp(splat(s.top[row] - top));
  s.top[row] = top;
  f32v mass = load(&s.mass[size_t(row) * LANES]) * keep;
  for (int v = 0; v < vecs; ++v) {
    const f32v x = load(w + v * LANES);
    const f32v p = x == splat(-INFINITY) ? f32v{} : exp(x - splat(top));
    store(w + v * LANES, p);
    mass = mass + p;
  }
  store(&s.mass[size_t(row) * LANES], mass);
  float* sums = &s.sums[size_t(row) * padded(dim)];
  for (int d = 0; d < padded(dim); d += LANES) store(sums + d, load(sums + d) * keep);
}

// sums += weights * values over the tile's first `count` positions, for R rows and C vectors of the head from d on.
template <int R, int C>
INLINE void mix(Scratch& s, int row, int count, int d, size_t width) {
  f32v acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(&s.sums[(row + r) * width + d + c * LANES]);
  for (int j = 0; j < count; ++j)
    for (int r = 0; r < R; ++r) {
      const f32v p = splat(s.weights[size_t(row + r) * TILE + j]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(p, load(&s.value[j * width + d + c * LANES]), acc[r][c]);
    }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(&s.sums[(row + r) * width + d + c * LANES], acc[r][c]);
}

template <int R>
INLINE void mix_rows(Scratch& s, int row, int count, int dim) {
  const int width = padded(dim);
  int d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES) mix<R, 4>(s, row, count, d, width);
  for (; d < width; d += LANES) mix<R, 1>(s, row, count, d, width);
}

// One unit: query rows [rows], each of `share` heads; row i sees first_seen + i positions, or all of them in a block.
template <class T>
void attend(const Positions<T>& kv, Scratch& s, const float* query, size_t query_stride, int rows, int share, int dim,
            int first_seen, bool causal, float scale, float* out, size_t out_stride) {
  const int all = rows * share, width = padded(dim);
  s.resize(all, dim);
  for (int i = 0; i < all; ++i) {
    const float* from = query + size_t(i / share) * query_stride + size_t(i % share) * dim;
    for (int d = 0; d < width; ++d) s.query[size_t(i) * width + d] = d < dim ? from[d] * scale : 0.f;
  }
  const auto seen = [&](int i) { return causal ? first_seen + i / share : first_seen; };
  const int length = seen(all - 1);
  for (int start = 0; start < length; start += TILE) {
    const int count = std::min(TILE, length - start);
    load_tile(kv, start, count, dim, s);
    int first = 0;  // the first row that sees anything of this tile
    while (seen(first) <= start) ++first;
    const int vecs = (count + LANES - 1) / LANES;
    int row = first;
    for (; row + ROW_BLOCK <= all; row += ROW_BLOCK) score<ROW_BLOCK>(s, row, vecs, dim);
    for (; row < all; ++row) score<1>(s, row, vecs, dim);
    for (row = first; row < all; ++row) soften(s, row, std::min(TILE, seen(row) - start), dim);
    row = first;
    for (; row < all && seen(row) < start + count; ++row) mix_rows<1>(s, row, seen(row) - start, dim);
    for (; row + ROW_BLOCK <= all; row += ROW_BLOCK) mix_rows<ROW_BLOCK>(s, row, count, dim);
    for (; row < all; ++row) mix_rows<1>(s, row, count, dim);
  }
  for (int i = 0; i < all; ++i) {
    float* to = out + size_t(i / share) * out_stride + size_t(i % share) * dim;
    const float inverse = 1.f / sum(load(&s.mass[size_t(i) * LANES]));
    for (int d = 0; d < dim; ++d) to[d] = s.sums[size_t(i) * width + d] * inverse;
  }
}

}  // namespace outrider
