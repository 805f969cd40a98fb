// Numbers that were found by measuring, on the two kinds of machine that there were: Intel's with a matrix unit, whose
// cores wait longer for memory and for each other, and AMD's without one. They change speed, never a result.
#pragma once

#include <cstddef>

#include "tiles.h"

namespace outrider {

#if OUTRIDER_AMX
constexpr int LEAST_ASKING_ROWS = 1;              // of a product that asks the memory for weights to come
constexpr int ASKED_CACHE = 2;                    // where they go: 3 the nearest, 2 the next
constexpr size_t ASKED_AHEAD = 16384;             // bytes
constexpr bool ASKED_BY_PANELS = true;            // so far at least, and on where the thread goes on
constexpr int INLINE_ROWS = 16;                   // row-wise steps of fewer rows are not worth waking anyone
constexpr int FEW_CHUNKS = 2, MANY_CHUNKS = 6;    // of a product, for each thread: with few rows, with many
constexpr int LARGEST_CHUNK = 64;                 // panels
#else
constexpr int LEAST_ASKING_ROWS = 5;  // arithmetic for so many rows keeps loads back, and the processor's own asking
constexpr int ASKED_CACHE = 3;
constexpr size_t ASKED_AHEAD = 4096;
constexpr bool ASKED_BY_PANELS = false;
constexpr int INLINE_ROWS = 4;
constexpr int FEW_CHUNKS = 4, MANY_CHUNKS = 12;
constexpr int LARGEST_CHUNK = 8;
#endif

}  // namespace outrider
