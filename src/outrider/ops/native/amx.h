// Products of many rows on the matrix unit (AMX), where the processor has one and the kernel lets this process use it.
//
// A tile product gives the same 32-bit integers as dot(), and what follows is the same arithmetic in the same order, so
// a row's result is the same bits whichever way it was computed: the choice may depend on the number of rows.
#pragma once

#include <algorithm>

#include "gemm.h"

#if OUTRIDER_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

#if OUTRIDER_AMX

constexpr int TILE_ROWS = BESIDE;
constexpr int AMX_LEAST_ROWS = 14;  // below, dot() is as fast; rows missing from a tile are computed for nothing

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
INLINE void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = tile < 6 ? TILE_ROWS : QUADS;
    config.bytes_per_row[tile] = tile == 4 || tile == 5 ? GROUP : 64;
  }
  _tile_loadconfig(&config);
}

constexpr int AHEAD = 4;  // groups whose integers are on their way while those before are scaled

// Integer sums of one group into `parts`. Tiles are named in the instruction, hence a macro.
#define OUTRIDER_TILE_GROUP(SUMS, ROWS, WEIGHTS, I)                          \
  if (first + I < groups) {                                                  \
    _tile_zero(SUMS);                                                        \
    _tile_loadd(WEIGHTS, panel + quants_at(EIGHT, first + I), 64);           \
    _tile_loadd(ROWS, a + (first + I) * TILE_ROWS * GROUP, GROUP);           \
    _tile_dpbssd(SUMS, ROWS, WEIGHTS);                                       \
    _tile_stored(SUMS, parts[I], 64);                                        \
  }

// Up to AHEAD groups from `first` on.
INLINE void tile_groups(const uint8_t* panel, const int8_t* a, int first, int groups,
                        int32_t (*parts)[TILE_ROWS][PANEL]) {
  OUTRIDER_TILE_GROUP(0, 4, 6, 0)
  OUTRIDER_TILE_GROUP(1, 5, 7, 1)
  OUTRIDER_TILE_GROUP(2, 4, 6, 2)
  OUTRIDER_TILE_GROUP(3, 5, 7, 3)
}
#undef OUTRIDER_TILE_GROUP

// The sums of one EIGHT panel for TILE_ROWS rows from row on; those behind the last real one come of what lies there.
// FOUR has none: spreading its nibbles and adding its minima takes what the unit saves.
__attribute__((noinline)) inline void tile_rows(const uint8_t* panel, const Rows& x, int row, f32v* sums) {
  alignas(64) int32_t parts[2][AHEAD][TILE_ROWS][PANEL];
  const int groups = x.groups;
  const int8_t* a = x.quants + x.at(row, 0) * GROUP;
  const float* row_scales = x.scale + x.at(row, 0);
  f32v acc[TILE_ROWS] = {};
  tile_groups(panel, a, 0, groups, parts[0]);
  for (int block = 0, turn = 0; block < groups; block += AHEAD, turn ^= 1) {
    if (block + AHEAD < groups) tile_groups(panel, a, block + AHEAD, groups, parts[turn ^ 1]);
    for (int g = block; g < std::min(groups, block + AHEAD); ++g) {
      const f32v d = load_half((const uint16_t*)(panel + scales_at(EIGHT, g)));
      for (int r = 0; r < TILE_ROWS; ++r) {
        i32v part;
        std::memcpy(&part, parts[turn][g - block][r], 64);
        acc[r] = fma(to_float(part), d * splat(row_scales[g * TILE_ROWS + r]), acc[r]);
      }
    }
  }
  for (int r = 0; r < TILE_ROWS; ++r) sums[r] = acc[r];
}

#endif

}  // namespace outrider
