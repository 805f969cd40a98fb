// Attention over bf16 keys and values on the matrix unit: what attention.h does for a chunk, by tiles of 16 x 16 sums.
//
// Queries in rows of tiles, positions or head dimensions in columns; for so few queries that they fit one tile, scores
// are made the other way round, so that keys are multiplied as they lie. Either way a sum is made of the same products
// in the same order, 16 pairs at a time. Weights of positions that a query does not see are zero, and values beyond the
// last position too. A value that is not finite would reach queries that do not see it: they are mixed one by one then.
//
// A part of attention.h, which includes it.
#pragma once

namespace outrider {

constexpr int TILE_SIDE = 16;  // queries, positions or pairs of dimensions of a tile

#if OUTRIDER_TILE_ATTENTION

constexpr size_t TILE_WORDS = TILE_SIDE * TILE_SIDE, WORD = 4;  // a word is a pair of bf16, or a sum
constexpr int MIXED_TILES = 4;                                  // of sums of values at once
constexpr int FEW_QUERIES = 4;                                  // whose scores are a quarter of a vector

// Tiles 0 to 3: sums of values; 4: weights; 7: scores. Where queries are few, 5: keys or values, 6: queries; where they
// are many, 5: queries or values, 6: keys.
template <>
struct TileUse<bf16> {
  const bool used = tile_attention();

  explicit TileUse(int queries) {
    if (!used) return;
    const int rows = std::min(queries, TILE_SIDE);
    TileConfig config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.rows[t] = t < 5 ? rows : TILE_SIDE;
      config.bytes_per_row[t] = t < 6 ? 64 : rows * WORD;
    }
    configure_tiles(config);
  }
  TileUse(const TileUse&) = delete;
  ~TileUse() {
    if (used) OUTRIDER_TILE_RELEASE();
  }
};

// What one thread uses between loading and storing of tiles.
struct TileScratch {
  Buffer<float> keys;    // [slabs][16 pairs][16 positions] words, or 16 keys
  Buffer<float> values;  // [2 slabs][16 pairs][width] words
  Buffer<float> sums;    // [16][64]
};
inline TileScratch& tile_scratch(size_t width) {
  static thread_local TileScratch scratch;
  if (scratch.keys.size() < width * TILE_SIDE / 2) scratch.keys.resize(width * TILE_SIDE / 2);
  if (scratch.values.size() < CHUNK / 2 * width) scratch.values.resize(CHUNK / 2 * width);
  if (scratch.sums.size() < TILE_WORDS * MIXED_TILES) scratch.sums.resize(TILE_WORDS * MIXED_TILES);
  return scratch;
}

INLINE int slabs(size_t width) { return int(width) / (2 * TILE_SIDE); }  // of 16 pairs

// As transpose_16() of rows `stride` floats apart, but of the first `columns` words alone, FEW_QUERIES at most.
INLINE void transpose_few(const float* from, size_t stride, float* to, size_t to_stride, int columns) {
  __m512 a[4];
  for (int k = 0; k < 4; ++k) {  // rows k, 4 + k, 8 + k, 12 + k
    const auto row = [&](int i) { return _mm_loadu_ps(from + (4 * i + k) * stride); };
    a[k] = _mm512_insertf32x4(_mm512_castps128_ps512(row(0)), row(1), 1);
    a[k] = _mm512_insertf32x4(_mm512_insertf32x4(a[k], row(2), 2), row(3), 3);
  }
  const __m512 b0 = _mm512_unpacklo_ps(a[0], a[1]), b1 = _mm512_unpackhi_ps(a[0], a[1]);
  const __m512 b2 = _mm512_unpacklo_ps(a[2], a[3]), b3 = _mm512_unpackhi_ps(a[2], a[3]);
  const auto join = [](__m512 x, __m512 y, bool high) INLINE_LAMBDA {
    const __m512d p = (__m512d)x, q = (__m512d)y;
    return (__m512)(high ? _mm512_unpackhi_pd(p, q) : _mm512_unpacklo_pd(p, q));
  };
  _mm512_storeu_ps(to, join(b0, b2, false));
  if (columns > 1) _mm512_storeu_ps(to + to_stride, join(b0, b2, true));
  if (columns > 2) _mm512_storeu_ps(to + 2 * to_stride, join(b1, b3, false));
  if (columns > 3) _mm512_storeu_ps(to + 3 * to_stride, join(b1, b3, true));
}

// Queries, as columns of tiles: [slabs][16 pairs][16 queries] words.
INLINE void turn_queries(Scratch& s, int all, size_t width) {
  if (s.query_t.size() < slabs(width) * TILE_WORDS) s.query_t.resize(slabs(width) * TILE_WORDS);
  for (int slab = 0; slab < slabs(width); ++slab) {
    const float* from = &s.query[slab * TILE_SIDE];
    float* to = &s.query_t[slab * TILE_WORDS];
    if (all > FEW_QUERIES) transpose_16([&](int i) { return from + i * (width / 2); }, to, TILE_SIDE);
    else
      for (int pair = 0; pair < TILE_SIDE; ++pair)
        for (int i = 0; i < all; ++i) to[pair * TILE_SIDE + i] = from[i * (width / 2) + pair];
  }
}

