// Paged attention for ragged rows, causal or over a bidirectional block, grouped query heads.
//
// A unit of work is some consecutive query rows of one request, key/value heads with all query heads that share them,
// and a range of chunks of CHUNK positions. Per chunk three sweeps: scores (keys transposed, so that a vector holds
// positions), softmax, and the mix of values; chunks are merged in ascending order, on whichever thread. A row's sums
// run in ascending pairs of head dimensions or of positions and its chunks begin at fixed positions, whatever other
// rows do: its result depends on what it sees alone, not on its neighbours in the pass, nor on how a prompt or the work
// was cut. Over keys and values of bf16, queries and the weights of values are rounded to bf16 too; sums stay fp32.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "tiles.h"
#include "vec.h"

namespace outrider {

constexpr int TILE = 32, ROW_BLOCK = 6;    // positions and queries whose sums stay in registers together
constexpr int CHUNK = 64, UNIT_ROWS = 32;  // positions of a chunk; rows of a unit at most

// Asks the memory for some of a row, as far as the second cache.
template <class T>
INLINE void prefetch(const T* row, size_t elements) {
  for (size_t byte = 0; byte < elements * sizeof(T); byte += 64) __builtin_prefetch((const char*)row + byte, 0, 2);
}

// A row of zeros, for positions behind the last.
template <class T>
INLINE const T* zero_row() {
  alignas(64) static const T zeros[512] = {};
  return zeros;
}

// Some positions in a row, and where those of them lie that are in the pool, `pooled` of them; zeros behind.
template <class T>
struct Chunk {
  int start = 0, count = 0, pooled = 0;
  const T *key[CHUNK], *value[CHUNK];

  // Of a first chunk, whose keys nobody has asked for: so many elements of each.
  INLINE void ask_for_keys(size_t elements) const {  // never a call, which compilers drop
    for (int i = 0; i < pooled; ++i) prefetch(key[i], elements);
  }
  // To another head, so many elements from this one.
  void shift(int elements) {
    for (int i = 0; i < pooled; ++i) key[i] += elements, value[i] += elements;
  }
};

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

  Positions head(int h, int dim) const {
    Positions other = *this;
    other.key += h * dim, other.value += h * dim, other.own_key += h * dim, other.own_value += h * dim;
    return other;
  }
  // The chunk at `start` of `length` positions.
  void locate(int start, int length, Chunk<T>& chunk) const {
    chunk.start = start;
    chunk.count = std::max(0, std::min(CHUNK, length - start));
    chunk.pooled = std::max(0, std::min(chunk.count, context - start));
    int i = 0;
    while (i < chunk.pooled) {
      const int block = (start + i) / block_size, offset = (start + i) % block_size;
      const int end = std::min(chunk.pooled, i + block_size - offset);
      size_t at = (size_t(blocks[block]) * block_size + offset) * slot_stride;
      for (; i < end; ++i, at += slot_stride) chunk.key[i] = key + at, chunk.value[i] = value + at;
    }
    for (; i < CHUNK; ++i) chunk.key[i] = chunk.value[i] = zero_row<T>();
  }
};

