// The matrix unit (AMX): leave to use it, configurations, and its products of bf16.
//
// With OUTRIDER_EMULATE_TILES attention runs through these products on processors without the unit too, slowly and to
// the same bits, denormals aside; for tests.
#pragma once

#include "vec.h"

#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && OUTRIDER_AVX512 && defined(__linux__)
#define OUTRIDER_AMX 1
#endif
#if OUTRIDER_BF16 && (defined(OUTRIDER_EMULATE_TILES) || (OUTRIDER_AMX && defined(__AMX_BF16__)))
#define OUTRIDER_TILE_ATTENTION 1
#else
#define OUTRIDER_TILE_ATTENTION 0
#endif

#if OUTRIDER_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

// Compilers do not know that loading a configuration reads all of it, and drop what was written: constants, or settled.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// What was written is in memory before tiles are loaded from there, of which compilers know nothing.
INLINE void settle() { asm volatile("" ::: "memory"); }

#if OUTRIDER_AMX
// Once per process, before any thread uses a tile.
inline bool amx_permitted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return permitted;
}
#endif

#if defined(OUTRIDER_EMULATE_TILES)

struct EmulatedTile {
  int rows, bytes;
  alignas(64) unsigned char data[16][64];
};
inline EmulatedTile* emulated_tiles() {
  static thread_local EmulatedTile tiles[8];
  return tiles;
}
inline void configure_tiles(const TileConfig& config) {
  for (int t = 0; t < 8; ++t) emulated_tiles()[t] = {config.rows[t], config.bytes_per_row[t], {}};
}
inline void emulate_load(EmulatedTile& tile, const void* from, size_t stride) {
  for (int r = 0; r < tile.rows; ++r) std::memcpy(tile.data[r], (const char*)from + r * stride, tile.bytes);
}
inline void emulate_store(const EmulatedTile& tile, void* to, size_t stride) {
  for (int r = 0; r < tile.rows; ++r) std::memcpy((char*)to + r * stride, tile.data[r], tile.bytes);
}
// Products of first and of second halves of pairs are summed apart, in order, and then together.
inline void emulate_products(EmulatedTile& sums, const EmulatedTile& a, const EmulatedTile& b) {
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < sums.bytes / 4; ++n) {
      float first = 0.f, second = 0.f, sum;
      for (int k = 0; k < a.bytes / 4; ++k) {
        const bf16 *x = (const bf16*)a.data[m] + 2 * k, *y = (const bf16*)b.data[k] + 2 * n;
        first = __builtin_fmaf(from_bf16(x[0]), from_bf16(y[0]), first);
        second = __builtin_fmaf(from_bf16(x[1]), from_bf16(y[1]), second);
      }
      std::memcpy(&sum, sums.data[m] + 4 * n, 4);
      sum = sum + (first + second);
      std::memcpy(sums.data[m] + 4 * n, &sum, 4);
    }
}
#define OUTRIDER_TILE_RELEASE() (void)0
#define OUTRIDER_TILE_ZERO(T) std::memset(emulated_tiles()[T].data, 0, sizeof(emulated_tiles()[T].data))
#define OUTRIDER_TILE_LOAD(T, FROM, STRIDE) emulate_load(emulated_tiles()[T], FROM, STRIDE)
#define OUTRIDER_TILE_STORE(T, TO, STRIDE) emulate_store(emulated_tiles()[T], TO, STRIDE)
#define OUTRIDER_TILE_PRODUCTS(SUMS, A, B) \
  emulate_products(emulated_tiles()[SUMS], emulated_tiles()[A], emulated_tiles()[B])
inline bool tile_attention() { return true; }

#elif OUTRIDER_TILE_ATTENTION

INLINE void configure_tiles(const TileConfig& config) {
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
#define OUTRIDER_TILE_RELEASE() _tile_release()
#define OUTRIDER_TILE_ZERO(T) _tile_zero(T)
#define OUTRIDER_TILE_LOAD(T, FROM, STRIDE) _tile_loadd(T, FROM, STRIDE)
#define OUTRIDER_TILE_STORE(T, TO, STRIDE) _tile_stored(T, TO, STRIDE)
#define OUTRIDER_TILE_PRODUCTS(SUMS, A, B) _tile_dpbf16ps(SUMS, A, B)
inline bool tile_attention() { return amx_permitted(); }

#else

inline bool tile_attention() { return false; }

#endif

}  // namespace outrider
