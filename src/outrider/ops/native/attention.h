// Paged attention for ragged rows, causal or over a bidirectional block, grouped query heads.
//
// A unit of work is some consecutive query rows of one request, one key/value head with all query heads that share it,
// and a range of chunks of CHUNK positions. Per chunk three sweeps: scores (keys transposed tile by tile, so that a
// vector holds positions), softmax, and the mix of values; chunks are merged in ascending order, on whichever thread. A
// row's sums run in ascending head dimension or position and its chunks begin at fixed positions, whatever other rows
// do: its result depends on what it sees alone, not on its neighbours in the pass, nor on how a prompt or the work was
// cut.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace outrider {

constexpr int TILE = 32, TILE_VECS = TILE / LANES, ROW_BLOCK = 6;
constexpr int CHUNK = 64, UNIT_ROWS = 32;  // positions of a chunk; rows of a unit at most

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

  // at[i]: where position start + i lies in the pool, in elements, as far as the context goes.
  void locate(int start, int count, size_t* at) const {
    int block = start / block_size, offset = start % block_size;
    for (int i = 0; i < std::min(count, context - start); ++i) {
      at[i] = (size_t(blocks[block]) * block_size + offset) * slot_stride;
      if (++offset == block_size) offset = 0, ++block;
    }
  }
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

// What some positions contribute to one query: values weighted by exp(score - top), and those weights' sum.
struct Partial {
  float* values;  // [width]
  float *mass, *top;
};

// A thread's scratch for one unit.
struct Scratch {
  std::vector<float> rows;     // [TILE][width], copies of what cannot be read in place; zeros behind a head's dimension
  std::vector<float> key_t;    // [width][TILE]
  std::vector<float> query;    // [all][width], scaled
  std::vector<float> weights;  // [all][CHUNK], scores and then their exponentials
  std::vector<float> chunk;    // partials of all queries over one chunk
  std::vector<float> merged;   // and over the chunks so far
};

INLINE size_t partial_floats(size_t width) { return width + 2; }
INLINE Partial partial(float* all, int index, size_t width) {
  float* p = all + index * partial_floats(width);
  return {p, p + width, p + width + 1};
}

// `into` becomes what both contribute; `from` stands for later positions.
INLINE void merge(const Partial& into, const Partial& from, size_t width) {
  const float top = *into.top > *from.top ? *into.top : *from.top;
  const f32v a = exp(splat(*into.top - top)), b = exp(splat(*from.top - top));
  *into.mass = *into.mass * a[0] + *from.mass * b[0];
  *into.top = top;
  for (size_t d = 0; d < width; d += LANES)
    store(into.values + d, fma(load(from.values + d), b, load(into.values + d) * a));
}

// Sixteen or fewer rows of zeros, for positions behind the last.
template <class T>
INLINE const T* zero_row() {
  alignas(64) static const T zeros[512] = {};
  return zeros;
}

// use(pointers to TILE rows, of T or float) with the keys or values of positions start..start+count-1; zeros behind.
template <bool KEYS, class T, class Use>
INLINE void with_tile(const Positions<T>& kv, const size_t* at, int start, int count, int dim, Scratch& s,
                      const Use& use) {
  const size_t width = padded(dim);
  if (start + count <= kv.context && dim % LANES == 0) {
    const T* rows[TILE];
    for (int j = 0; j < TILE; ++j)
      rows[j] = j < count ? (KEYS ? kv.key : kv.value) + at[j] : zero_row<T>();
    return use(rows);
  }
  const float* rows[TILE];
  for (int j = 0; j < TILE; ++j) {
    rows[j] = j < count ? &s.rows[j * width] : zero_row<float>();
    if (j >= count) continue;
    const int position = start + j;
    float* to = &s.rows[j * width];
    if (position < kv.context) load_row((KEYS ? kv.key : kv.value) + at[j], to, dim);
    else load_row((KEYS ? kv.own_key : kv.own_value) + (position - kv.context) * kv.own_stride, to, dim);
  }
  use(rows);
}