// To whole pairs of vectors.
INLINE int padded(int x) { return (x + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

template <class T>
INLINE void load_row(const T* from, float* to, int dim) {
  int d = 0;
  for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
  for (; d < dim; ++d) to[d] = value(from[d]);
}

// What 16 sums multiply in one step: two neighbours each, of keys or values on one side and of queries or weights on
// the other. Two vectors, and in scratch two planes of floats; or, where the processor multiplies bf16 as it is, one of
// words. dot() adds the second product first, as processors do, which differ only in taking denormals for zero.
template <class T>
struct Pairs {
  static constexpr int PLANES = 2;
  f32v first, second;

  INLINE f32v dot(const Pairs& other, f32v acc) const {
    return fma(first, other.first, fma(second, other.second, acc));
  }
  static INLINE Pairs load(const float* from, size_t plane) {
    return {outrider::load(from), outrider::load(from + plane)};
  }
  INLINE void store(float* to, size_t plane) const {
    outrider::store(to, first);
    outrider::store(to + plane, second);
  }
  // One pair for all sums, its planes side by side.
  static INLINE Pairs all_of(const float* from) { return {splat(from[0]), splat(from[1])}; }
  // Of a word with two bf16 each.
  static INLINE Pairs of_words(i32v words) {
    return {(f32v)(words << 16), (f32v)(words & splat(int32_t(0xffff0000)))};
  }
  // Columns d..d+16*C of two rows; sums of them get their columns in order by in_order().
  template <int C>
  static INLINE void of_rows(const T* first, const T* second, size_t d, Pairs (&to)[C]) {
    for (int c = 0; c < C; ++c)
      to[c] = {outrider::load(first + d + c * LANES), outrider::load(second + d + c * LANES)};
  }
  template <int C>
  static INLINE void in_order(f32v (&)[C]) {}
  // Values i..i+15 of a row that all_of() reads; they may come from where they go.
  static INLINE void put(float* row, int i, f32v x) {
    if constexpr (std::is_same_v<T, bf16>) x = round_to_bf16(x);
    outrider::store(row + i, x);
  }
};

#if OUTRIDER_BF16
template <>
struct Pairs<bf16> {
  static constexpr int PLANES = 1;
  i32v both;

  INLINE f32v dot(const Pairs& other, f32v acc) const {
    return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)both, (__m512bh)other.both);
  }
  static INLINE Pairs load(const float* from, size_t) { return {(i32v)outrider::load(from)}; }
  INLINE void store(float* to, size_t) const { outrider::store(to, (f32v)both); }
  static INLINE Pairs all_of(const float* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return {splat(word)};
  }
  static INLINE Pairs of_words(i32v words) { return {words}; }
  // The processor interleaves within quarters of a vector.
  template <int C>
  static INLINE void of_rows(const bf16* first, const bf16* second, size_t d, Pairs (&to)[C]) {
    for (int c = 0; c < C; c += 2) {
      const __m512i a = _mm512_loadu_si512(first + d + c * LANES), b = _mm512_loadu_si512(second + d + c * LANES);
      to[c].both = (i32v)_mm512_unpacklo_epi16(a, b);
      to[c + 1].both = (i32v)_mm512_unpackhi_epi16(a, b);
    }
  }
  template <int C>
  static INLINE void in_order(f32v (&sums)[C]) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int c = 0; c < C; c += 2) {
      const __m512d a = (__m512d)sums[c], b = (__m512d)sums[c + 1];
      sums[c] = (f32v)_mm512_permutex2var_pd(a, low, b);
      sums[c + 1] = (f32v)_mm512_permutex2var_pd(a, high, b);
    }
  }
  static INLINE void put(float* row, int i, f32v x) {
    _mm256_storeu_si256((__m256i*)((char*)row + i * sizeof(bf16)), (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
};
#endif

#if OUTRIDER_AVX512
// columns[c] = word c of each of 16 rows.
INLINE void transpose_words(__m512 (&a)[16], __m512 (&columns)[16]) {
  __m512 b[16];
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
    columns[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
    columns[c + 8] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    columns[c + 4] = _mm512_shuffle_f32x4(high01, high23, 0x88);
    columns[c + 12] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}

// to[c] = word c of each of 16 rows, of which row(r) is the address.
template <class Row>
INLINE void transpose_16(const Row& row, float* to, size_t stride) {
  __m512 a[16], columns[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_ps(row(r));
  transpose_words(a, columns);
  for (int c = 0; c < 16; ++c) _mm512_storeu_ps(to + c * stride, columns[c]);
}

// Columns d..d+31 of 16 rows of bf16, in pairs.
INLINE void transpose_pairs(const bf16* const* rows, size_t d, Pairs<bf16> (&pairs)[16]) {
  __m512 a[16], words[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_ps((const float*)(rows[r] + d));
  transpose_words(a, words);
  for (int c = 0; c < 16; ++c) pairs[c] = Pairs<bf16>::of_words((i32v)words[c]);
}
#endif

// 16 rows of `width` columns, transposed to pairs: their planes one after the other, `stride` floats apart.
template <class T>
INLINE void transpose(const T* const* rows, size_t width, float* to, size_t stride) {
#if OUTRIDER_AVX512
  if constexpr (std::is_same_v<T, bf16>) {
    for (size_t d = 0; d < width; d += 2 * LANES) {
      Pairs<bf16> pairs[16];
      transpose_pairs(rows, d, pairs);
      for (int c = 0; c < LANES; ++c) pairs[c].store(to + (d / 2 + c) * Pairs<T>::PLANES * stride, stride);
    }
  } else {
    for (size_t d = 0; d < width; d += LANES)
      transpose_16([&](int r) { return rows[r] + d; }, to + d * stride, stride);
  }
#else
  for (size_t d = 0; d < width; ++d)
    for (int r = 0; r < LANES; ++r) to[d * stride + r] = value(rows[r][d]);
#endif
}

// What some positions contribute to one query: values weighted by exp(score - top), and those weights' sum.
struct Partial {
  float* values;  // [width]
  float *mass, *top;
};

// A thread's scratch for the queries of one head of a unit, all[] of them padded to whole vectors.
struct Scratch {
  Buffer<unsigned char> rows;  // [CHUNK][width] of T, copies of what cannot be read in place, padded with zeros
  Buffer<float> key_t;         // [width / 2][planes][TILE]
  Buffer<float> query;         // [all][width / 2][planes], scaled
  Buffer<float> query_t;       // the same as columns of tiles
  Buffer<float> weights;       // [all][CHUNK], scores and then their exponentials in pairs, [CHUNK / 2][planes]
  Buffer<float> top, mass;          // [all] of the chunk at hand
  Buffer<float> all_top, all_mass;  // [all] of the chunks so far
  Buffer<float> keep, add;          // [all] factors of what is there and what a chunk adds
  Buffer<float> values;             // [all][width] over the chunks so far
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

// use(pointers to rows) with the keys or values of a chunk's positions first..first+count-1, and zeros behind them up
// to whole vectors.
template <bool KEYS, class T, class Use>
INLINE void with_positions(const Positions<T>& kv, const Chunk<T>& chunk, int first, int count, int dim, Scratch& s,
                           const Use& use) {
  const size_t width = padded(dim);
  const T* const* pooled = (KEYS ? chunk.key : chunk.value) + first;
  if (first + count <= chunk.pooled && size_t(dim) == width) return use(pooled);
  const float* own = KEYS ? kv.own_key : kv.own_value;
  const T* rows[CHUNK];
  for (int j = 0; j < count; ++j) {
    const int i = first + j;
    T* to = (T*)s.rows.data() + j * width;
    if (i < chunk.pooled) {
      std::copy_n(pooled[j], dim, to);
    } else {
      const float* from = own + size_t(chunk.start + i - kv.context) * kv.own_stride;
      for (int d = 0; d < dim; ++d) put(to + d, from[d]);
    }
    rows[j] = to;
  }
  for (int j = count; j < padded(count); ++j) rows[j] = zero_row<T>();
  use(rows);
}

// Scores of R queries with V vectors of a tile's positions, each summed over the head's dimension in ascending pairs.
template <int R, int V, class T>
INLINE void score(const float* key_t, const float* query, size_t width, float* scores) {
  constexpr int PLANES = Pairs<T>::PLANES;
  const size_t floats = width / 2 * PLANES;
  f32v acc[R][V] = {};
  for (size_t at = 0; at < floats; at += PLANES) {
    Pairs<T> k[V];
    for (int v = 0; v < V; ++v) k[v] = Pairs<T>::load(key_t + at * TILE + v * LANES, TILE);
    for (int r = 0; r < R; ++r) {
      const Pairs<T> x = Pairs<T>::all_of(query + r * floats + at);
      for (int v = 0; v < V; ++v) acc[r][v] = k[v].dot(x, acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(scores + r * CHUNK + v * LANES, acc[r][v]);
}

// The same with 16 positions whose keys are transposed on the way: for so few queries, storing them does not pay.
// `ahead`: 16 rows of as much that are wanted soon.
template <int R, class T>
INLINE bool score_few(const T* const* keys, const float* query, size_t width, const T* const* ahead, float* scores) {
#if OUTRIDER_AVX512
  if constexpr (std::is_same_v<T, bf16>) {
    constexpr int PLANES = Pairs<T>::PLANES;
    const size_t floats = width / 2 * PLANES;
    f32v acc[R] = {};
    for (size_t d = 0; d < width; d += 2 * LANES) {
      Pairs<T> pairs[16];
      transpose_pairs(keys, d, pairs);
      for (int c = 0; c < LANES; ++c) {
        prefetch(ahead[c] + d, 1);
        for (int r = 0; r < R; ++r)
          acc[r] = pairs[c].dot(Pairs<T>::all_of(query + r * floats + (d / 2 + c) * PLANES), acc[r]);
      }
    }
    for (int r = 0; r < R; ++r) store(scores + r * CHUNK, acc[r]);
    return true;
  }
#endif
  return (void)keys, (void)query, (void)width, (void)ahead, (void)scores, false;
}

// The largest of a query's `count` scores; those behind, up to a whole vector, become -inf.
INLINE float top_score(float* w, int count) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int whole = count / LANES * LANES;
  if (whole < count)
    store(w + whole, lane < splat(int32_t(count - whole)) ? load(w + whole) : splat(-INFINITY));
  f32v highest = splat(-INFINITY);
  for (int j = 0; j < count; j += LANES) highest = max(highest, load(w + j));
  return largest(highest);
}

// Scores to exponentials of what they are below the largest, as mix() wants them; their sum.
template <class T>
INLINE float soften(float* w, int count, float top) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int whole = count / LANES * LANES;
  f32v mass = {};
  for (int j = 0; j < whole; j += LANES) {
    const f32v p = exp(load(w + j) - splat(top));
    Pairs<T>::put(w, j, p);
    mass = mass + p;
  }
  if (whole < count) {
    const f32v p = lane < splat(int32_t(count - whole)) ? exp(load(w + whole) - splat(top)) : f32v{};
    Pairs<T>::put(w, whole, p);
    mass = mass + p;
  }
  return sum(mass);
}

// Where the values of R queries go: beside what is there, by these factors, or, where they are null, in its place.
struct Target {
  float* values;
  size_t stride;
  const float *keep, *add;

  // Columns d..d+16*C of a query, not yet in_order().
  template <class T, int C>
  INLINE void take(int query, size_t d, f32v (&sums)[C]) const {
    Pairs<T>::in_order(sums);
    float* at = values + query * stride + d;
    for (int c = 0; c < C; ++c, at += LANES)
      store(at, keep ? fma(sums[c], splat(add[query]), load(at) * splat(keep[query])) : sums[c]);
  }
};

// Weighted sums of values over counts[r] positions in ascending pairs, for R queries, the first of which sees least,
// and C vectors of the head from d on. `ahead`: rows that are wanted soon, or null.
template <int R, int C, class T>
INLINE void mix(const T* const* rows, const float* weights, const int* counts, size_t d, const T* const* ahead,
                const Target& to) {
  constexpr int PLANES = Pairs<T>::PLANES;
  f32v acc[R][C] = {};
  int j = 0;
  for (; j + 1 < counts[0]; j += 2) {
    if (ahead) prefetch(ahead[j] + d, C * LANES), prefetch(ahead[j + 1] + d, C * LANES);
    Pairs<T> v[C];
    Pairs<T>::of_rows(rows[j], rows[j + 1], d, v);
    for (int r = 0; r < R; ++r) {
      const Pairs<T> p = Pairs<T>::all_of(weights + r * CHUNK + j / 2 * PLANES);
      for (int c = 0; c < C; ++c) acc[r][c] = v[c].dot(p, acc[r][c]);
    }
  }
  for (; j < counts[R - 1]; j += 2)
    for (int r = 0; r < R; ++r) {
      if (j >= counts[r]) continue;
      Pairs<T> v[C];
      Pairs<T>::of_rows(rows[j], j + 1 < counts[r] ? rows[j + 1] : zero_row<T>(), d, v);
      const Pairs<T> p = Pairs<T>::all_of(weights + r * CHUNK + j / 2 * PLANES);
      for (int c = 0; c < C; ++c) acc[r][c] = v[c].dot(p, acc[r][c]);
    }
  for (int r = 0; r < R; ++r) to.template take<T>(r, d, acc[r]);
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
  Queries head(int h) const {
    Queries other = *this;
    other.first += size_t(h) * share * dim;
    return other;
  }
  int seen(int i) const { return causal ? first_seen + i / share : first_seen; }
  int length() const { return seen(all() - 1); }
  // The first query that sees position `start`; those before it see nothing of what follows either.
  int first_with(int start) const { return causal ? std::max(0, start + 1 - first_seen) * share : 0; }
  // Of a chunk's positions those that query i sees.
  template <class T>
  int seen(int i, const Chunk<T>& chunk) const { return std::min(seen(i) - chunk.start, chunk.count); }
};

// Whether scores and values may be made on the matrix unit.
template <class T>
constexpr bool TILED = OUTRIDER_TILE_ATTENTION && std::is_same_v<T, bf16>;

// The unit's configuration for so many queries, as long as this lives, where it is used.
template <class T>
struct TileUse {
  explicit TileUse(int) {}
};

}  // namespace outrider

#include "attention_tiles.h"

namespace outrider {

template <class T>
INLINE void load_queries(const Queries& q, Scratch& s) {
  const size_t width = padded(q.dim), floats = width / 2 * Pairs<T>::PLANES;
  if (width != size_t(q.dim)) s.rows.assign(CHUNK * width * sizeof(T), 0);
  const auto sized = [](auto& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  };
  sized(s.rows, CHUNK * width * sizeof(T));
  sized(s.key_t, TILE * floats);
  const size_t whole_tiles = (q.all() + TILE_SIDE - 1) / TILE_SIDE * TILE_SIDE;
  sized(s.query, whole_tiles * floats);
  sized(s.weights, whole_tiles * CHUNK);
  sized(s.values, q.all() * width);
  for (auto* each : {&s.top, &s.mass, &s.all_top, &s.all_mass, &s.keep, &s.add}) sized(*each, padded(q.all()));
  for (int i = 0; i < q.all(); ++i) {
    const float* from = q.first + size_t(i / q.share) * q.stride + size_t(i % q.share) * q.dim;
    float* to = &s.query[i * floats];
    for (int d = 0; d < int(width); d += LANES) Pairs<T>::put(to, d, load_some(from + d, q.dim - d) * splat(q.scale));
  }
#if OUTRIDER_TILE_ATTENTION
  if (TILED<T> && tile_attention() && q.all() <= TILE_SIDE) turn_queries(s, q.all(), width);
#endif
}

// Scores of all queries with a chunk's positions, whose values are asked for meanwhile.
template <class T>
INLINE void score_chunk(const Positions<T>& kv, Scratch& s, const Queries& q, const Chunk<T>& chunk) {
  if constexpr (TILED<T>)
    if (tile_attention()) return score_tiles(kv, s, q, chunk);
  const int all = q.all();
  const size_t width = padded(q.dim), floats = width / 2 * Pairs<T>::PLANES;
  for (int tile = 0; tile < chunk.count; tile += TILE) {
    const int count = std::min(TILE, chunk.count - tile), first = q.first_with(chunk.start + tile);
    with_positions<true>(kv, chunk, tile, count, q.dim, s, [&](const T* const* keys) {
      float* scores = &s.weights[tile];
      bool done = all - first <= ROW_BLOCK;
      for (int j = 0; done && j < count; j += LANES)
        with_rows(all - first, [&](auto R) {
          done = score_few<R.value>(keys + j, &s.query[first * floats], width, chunk.value + tile + j,
                                    scores + first * CHUNK + j);
        });
      if (done) return;
      for (int j = 0; j < count; j += LANES) transpose(keys + j, width, &s.key_t[j], TILE);
      int asked = tile;
      for (int row = first; row < all; row += ROW_BLOCK) {
        for (int end = std::min(asked + LANES, tile + count); asked < end; ++asked) prefetch(chunk.value[asked], q.dim);
        const int rows = std::min(ROW_BLOCK, all - row);
        const bool half = q.seen(row + rows - 1, chunk) - tile <= LANES;
        with_rows(rows, [&](auto R) {
          if (half) score<R.value, 1, T>(s.key_t.data(), &s.query[row * floats], width, scores + row * CHUNK);
          else score<R.value, 2, T>(s.key_t.data(), &s.query[row * floats], width, scores + row * CHUNK);
        });
      }
    });
  }
}

// Factors by which what is there and what the chunk adds count from here on; tops and masses of both together.
INLINE void weigh(Scratch& s, int first, int all) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int i = first / LANES * LANES; i < all; i += LANES) {
    const f32v before = load(&s.all_top[i]), now = load(&s.top[i]), top = max(before, now);
    const f32v keep = exp(before - top), add = exp(now - top), mass = load(&s.all_mass[i]);
    const i32v seeing = lane >= splat(int32_t(first - i));
    store(&s.keep[i], keep);
    store(&s.add[i], add);
    store(&s.all_mass[i], seeing ? mass * keep + load(&s.mass[i]) * add : mass);
    store(&s.all_top[i], seeing ? top : before);
  }
}

// The contributions of a chunk to the queries that see some of it, tops and masses in s.top and s.mass; `into` is for
// query 0. The keys of `next` are asked for meanwhile.
template <class T>
INLINE void mix_chunk(const Positions<T>& kv, Scratch& s, const Queries& q, const Chunk<T>& chunk, const Chunk<T>& next,
                      const Target& into) {
  if constexpr (TILED<T>)
    if (tile_attention()) return mix_tiles(kv, s, q, chunk, next, into);
  const int all = q.all(), first = q.first_with(chunk.start);
  const size_t width = padded(q.dim);
  with_positions<false>(kv, chunk, 0, chunk.count, q.dim, s, [&](const T* const* values) {
    for (int row = first; row < all; row += ROW_BLOCK) {
      const int rows = std::min(ROW_BLOCK, all - row);
      int counts[ROW_BLOCK];
      for (int r = 0; r < rows; ++r) counts[r] = q.seen(row + r, chunk);
      const Target to = {into.values + row * into.stride, into.stride, into.keep ? into.keep + row : nullptr,
                         into.add + row};
      const float* weights = &s.weights[row * CHUNK];
      const T* const* ahead = row == first ? next.key : nullptr;
      with_rows(rows, [&](auto R) {
        size_t d = 0;
        for (; d + 4 * LANES <= width; d += 4 * LANES) mix<R.value, 4>(values, weights, counts, d, ahead, to);
        for (; d < width; d += 2 * LANES) mix<R.value, 2>(values, weights, counts, d, ahead, to);
      });
    }
  });
}

template <class T>
INLINE void soften_chunk(Scratch& s, const Queries& q, const Chunk<T>& chunk) {
  const int all = q.all(), first = q.first_with(chunk.start);
  for (int i = first; i < all; ++i) s.top[i] = top_score(&s.weights[i * CHUNK], q.seen(i, chunk));
  for (int i = first; i < all; ++i) s.mass[i] = soften<T>(&s.weights[i * CHUNK], q.seen(i, chunk), s.top[i]);
  if constexpr (TILED<T>)
    if (tile_attention()) clear_unseen(s, q, chunk);
}

INLINE void write_out(const Queries& q, int i, const float* values, float mass, float* out, size_t out_stride) {
  float* to = out + size_t(i / q.share) * out_stride + size_t(i % q.share) * q.dim;
  const float inverse = 1.f / mass;
  for (int d = 0; d < q.dim; ++d) to[d] = values[d] * inverse;
}

// All chunks of `heads` heads, from that of `kv` and `q` on: chunk by chunk, since the heads of a position are
// neighbours in memory. `scratch`: one for each head. `after`: what the thread takes next, most likely.
template <class T>
void attend(const Positions<T>& kv, Scratch* scratch, const Queries& q, int heads, const Chunk<T>& after, float* out,
            size_t out_stride) {
  const size_t width = padded(q.dim);
  const TileUse<T> tiles(q.all());
  Chunk<T> chunks[2];
  kv.locate(0, q.length(), chunks[0]);
  chunks[0].ask_for_keys(heads * q.dim);
  for (int h = 0; h < heads; ++h) load_queries<T>(q.head(h), scratch[h]);
  for (int start = 0, turn = 0; start < q.length(); start += CHUNK, turn ^= 1) {
    Chunk<T> &chunk = chunks[turn], &next = chunks[turn ^ 1];
    if (start + CHUNK < q.length()) kv.locate(start + CHUNK, q.length(), next);
    else next = after;
    for (int h = 0; h < heads; ++h) {
      Scratch& s = scratch[h];
      const Positions<T> of_head = kv.head(h, q.dim);
      score_chunk(of_head, s, q, chunk);
      soften_chunk(s, q, chunk);
      if (start == 0) {
        std::copy_n(s.top.data(), q.all(), s.all_top.data());
        std::copy_n(s.mass.data(), q.all(), s.all_mass.data());
        mix_chunk(of_head, s, q, chunk, next, {s.values.data(), width, nullptr, nullptr});
      } else {
        weigh(s, q.first_with(start), q.all());
        mix_chunk(of_head, s, q, chunk, next, {s.values.data(), width, s.keep.data(), s.add.data()});
      }
      chunk.shift(q.dim);
      next.shift(h + 1 < heads ? q.dim : -h * q.dim);
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < q.all(); ++i)
      write_out(q, i, &scratch[h].values[i * width], scratch[h].all_mass[i], out + h * q.share * q.dim, out_stride);
}

// Chunks first..first+count-1 of one head into `partials` [all chunks][all queries], for join() when every chunk is
// there.
template <class T>
void attend_part(const Positions<T>& kv, Scratch& s, const Queries& q, int first, int count, const Chunk<T>& after,
                 float* partials) {
  const size_t width = padded(q.dim), stride = partial_floats(width);
  const TileUse<T> tiles(q.all());
  Chunk<T> chunks[2];
  kv.locate(first * CHUNK, q.length(), chunks[0]);
  chunks[0].ask_for_keys(q.dim);
  load_queries<T>(q, s);
  for (int c = first, turn = 0; c < first + count; ++c, turn ^= 1) {
    Chunk<T> &chunk = chunks[turn], &next = chunks[turn ^ 1];
    if (c + 1 < first + count) kv.locate(chunk.start + CHUNK, q.length(), next);
    else next = after;
    score_chunk(kv, s, q, chunk);
    soften_chunk(s, q, chunk);
    float* to = partials + c * q.all() * stride;
    mix_chunk(kv, s, q, chunk, next, {to, stride, nullptr, nullptr});
    for (int i = q.first_with(chunk.start); i < q.all(); ++i) {
      const Partial p = partial(to, i, width);
      *p.mass = s.mass[i];
      *p.top = s.top[i];
    }
  }
}

INLINE void join(const Queries& q, float* partials, float* out, size_t out_stride) {
  const size_t width = padded(q.dim), floats = q.all() * partial_floats(width);
  for (int start = CHUNK, c = 1; start < q.length(); start += CHUNK, ++c)
    for (int i = q.first_with(start); i < q.all(); ++i)
      merge(partial(partials, i, width), partial(partials + c * floats, i, width), width);
  for (int i = 0; i < q.all(); ++i) {
    const Partial p = partial(partials, i, width);
    write_out(q, i, p.values, *p.mass, out, out_stride);
  }
}

}  // namespace outrider
