// Products of quantised rows with a packed matrix, by whichever instructions suit the number of rows, on all threads.
#pragma once

#include <algorithm>

#include "amx.h"
#include "pool.h"

namespace outrider {

constexpr int BLOCK = 16;  // rows of one block of products, at most

// A thread's use of the matrix unit during one chunk of work; nothing where there is none.
class Tiles {
 public:
#if OUTRIDER_AMX
  ~Tiles() {
    if (configured_) _tile_release();
  }
  void configure() {
    if (!configured_) configure_tiles();
    configured_ = true;
  }

 private:
  bool configured_ = false;
#endif
};

INLINE bool suits_tiles(int format, int rows) {
#if OUTRIDER_AMX
  return format == EIGHT && rows >= AMX_LEAST_ROWS && amx_permitted();
#else
  return (void)format, (void)rows, false;
#endif
}

// How many of the rows that are left the next block of products with `w` takes.
INLINE int next_block(const Matrix& w, int left) {
  return std::min(left, suits_tiles(w.format, left) ? BLOCK : DOT_ROWS);
}

// The sums of a panel's 16 outputs, without bias, for a block of next_block() rows.
INLINE void block_sums(const Matrix& w, int panel, const Rows& x, int row, int rows, Tiles& tiles, f32v* sums) {
  const uint8_t* data = w.data + panel * panel_bytes(w.format, w.groups);
#if OUTRIDER_AMX
  if (suits_tiles(w.format, rows)) {
    tiles.configure();
    return tile_rows(data, x, row, sums);
  }
#else
  (void)tiles;
#endif
  if (w.format == FOUR) dot_rows<FOUR>(data, x, row, rows, sums);
  else dot_rows<EIGHT>(data, x, row, rows, sums);
}

// Into how many chunks of equal size work on `items` panels is cut: as many for each thread, and more of them where a
// panel takes long, since the last ones decide how long a thread waits for another.
INLINE int chunk_count(int items, int rows, int threads) {
  return std::min(items, std::max(threads * (rows > DOT_ROWS ? 12 : 4), items / 8));
}
INLINE int chunk_begin(int items, int chunk, int chunks) { return int(int64_t(items) * chunk / chunks); }

constexpr uint32_t AHEAD_BYTES = 65536;  // asked for at either end before a product begins

// What a product of `rows` rows with `w` reads first; panels are taken `together` at a time.
INLINE Ahead read_first(const Matrix& w, int rows, int threads, int together) {
  const int items = w.panels / together, chunks = chunk_count(items, rows, threads);
  const size_t bytes = panel_bytes(w.format, w.groups) * together;
  const int last = chunk_begin(items, chunks - 1, chunks);
  return {w.data, w.data + last * bytes, uint32_t(std::min<size_t>(AHEAD_BYTES, (items - last) * bytes / 256 * 256))};
}

// out(row, panel, sums) for every row and every panel.
template <class Out>
void product(Pool& pool, const Matrix& w, const Rows& x, int rows, const Out& out) {
  const int chunks = chunk_count(w.panels, rows, pool.threads());
  pool.run(chunks, [&](int chunk, int) {
    const int begin = chunk_begin(w.panels, chunk, chunks), end = chunk_begin(w.panels, chunk + 1, chunks);
    Tiles tiles;
    // A block's rows stay in the nearest cache while the chunk's panels pass by, after the first block from the next.
    for (int row = 0, count; row < rows; row += count) {
      count = next_block(w, rows - row);
      for (int p = begin; p < end; ++p) {
        f32v sums[BLOCK];
        block_sums(w, p, x, row, count, tiles, sums);
        for (int r = 0; r < count; ++r) out(row + r, p, sums[r]);
      }
    }
  });
}

}  // namespace outrider