// Asks the memory for what lies `at` so many places.
template <class T>
INLINE void prefetch(const T* rows, const size_t* at, int count, int dim) {
  for (int i = 0; i < count; ++i)
    for (size_t byte = 0; byte < dim * sizeof(T); byte += 64) __builtin_prefetch((const char*)(rows + at[i]) + byte);
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

// Scores to exponentials of what they are below the largest, over a row's own `count` positions of a chunk.
INLINE void soften(float* w, int count, const Partial& out) {
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
  *out.mass = sum(mass);
  *out.top = top[0];
}

// sums += weights * values over `count` positions in ascending order, for R rows and C vectors of the head from d on.
template <int R, int C, class T>
INLINE void mix(const T* const* rows, const float* weights, size_t stride, int count, int d, float* sums,
                size_t sums_stride) {
  f32v acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * sums_stride + d + c * LANES);
  for (int j = 0; j < count; ++j) {
    f32v v[C];
    for (int c = 0; c < C; ++c) v[c] = load(rows[j] + d + c * LANES);
    for (int r = 0; r < R; ++r) {
      const f32v p = splat(weights[r * stride + j]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(p, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * sums_stride + d + c * LANES, acc[r][c]);
}

template <int R, class T>
INLINE void mix_rows(const T* const* rows, const float* weights, size_t stride, int count, float* sums, size_t width,
                     size_t sums_stride) {
  size_t d = 0;
  for (; d + 4 * LANES <= width; d += 4 * LANES) mix<R, 4>(rows, weights, stride, count, d, sums, sums_stride);
  for (; d < width; d += LANES) mix<R, 1>(rows, weights, stride, count, d, sums, sums_stride);
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

// Query rows [rows] of one request, each of `share` heads; row i sees first_seen + i positions, or in a block all.
struct Queries {
  const float* first;
  size_t stride;
  int rows, share, dim, first_seen;
  bool causal;
  float scale;

  int all() const { return rows * share; }
  int seen(int i) const { return causal ? first_seen + i / share : first_seen; }
  int length() const { return seen(all() - 1); }
  // The first query that sees position `start`; those before it see nothing of what follows either.
  int first_with(int start) const { return causal ? std::max(0, start + 1 - first_seen) * share : 0; }
};

INLINE void load_queries(const Queries& q, Scratch& s) {
  const size_t width = padded(q.dim);
  s.rows.assign(TILE * width, 0.f);
  s.key_t.resize(TILE * width);
  s.query.resize(q.all() * width);
  s.weights.resize(q.all() * CHUNK);
  for (int i = 0; i < q.all(); ++i) {
    const float* from = q.first + size_t(i / q.share) * q.stride + size_t(i % q.share) * q.dim;
    for (int d = 0; d < int(width); ++d) s.query[i * width + d] = d < q.dim ? from[d] * q.scale : 0.f;
  }
}

// The partials of all queries over the chunk at `start`; those of queries that see nothing of it are left alone.
template <class T>
void attend_chunk(const Positions<T>& kv, Scratch& s, const Queries& q, int start, float* partials) {
  const int all = q.all(), stop = std::min(start + CHUNK, q.length());
  const size_t width = padded(q.dim);
  size_t at[CHUNK], next[CHUNK];
  kv.locate(start, stop - start, at);
  kv.locate(stop, std::min(CHUNK, q.length() - stop), next);
  for (int tile = start; tile < stop; tile += TILE) {
    prefetch(kv.value, at + tile - start, std::min(TILE, std::min(stop, kv.context) - tile), q.dim);
    prefetch(kv.key, next + tile - start, std::min(TILE, std::min(q.length(), kv.context) - stop - tile + start), q.dim);
    with_tile<true>(kv, at + tile - start, tile, std::min(TILE, stop - tile), q.dim, s, [&](const auto* const* keys) {
      for (int j = 0; j < TILE; j += LANES)
        for (size_t d = 0; d < width; d += LANES) transpose(keys + j, d, &s.key_t[d * TILE + j], TILE);
    });
    for (int row = q.first_with(tile); row < all; row += ROW_BLOCK)
      with_rows(std::min(ROW_BLOCK, all - row), [&](auto R) {
        score<R.value>(s, row, width, &s.weights[row * CHUNK + tile - start], CHUNK);
      });
  }
  for (int i = q.first_with(start); i < all; ++i) {
    const Partial p = partial(partials, i, width);
    soften(&s.weights[i * CHUNK], std::min(q.seen(i), stop) - start, p);
    std::fill(p.values, p.values + width, 0.f);
  }
  const size_t stride = partial_floats(width);
  for (int tile = start; tile < stop; tile += TILE) {
    const int count = std::min(TILE, stop - tile);
    with_tile<false>(kv, at + tile - start, tile, count, q.dim, s, [&](const auto* const* values) {
      const auto mixed = [&](int row, auto R, int seen) {
        mix_rows<R.value>(values, &s.weights[row * CHUNK + tile - start], CHUNK, seen, partials + row * stride, width,
                          stride);
      };
      int row = q.first_with(tile);
      for (; row < all && q.seen(row) < tile + count; ++row)
        mixed(row, std::integral_constant<int, 1>(), q.seen(row) - tile);
      for (; row < all; row += ROW_BLOCK)
        with_rows(std::min(ROW_BLOCK, all - row), [&](auto R) { mixed(row, R, count); });
    });
  }
}

// Query i's result, once all chunks are merged.
INLINE void write_out(const Queries& q, int i, const Partial& p, float* out, size_t out_stride) {
  float* to = out + size_t(i / q.share) * out_stride + size_t(i % q.share) * q.dim;
  const float inverse = 1.f / *p.mass;
  for (int d = 0; d < q.dim; ++d) to[d] = p.values[d] * inverse;
}

// All chunks of all queries.
template <class T>
void attend(const Positions<T>& kv, Scratch& s, const Queries& q, float* out, size_t out_stride) {
  const size_t width = padded(q.dim);
  load_queries(q, s);
  s.chunk.resize(q.all() * partial_floats(width));
  s.merged.resize(q.all() * partial_floats(width));
  attend_chunk(kv, s, q, 0, s.merged.data());
  for (int start = CHUNK; start < q.length(); start += CHUNK) {
    attend_chunk(kv, s, q, start, s.chunk.data());
    for (int i = q.first_with(start); i < q.all(); ++i)
      merge(partial(s.merged.data(), i, width), partial(s.chunk.data(), i, width), width);
  }
  for (int i = 0; i < q.all(); ++i) write_out(q, i, partial(s.merged.data(), i, width), out, out_stride);
}

// Chunks chunk..chunk+chunks-1 into `partials` [all chunks][all queries], for join() when every chunk is there.
template <class T>
void attend_part(const Positions<T>& kv, Scratch& s, const Queries& q, int chunk, int chunks, float* partials) {
  const size_t floats = q.all() * partial_floats(padded(q.dim));
  load_queries(q, s);
  for (int c = chunk; c < chunk + chunks; ++c) attend_chunk(kv, s, q, c * CHUNK, partials + c * floats);
}

INLINE void join(const Queries& q, float* partials, float* out, size_t out_stride) {
  const size_t width = padded(q.dim), floats = q.all() * partial_floats(width);
  for (int start = CHUNK, c = 1; start < q.length(); start += CHUNK, ++c)
    for (int i = q.first_with(start); i < q.all(); ++i)
      merge(partial(partials, i, width), partial(partials + c * floats, i, width), width);
  for (int i = 0; i < q.all(); ++i) write_out(q, i, partial(partials, i, width), out, out_stride);
}

}  // namespace outrider
