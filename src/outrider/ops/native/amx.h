// Products of many rows on the matrix unit (AMX), where the processor has one and the kernel lets this process use it.
//
// A tile product gives the same 32-bit integers as dot(), and what follows is the same arithmetic in the same order, so
// a row's result is the same bits whichever way it was computed: the choice may depend on the number of rows.
#pragma once

#include "gemm.h"

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && OUTRIDER_AVX512 && defined(__linux__)
#define OUTRIDER_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

#if OUTRIDER_AMX

constexpr int TILE_ROWS = 16;
constexpr int AMX_LEAST_ROWS = 5;  // below, reading the weights costs more than the arithmetic of dot()

// Once per process, before any thread uses a tile.
inline bool amx_permitted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return permitted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0..3: sums; 4, 5: activations; 6, 7: weights.
INLINE void configure_tiles(int rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = tile < 6 ? rows : QUADS;
    config.bytes_per_row[tile] = tile == 4 || tile == 5 ? GROUP : 64;
  }
  _tile_loadconfig(&config);
}

// The quants of a panel as bytes, [groups][8 quads][16][4]: where they are, or spread from nibbles into `spread`.
template <int FORMAT>
INLINE const uint8_t* byte_quants(const uint8_t* data, int groups, uint8_t* spread) {
  if (FORMAT == EIGHT) return data;
  const i32v mask = splat(int32_t(0x0f0f0f0f));
  for (int g = 0; g < groups; ++g)
    for (int q = 0; q < QUADS / 2; ++q) {
      i32v packed;
      std::memcpy(&packed, data + (g * QUADS / 2 + q) * 64, 64);
      const i32v low = packed & mask, high = (packed >> 4) & mask;
      std::memcpy(spread + (g * QUADS + q) * 64, &low, 64);
      std::memcpy(spread + (g * QUADS + QUADS / 2 + q) * 64, &high, 64);
    }
  asm volatile("" ::: "memory");  // tile loads are invisible to the compiler
  return spread;
}

// The sums of one panel for R rows from row on; rows behind the last real one are computed from what lies there.
template <int FORMAT, int R>
__attribute__((noinline)) void tile_rows(const uint8_t* quants, const uint16_t* scales, const Rows& x, int row,
                                         f32v* sums) {
  alignas(64) int32_t parts[2][R][PANEL];
  const int groups = x.groups;
  const int8_t* a = x.quants + size_t(row) * groups * GROUP;
  const size_t first = size_t(row) * groups;
  f32v acc[R] = {};
  for (int g = 0; g < groups; ++g) {
    if (g % 2 == 0) {
      _tile_zero(0);
      _tile_loadd(6, quants + g * 64 * QUADS, 64);
      _tile_loadd(4, a + g * GROUP, groups * GROUP);
      _tile_dpbsud(0, 4, 6);
      _tile_stored(0, parts[0], 64);
    } else {
      _tile_zero(1);
      _tile_loadd(7, quants + g * 64 * QUADS, 64);
      _tile_loadd(5, a + g * GROUP, groups * GROUP);
      _tile_dpbsud(1, 5, 7);
      _tile_stored(1, parts[1], 64);
    }
    const f32v d = load_half(scales + g * (FORMAT == FOUR ? 2 : 1) * PANEL);
    for (int r = 0; r < R; ++r) {
      i32v part;
      std::memcpy(&part, parts[g % 2][r], 64);
      if (FORMAT == EIGHT) part += splat(x.start[first + r * groups + g]);
      acc[r] = fma(to_float(part), d * splat(x.scale[first + r * groups + g]), acc[r]);
    }
    if (FORMAT == FOUR) {
      const f32v m = load_half(scales + (2 * g + 1) * PANEL);
      for (int r = 0; r < R; ++r) acc[r] = fma(m, splat(x.scaled_sum[first + r * groups + g]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) sums[r] = acc[r];
}

#endif

}  // namespace outrider