// Scores of all queries, at most 16, with 16 positions whose keys lie `stride` elements apart; positions in rows. Of
// 16 other rows `dim` elements are asked for meanwhile.
INLINE void score_positions(const bf16* keys, size_t stride, const Scratch& s, size_t width, const bf16* const* asked,
                            int dim, float* turned) {
  const int count = slabs(width);
  OUTRIDER_TILE_ZERO(7);
  for (int slab = 0; slab < count; ++slab) {
    for (int i = TILE_SIDE * slab / count; i < TILE_SIDE * (slab + 1) / count; ++i) prefetch(asked[i], dim);
    OUTRIDER_TILE_LOAD(5, keys + slab * 2 * TILE_SIDE, stride * sizeof(bf16));
    OUTRIDER_TILE_LOAD(6, &s.query_t[slab * TILE_WORDS], TILE_SIDE * WORD);
    OUTRIDER_TILE_PRODUCTS(7, 5, 6);
  }
  OUTRIDER_TILE_STORE(7, turned, TILE_SIDE * WORD);
}

// Scores of all queries with a chunk's positions, whose values are asked for meanwhile.
INLINE void score_tiles(const Positions<bf16>& kv, Scratch& s, const Queries& q, const Chunk<bf16>& chunk) {
  const int all = q.all(), first = q.first_with(chunk.start) / TILE_SIDE * TILE_SIDE;
  const size_t width = padded(q.dim);
  TileScratch& scratch = tile_scratch(width);
  // Of a block of the pool all positions may be read, behind the last one too: who sees none has no use for the score.
  const bool in_place = kv.block_size % TILE_SIDE == 0 && size_t(q.dim) == width;
  with_positions<true>(kv, chunk, 0, chunk.count, q.dim, s, [&](const bf16* const* keys) {
    settle();  // queries, and keys that were copied
    if (all <= TILE_SIDE) {
      alignas(64) float turned[CHUNK][TILE_SIDE];
      for (int j = 0; j < chunk.count; j += TILE_SIDE) {
        if (in_place && j < chunk.pooled && keys[j] == chunk.key[j]) {
          score_positions(keys[j], kv.slot_stride, s, width, chunk.value + j, q.dim, turned[j]);
          continue;
        }
        bf16* together = (bf16*)scratch.keys.data();
        for (int i = 0; i < TILE_SIDE; ++i) std::copy_n(keys[j + i], width, together + i * width);
        settle();
        score_positions(together, width, s, width, chunk.value + j, q.dim, turned[j]);
      }
      for (int j = 0; j < chunk.count; j += TILE_SIDE)
        if (all <= FEW_QUERIES) transpose_few(turned[j], TILE_SIDE, &s.weights[j], CHUNK, all);
        else transpose_16([&](int i) { return turned[j + i]; }, &s.weights[j], CHUNK);
      return;
    }
    for (int j = 0; j < chunk.count; j += TILE_SIDE) {
      for (int i = j; i < std::min(j + TILE_SIDE, chunk.count); ++i) prefetch(chunk.value[i], q.dim);
      transpose(keys + j, width, scratch.keys.data(), TILE_SIDE);
      settle();
      for (int row = first; row < all; row += TILE_SIDE) {
        if (q.seen(std::min(row + TILE_SIDE, all) - 1, chunk) <= j) continue;
        OUTRIDER_TILE_ZERO(7);
        for (int slab = 0; slab < slabs(width); ++slab) {
          OUTRIDER_TILE_LOAD(5, &s.query[row * width / 2 + slab * TILE_SIDE], width / 2 * WORD);
          OUTRIDER_TILE_LOAD(6, &scratch.keys[slab * TILE_WORDS], TILE_SIDE * WORD);
          OUTRIDER_TILE_PRODUCTS(7, 5, 6);
        }
        OUTRIDER_TILE_STORE(7, &s.weights[row * CHUNK + j], CHUNK * WORD);
      }
    }
  });
}

// Weights behind those that a query sees become zero, as far as they are multiplied.
INLINE void clear_unseen(Scratch& s, const Queries& q, const Chunk<bf16>& chunk) {
  const int end = padded(chunk.count);
  for (int i = q.first_with(chunk.start); i < q.all(); ++i)
    for (int j = (q.seen(i, chunk) + LANES - 1) / LANES * LANES; j < end; j += LANES)
      Pairs<bf16>::put(&s.weights[i * CHUNK], j, f32v{});
}

