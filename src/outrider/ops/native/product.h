// Products of quantised rows with a packed matrix, by whichever instructions suit the number of rows, on all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "pool.h"

namespace outrider {

constexpr int BLOCK = 16;  // rows of one block of products, at most
constexpr int OPEN_PANELS = 4;

// A thread's use of the matrix unit during one chunk of work; nothing where there is none.
class Tiles {
 public:
#if OUTRIDER_AMX
  ~Tiles() {
    if (rows_) _tile_release();
  }
  void use(int rows) {
    if (rows != rows_) configure_tiles(rows);
    rows_ = rows;
  }

 private:
  int rows_ = 0;
#endif
};

// One panel, ready for products with the rows of a call.
struct Panel {
  const uint8_t* data;
  const uint8_t* bytes;  // quants for the matrix unit; null: not used for this call
  int format, groups;
};

INLINE const uint16_t* panel_scales(const Panel& p) {
  return (const uint16_t*)(p.data + p.groups * quant_bytes(p.format));
}

// `place` below OPEN_PANELS: up to so many panels are open at a time on one thread.
INLINE Panel open_panel(const Matrix& w, int panel, int rows, int place) {
  Panel opened{w.data + panel * panel_bytes(w.format, w.groups), nullptr, w.format, w.groups};
#if OUTRIDER_AMX
  static thread_local std::vector<uint8_t> spread[OPEN_PANELS];
  if (rows >= AMX_LEAST_ROWS && amx_permitted()) {
    if (w.format == EIGHT) {
      opened.bytes = opened.data;
    } else {
      const size_t size = size_t(w.groups) * quant_bytes(EIGHT);
      if (spread[place].size() < size) spread[place].resize(size);
      opened.bytes = byte_quants<FOUR>(opened.data, w.groups, spread[place].data());
    }
  }
#else
  (void)rows;
  (void)place;
#endif
  return opened;
}

// How many of the rows that are left the next block takes.
INLINE int next_block(int left) {
#if OUTRIDER_AMX
  if (left >= AMX_LEAST_ROWS && amx_permitted()) return std::min(left, BLOCK);
#endif
  return std::min(left, DOT_ROWS);
}

// The sums of the panel's 16 outputs, without bias, for a block of next_block() rows.
INLINE void block_sums(const Panel& p, const Rows& x, int row, int rows, Tiles& tiles, f32v* sums) {
#if OUTRIDER_AMX
  if (rows >= AMX_LEAST_ROWS && p.bytes) {
    const int size = rows > 8 ? 16 : 8;
    tiles.use(size);
    const uint16_t* scales = panel_scales(p);
    if (p.format == FOUR) {
      if (size == 16) tile_rows<FOUR, 16>(p.bytes, scales, x, row, sums);
      else tile_rows<FOUR, 8>(p.bytes, scales, x, row, sums);
    } else {
      if (size == 16) tile_rows<EIGHT, 16>(p.bytes, scales, x, row, sums);
      else tile_rows<EIGHT, 8>(p.bytes, scales, x, row, sums);
    }
    return;
  }
#else
  (void)tiles;
#endif
  if (p.format == FOUR) dot_rows<FOUR>(p.data, x, row, rows, sums);
  else dot_rows<EIGHT>(p.data, x, row, rows, sums);
}

// Units of work of about equal size: enough that a slow core does not hold up the others.
INLINE int chunk_size(int items, int threads) { return std::max(1, std::min(8, items / (threads * 4))); }

// out(row, panel, sums) for every row and every panel.
template <class Out>
void product(Pool& pool, const Matrix& w, const Rows& x, int rows, const Out& out) {
  const int size = chunk_size(w.panels, pool.threads());
  pool.run((w.panels + size - 1) / size, [&](int chunk, int) {
    Tiles tiles;
    for (int p = chunk * size; p < std::min(w.panels, (chunk + 1) * size); ++p) {
      const Panel panel = open_panel(w, p, rows, 0);
      for (int row = 0, count; row < rows; row += count) {
        count = next_block(rows - row);
        f32v sums[BLOCK];
        block_sums(panel, x, row, count, tiles, sums);
        for (int r = 0; r < count; ++r) out(row + r, p, sums[r]);
      }
    }
  });
}

}  // namespace outrider
