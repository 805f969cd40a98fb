// Products of several rows on the matrix unit (AMX), where there is one and the kernel lets this process use it.
//
// A tile product gives the same 32-bit integers as dot(), and what follows is the same arithmetic in the same order, so
// a row's result is the same bits whichever way it was computed: the choice may depend on the number of rows.
//
// Sums leave the unit by way of memory, sixteen rows at a time however few are wanted; that, and scaling them, is what
// takes the time. Hence a few rows are multiplied with two groups at once: their quants lie as tiles of
//   [8 rows] group 2i, zeros
//   [8 rows] zeros, group 2i + 1
// so that one half of the sums belongs to one group and the other half to the other.
#pragma once

#include <algorithm>
#include <utility>

#include "gemm.h"

namespace outrider {

#if OUTRIDER_AMX

constexpr int TILE_ROWS = BESIDE;

// Tiles 0 and 1: sums; 2 and 3: rows; 4 and 5: weights; 6 and 7: rows and weights of a group without a partner.
constexpr TileConfig SINGLE_GROUPS = {1, 0, {}, {64, 64, 32, 32, 64, 64}, {16, 16, 16, 16, 8, 8}};
constexpr TileConfig PAIRS_OF_GROUPS = {1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};

// The groups of a FOUR panel as tiles want them: nibbles as bytes.
INLINE void spread(const uint8_t* panel, const uint8_t* wanted, int groups, uint8_t* bytes) {
  const ptrdiff_t ahead = wanted - panel;
  const i32v mask = splat(int32_t(0x0f0f0f0f));
  for (int g = 0; g < groups; ++g)
    for (int q = 0; q < QUADS / 2; ++q) {
      const uint8_t* from = panel + quants_at(FOUR, g) + q * LINE;
      i32v packed;
      std::memcpy(&packed, from, LINE);
      __builtin_prefetch(from + ahead, 0, ASKED_CACHE);
      const i32v low = packed & mask, high = (packed >> 4) & mask;
      std::memcpy(bytes + g * EIGHT_BYTES + q * LINE, &low, LINE);
      std::memcpy(bytes + g * EIGHT_BYTES + (q + QUADS / 2) * LINE, &high, LINE);
    }
  settle();
}

// acc[r] += part[r] * d * scale[r], and m * scaled_sum[r], for group g. Neither loops nor lambdas: compilers would
// leave acc in memory.
template <int FORMAT, int R, size_t... r>
INLINE void add_group(f32v (&acc)[R], const int32_t (*part)[PANEL], int g, const uint8_t* panel, const uint8_t* wanted,
                      const Rows& x, size_t first, std::index_sequence<r...>) {
  const uint16_t* scales = (const uint16_t*)(panel + scales_at(FORMAT, g));
  const float *scale = x.scale + first + g * BESIDE, *scaled_sum = x.scaled_sum + first + g * BESIDE;
  const f32v d = load_half(scales);
  ((acc[r] = fma(to_float(*(const i32v*)part[r]), d * splat(scale[r]), acc[r])), ...);
  if (FORMAT == FOUR) {
    const f32v m = load_half(scales + PANEL);
    ((acc[r] = fma(m, splat(scaled_sum[r]), acc[r])), ...);
  } else if (wanted) {
    for (size_t byte = 0; byte <= EIGHT_BYTES; byte += LINE)
      __builtin_prefetch(wanted + scales_at(EIGHT, g) + byte, 0, ASKED_CACHE);
  }
}
// The same for product i.
template <int FORMAT, bool PAIRS, int R, class All>
INLINE void add_sums(f32v (&acc)[R], const int32_t (*part)[PANEL], int i, const uint8_t* panel, const uint8_t* wanted,
                     const Rows& x, size_t first, All all_rows) {
  const int g = PAIRS ? 2 * i : i;
  add_group<FORMAT>(acc, part, g, panel, wanted, x, first, all_rows);
  if (PAIRS && g + 1 < x.groups) add_group<FORMAT>(acc, part + BESIDE / 2, g + 1, panel, wanted, x, first, all_rows);
}
template <int R, size_t... r>
INLINE void put_all(const f32v (&acc)[R], f32v* sums, std::index_sequence<r...>) {
  ((sums[r] = acc[r]), ...);
}

// Tiles are named in the instruction, hence a macro.
#define OUTRIDER_TILE_PRODUCT(SUMS, ROWS, WEIGHTS, I)                    \
  {                                                                      \
    _tile_zero(SUMS);                                                    \
    _tile_loadd(WEIGHTS, weights_of(I), LINE);                           \
    _tile_loadd(ROWS, a + (I)*SHARE * TILE_ROWS * GROUP, SHARE * GROUP); \
    _tile_dpbssd(SUMS, ROWS, WEIGHTS);                                   \
  }

// The sums of a panel for R rows from row on; all rows of that tile must be readable. `bytes`: of FOUR what spread()
// made, of EIGHT the panel. `wanted`: a panel that is read soon, which spread() or, of EIGHT, this asks for, or null.
// While the sums of one product are stored and scaled, the next one is on its way.
template <int FORMAT, int R, bool PAIRS>
__attribute__((noinline)) void tile_rows_of(const uint8_t* panel, const uint8_t* bytes, const uint8_t* wanted,
                                            const Rows& x, int row, f32v* sums) {
  constexpr int SHARE = PAIRS ? 2 : 1, SLOTS = 4;
  alignas(64) int32_t parts[SLOTS][TILE_ROWS][PANEL];
  const int groups = x.groups, whole = groups / SHARE, products = (groups + SHARE - 1) / SHARE;
  const size_t first = x.at(row, 0);
  const int8_t* a = x.quants_at(first);
  f32v acc[R] = {};
  constexpr auto all_rows = std::make_index_sequence<R>();

  const auto weights_of = [&](int i) INLINE_LAMBDA {
    return bytes + (FORMAT == FOUR ? i * SHARE * EIGHT_BYTES : quants_at(EIGHT, i * SHARE));
  };
  const auto multiply_even = [&](int i) INLINE_LAMBDA {
    if (i < whole) OUTRIDER_TILE_PRODUCT(0, 2, 4, i)
    else if (PAIRS && i < products) OUTRIDER_TILE_PRODUCT(0, 6, 7, i)
  };
  const auto multiply_odd = [&](int i) INLINE_LAMBDA {
    if (i < whole) OUTRIDER_TILE_PRODUCT(1, 3, 5, i)
    else if (PAIRS && i < products) OUTRIDER_TILE_PRODUCT(1, 6, 7, i)
  };
  multiply_even(0);
  for (int i = 0; i < products; i += 2) {
    multiply_odd(i + 1);
    _tile_stored(0, parts[i % SLOTS], LINE);
    multiply_even(i + 2);
    add_sums<FORMAT, PAIRS>(acc, parts[i % SLOTS], i, panel, wanted, x, first, all_rows);
    if (i + 1 == products) break;
    _tile_stored(1, parts[(i + 1) % SLOTS], LINE);
    add_sums<FORMAT, PAIRS>(acc, parts[(i + 1) % SLOTS], i + 1, panel, wanted, x, first, all_rows);
  }
  put_all(acc, sums, all_rows);
}
#undef OUTRIDER_TILE_PRODUCT

// For 6 to 8 rows that lie as pairs, which FOUR ones never do, or 9 to 16 that do not.
template <int FORMAT>
INLINE void tile_rows(const uint8_t* panel, const uint8_t* bytes, const uint8_t* wanted, const Rows& x, int row,
                      int rows, f32v* sums) {
  if constexpr (FORMAT == EIGHT) {
    if (rows == 6) return tile_rows_of<EIGHT, 6, true>(panel, bytes, wanted, x, row, sums);
    if (rows == 7) return tile_rows_of<EIGHT, 7, true>(panel, bytes, wanted, x, row, sums);
    if (rows == 8) return tile_rows_of<EIGHT, 8, true>(panel, bytes, wanted, x, row, sums);
  }
  if (rows <= 12) return tile_rows_of<FORMAT, 12, false>(panel, bytes, wanted, x, row, sums);
  return tile_rows_of<FORMAT, 16, false>(panel, bytes, wanted, x, row, sums);
}

#endif

// Whether the quants of so many rows lie as pairs: with fewer, or with FOUR, dot() is faster.
INLINE bool suits_pairs(int format, int rows) {
#if OUTRIDER_AMX
  return format == EIGHT && rows >= 6 && rows <= TILE_ROWS / 2 && amx_permitted();
#else
  return (void)format, (void)rows, false;
#endif
}

}  // namespace outrider
