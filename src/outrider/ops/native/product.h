// Products of quantised rows with a packed matrix, by whichever instructions suit the number of rows, on all threads.
#pragma once

#include <algorithm>

#include "amx.h"
#include "pool.h"

namespace outrider {

constexpr int BLOCK = 16;  // rows of one block of products, at most

// Into how many chunks of equal size work on `items` panels is cut: as many for each thread, and more of them where a
// panel takes long, since the last ones decide how long a thread waits for another.
INLINE int chunk_count(int items, int rows, int threads) {
  return std::min(items, std::max(threads * (rows > DOT_ROWS ? MANY_CHUNKS : FEW_CHUNKS), items / LARGEST_CHUNK));
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

// A thread's part of a product: some panels of a matrix, block by block of rows.
class Part {
 public:
  // Panels begin..end-1; `next`: where the thread goes on behind them.
  Part(const Matrix& w, const Rows& x, int begin, int end, int next)
      : w_(w), x_(x), begin_(begin), end_(end), next_(next), panel_bytes_(panel_bytes(w.format, w.groups)),
        ahead_(int((ASKED_AHEAD + panel_bytes_ - 1) / panel_bytes_)) {}
  Part(const Part&) = delete;
#if OUTRIDER_AMX
  ~Part() {
    if (configured_) _tile_release();
  }
#endif

  // call(panel, row, count) for every block of rows with every `together`th panel.
  template <class Call>
  INLINE void for_blocks(int rows, int together, const Call& call) const {
    if (by_tiles(rows)) {  // what spread() makes of a panel serves all blocks
      for (int panel = begin_; panel < end_; panel += together)
        for (int row = 0, count; row < rows; row += count) call(panel, row, count = next_block(rows - row));
      return;
    }
    // A block's rows stay in the nearest cache while the panels pass by, after the first block from the next.
    for (int row = 0, count; row < rows; row += count) {
      count = next_block(rows - row);
      for (int panel = begin_; panel < end_; panel += together) call(panel, row, count);
    }
  }

  // The sums of a panel's 16 outputs, without bias, for one of these blocks.
  INLINE void sums(int panel, int row, int rows, f32v* to) {
    const uint8_t *data = at(panel), *wanted = wanted_with(panel, row);
#if OUTRIDER_AMX
    if (by_tiles(rows)) {
      if (!configured_) _tile_loadconfig(x_.paired ? &PAIRS_OF_GROUPS : &SINGLE_GROUPS);
      configured_ = true;
      if (w_.format == FOUR) return tile_rows<FOUR>(data, bytes_of(panel), wanted, x_, row, rows, to);
      return tile_rows<EIGHT>(data, data, wanted, x_, row, rows, to);
    }
#endif
    if (w_.format == FOUR) dot_rows<FOUR>(data, wanted, x_, row, rows, to);
    else dot_rows<EIGHT>(data, wanted, x_, row, rows, to);
  }

 private:
  // How many of the rows that are left the next block takes.
  int next_block(int left) const { return std::min(left, by_tiles(left) ? BLOCK : DOT_ROWS); }

  bool by_tiles(int left) const {
#if OUTRIDER_AMX
    return x_.paired || (left > DOT_ROWS && amx_permitted());
#else
    return (void)left, false;
#endif
  }

  const uint8_t* at(int panel) const { return w_.data + panel * panel_bytes_; }

  // What to ask for while `panel` is read for the block at `row`; null: nothing, the first block has asked.
  const uint8_t* wanted_with(int panel, int row) const {
    if (!ASKED_BY_PANELS) return at(panel) + ASKED_AHEAD;
    if (row > 0) return nullptr;
    const int later = panel + ahead_;
    return at(later < end_ ? later : std::min(next_ + later - end_, w_.panels - 1));
  }

  const Matrix& w_;
  const Rows& x_;
  const int begin_, end_, next_;
  const size_t panel_bytes_;
  const int ahead_;  // panels
#if OUTRIDER_AMX
  static constexpr int SLOTS = 4;  // panels whose turns alternate

  const uint8_t* bytes_of(int panel) {
    static thread_local Buffer<uint8_t> spread_out;
    const size_t size = w_.groups * EIGHT_BYTES;
    if (spread_out.size() < SLOTS * size) spread_out.resize(SLOTS * size);
    uint8_t* bytes = spread_out.data() + panel % SLOTS * size;
    if (spread_[panel % SLOTS] != panel) spread(at(panel), wanted_with(panel, 0), w_.groups, bytes);
    spread_[panel % SLOTS] = panel;
    return bytes;
  }

  bool configured_ = false;
  int spread_[SLOTS] = {-1, -1, -1, -1};
#endif
};

// call(part) for parts of w's panels, multiples of `together`, on all threads.
template <class Call>
void for_parts(Pool& pool, const Matrix& w, const Rows& x, int rows, int together, const Call& call) {
  const int items = w.panels / together, chunks = chunk_count(items, rows, pool.threads());
  pool.run(chunks, [&](int chunk, int thread) {
    const auto begin = [&](int c) { return chunk_begin(items, c, chunks) * together; };
    Part part(w, x, begin(chunk), begin(chunk + 1), begin(pool.following(chunk, chunks, thread)));
    call(part);
  });
}

// out(row, panel, sums) for every row and every panel.
template <class Out>
void product(Pool& pool, const Matrix& w, const Rows& x, int rows, const Out& out) {
  for_parts(pool, w, x, rows, 1, [&](Part& part) {
    part.for_blocks(rows, 1, [&](int panel, int row, int count) {
      f32v sums[BLOCK];
      part.sums(panel, row, count, sums);
      for (int r = 0; r < count; ++r) out(row + r, panel, sums[r]);
    });
  });
}

}  // namespace outrider