// Values of the first `count` positions as rows of tiles, zeros behind them. `ahead`: rows that are wanted soon, or
// null.
INLINE void pair_values(const bf16* const* rows, int count, int positions, size_t width, const bf16* const* ahead,
                        size_t asked, float* to) {
  for (int j = 0; j < positions; j += 2, to += width) {
    if (ahead) prefetch(ahead[j], asked), prefetch(ahead[j + 1], asked);
    const bf16* a = j < count ? rows[j] : zero_row<bf16>();
    const bf16* b = j + 1 < count ? rows[j + 1] : zero_row<bf16>();
    for (size_t d = 0; d < width; d += 2 * LANES) {
      Pairs<bf16> pairs[2];
      Pairs<bf16>::of_rows(a, b, d, pairs);
      pairs[0].store(to + d, 0);
      pairs[1].store(to + d + LANES, 0);
    }
  }
}

// Queries row..row+15 times TILES columns of tiles of values, into scratch.sums.
template <int TILES>
INLINE void multiply_values(const float* weights, const float* values, int positions, size_t width, float* sums) {
  OUTRIDER_TILE_ZERO(0);
  OUTRIDER_TILE_ZERO(1);
  if (TILES > 2) OUTRIDER_TILE_ZERO(2);
  if (TILES > 2) OUTRIDER_TILE_ZERO(3);
  for (int j = 0; j < positions; j += 2 * TILE_SIDE) {
    const float* from = values + j / 2 * width;
    OUTRIDER_TILE_LOAD(4, weights + j / 2, CHUNK * WORD);
    OUTRIDER_TILE_LOAD(5, from, width * WORD);
    OUTRIDER_TILE_PRODUCTS(0, 4, 5);
    OUTRIDER_TILE_LOAD(5, from + TILE_SIDE, width * WORD);
    OUTRIDER_TILE_PRODUCTS(1, 4, 5);
    if (TILES > 2) {
      OUTRIDER_TILE_LOAD(5, from + 2 * TILE_SIDE, width * WORD);
      OUTRIDER_TILE_PRODUCTS(2, 4, 5);
      OUTRIDER_TILE_LOAD(5, from + 3 * TILE_SIDE, width * WORD);
      OUTRIDER_TILE_PRODUCTS(3, 4, 5);
    }
  }
  OUTRIDER_TILE_STORE(0, sums, TILES * TILE_SIDE * WORD);
  OUTRIDER_TILE_STORE(1, sums + TILE_SIDE, TILES * TILE_SIDE * WORD);
  if (TILES > 2) OUTRIDER_TILE_STORE(2, sums + 2 * TILE_SIDE, TILES * TILE_SIDE * WORD);
  if (TILES > 2) OUTRIDER_TILE_STORE(3, sums + 3 * TILE_SIDE, TILES * TILE_SIDE * WORD);
}

// The same for queries begin..end-1 of the tile at `row`, and on to where they go.
template <int TILES>
INLINE void mix_columns(const Scratch& s, const float* values, float* sums, int row, int begin, int end, int positions,
                        size_t d, size_t width, const Target& into) {
  multiply_values<TILES>(&s.weights[row * CHUNK], values + d, positions, width, sums);
  for (int i = begin; i < end; ++i) {
    f32v column[TILES];
    for (int c = 0; c < TILES; ++c) column[c] = load(sums + ((i - row) * TILES + c) * TILE_SIDE);
    into.take<bf16>(i, d, column);
  }
}

INLINE bool any_unbounded(const bf16* row, int dim) {
  bool found = false;
  for (int d = 0; d < dim; ++d) found |= (row[d] & 0x7f80) == 0x7f80;
  return found;
}

// As mix_chunk().
INLINE void mix_tiles(const Positions<bf16>& kv, Scratch& s, const Queries& q, const Chunk<bf16>& chunk,
                      const Chunk<bf16>& next, const Target& into) {
  const int all = q.all(), first = q.first_with(chunk.start), positions = padded(chunk.count);
  const size_t width = padded(q.dim);
  TileScratch& scratch = tile_scratch(width);
  with_positions<false>(kv, chunk, 0, chunk.count, q.dim, s, [&](const bf16* const* rows) {
    const auto mix_rows = [&](int row, int begin, int end) INLINE_LAMBDA {
      float *values = scratch.values.data(), *sums = scratch.sums.data();
      size_t d = 0;
      for (; d + 2 * LANES < width; d += 4 * LANES)
        mix_columns<4>(s, values, sums, row, begin, end, positions, d, width, into);
      if (d < width) mix_columns<2>(s, values, sums, row, begin, end, positions, d, width, into);
    };
    bool unbounded = false;
    for (int j = q.seen(first, chunk); j < chunk.count; ++j) unbounded |= any_unbounded(rows[j], q.dim);
    if (!unbounded) {
      pair_values(rows, chunk.count, positions, width, next.key, q.dim, scratch.values.data());
      settle();
      for (int row = first / TILE_SIDE * TILE_SIDE; row < all; row += TILE_SIDE)
        mix_rows(row, std::max(row, first), std::min(row + TILE_SIDE, all));
      return;
    }
    for (int i = first; i < all; ++i) {
      pair_values(rows, q.seen(i, chunk), positions, width, nullptr, 0, scratch.values.data());
      settle();
      mix_rows(i / TILE_SIDE * TILE_SIDE, i, i + 1);
    }
  });
}

#endif

}  // namespace outrider
