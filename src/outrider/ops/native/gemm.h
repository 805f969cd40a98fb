// Quantised matrix products: layouts, and products by vector instructions.
//
// Activations: int8 in groups of GROUP along the input with one fp32 scale each (q = round(x * 127 / max|x|)).
// Weights: groups of GROUP along the input per output, binary16 scales, in one of two formats:
//   EIGHT  w = d * q,     q in -127..127
//   FOUR   w = d * q + m, q in 0..15
// A group's product is an exact integer on every instruction set. Groups are added in fp32 in ascending order, per
// output element, whatever else is computed in the same call: a row's result does not depend on the rows beside it.
//
// Packed layout: panels of 16 outputs, one stream of whole cache lines in the order in which they are read:
//   EIGHT  per two groups [2][16] d, then per group [8 quads][16 outputs][4 inputs] bytes
//   FOUR   per group [2][16] d and m, then [4][16][4] bytes, low nibbles quads 0..3 and high nibbles quads 4..7
// Scales apart from their quants would be a second stream, whose every new line the memory is late with. Inputs and
// outputs beyond the real extents have weight zero.
#pragma once

#include "tuning.h"
#include "vec.h"

namespace outrider {

constexpr int GROUP = 32, PANEL = 16, QUADS = GROUP / 4;
enum Format : int32_t { EIGHT = 0, FOUR = 1 };

struct Matrix {
  const uint8_t* data;
  const float* bias;  // [panels * PANEL] or null
  int32_t format, panels, groups, unused;
};

constexpr size_t LINE = 64, EIGHT_BYTES = GROUP * PANEL, FOUR_BYTES = LINE + EIGHT_BYTES / 2;

// Where group g's scales and quants lie in a panel.
INLINE size_t scales_at(int format, int g) {
  return format == FOUR ? g * FOUR_BYTES : g / 2 * (LINE + 2 * EIGHT_BYTES) + g % 2 * (LINE / 2);
}
INLINE size_t quants_at(int format, int g) {
  return format == FOUR ? g * FOUR_BYTES + LINE : (g / 2 + 1) * LINE + g * EIGHT_BYTES;
}
INLINE size_t panel_bytes(int format, int groups) {
  return format == FOUR ? groups * FOUR_BYTES : (groups + 1) / 2 * LINE + groups * EIGHT_BYTES;
}

constexpr int DOT_ROWS = 8;  // rows whose sums stay in registers together
#if OUTRIDER_AMX
constexpr int BESIDE_SHIFT = 4;  // of rows that lie beside one another: those of a tile
#else
constexpr int BESIDE_SHIFT = 3;  // DOT_ROWS
#endif
constexpr int BESIDE = 1 << BESIDE_SHIFT;

// Quantised rows: [rows / BESIDE][groups][BESIDE] of everything, quants in groups, so that a group of all rows of a
// block of products lies at fixed distances from one address. A single row has nothing beside it.
struct Rows {
  int8_t* quants;
  float* scale;
  float* scaled_sum;  // scale * sum of quants, what the minimum of FOUR multiplies
  int32_t* start;     // -128 * sum of quants, where the integer sums of EIGHT start
  int groups;
  int shift;    // BESIDE_SHIFT, or 0
  bool paired;  // quants lie as amx.h wants those of a few rows

  size_t at(int row, int group) const {
    return ((size_t(row >> shift) * groups + group) << shift) + (row & ((1 << shift) - 1));
  }
  // The quants of what lies at an index by at().
  int8_t* quants_at(size_t index) const {
    if (!paired) return quants + index * GROUP;
    const size_t row = index % BESIDE, group = index / BESIDE;
    return quants + ((group / 2 * BESIDE + group % 2 * (BESIDE / 2) + row) * 2 + group % 2) * GROUP;
  }
};

INLINE void quantise_group(f32v a, f32v b, const Rows& x, size_t group) {
  const float top = as_float(largest(max(magnitude(a), magnitude(b))));
  const f32v inverse = splat(top == 0.f ? 0.f : 127.f / top);
  const i32v qa = to_int(round_even(a * inverse)), qb = to_int(round_even(b * inverse));
  int8_t* q = x.quants_at(group);
#if OUTRIDER_AVX512
  _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8((__m512i)qa));
  _mm_storeu_si128((__m128i*)(q + LANES), _mm512_cvtepi32_epi8((__m512i)qb));
#else
  for (int i = 0; i < LANES; ++i) q[i] = int8_t(qa[i]), q[LANES + i] = int8_t(qb[i]);
#endif
  const int32_t total = sum(qa + qb);
  const float scale = top / 127.f;
  x.scale[group] = scale;
  x.scaled_sum[group] = scale * float(total);
  x.start[group] = -128 * total;
}

INLINE void quantise_row(const float* values, const Rows& x, int row) {
  for (int g = 0; g < x.groups; ++g)
    quantise_group(load(values + g * GROUP), load(values + g * GROUP + LANES), x, x.at(row, g));
}

// acc[o] += sum over b of w[4 * o + b] * a[b]: 64 unsigned weights, 4 signed activations.
INLINE i32v dot(i32v acc, i32v w, const int8_t* a) {
  int32_t quad;
  std::memcpy(&quad, a, 4);
#if defined(__AVX512VNNI__) && OUTRIDER_AVX512
  return (i32v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVX2__)
  const __m256i even = _mm256_set1_epi32((uint16_t(a[0])) | int32_t(uint32_t(uint16_t(a[2])) << 16));
  const __m256i odd = _mm256_set1_epi32((uint16_t(a[1])) | int32_t(uint32_t(uint16_t(a[3])) << 16));
  __m256i half[2], sums[2];
  std::memcpy(half, &w, 64);
  std::memcpy(sums, &acc, 64);
  for (int h = 0; h < 2; ++h) {
    const __m256i low = _mm256_and_si256(half[h], _mm256_set1_epi16(0xff)), high = _mm256_srli_epi16(half[h], 8);
    sums[h] = _mm256_add_epi32(sums[h], _mm256_add_epi32(_mm256_madd_epi16(low, even), _mm256_madd_epi16(high, odd)));
  }
  std::memcpy(&acc, sums, 64);
  return acc;
#else
  uint8_t bytes[64];
  std::memcpy(bytes, &w, 64);
  for (int o = 0; o < LANES; ++o)
    for (int b = 0; b < 4; ++b) acc[o] += int32_t(bytes[4 * o + b]) * a[b];
  return acc;
#endif
}

// The sums of one panel's 16 outputs for R rows of a block from row on. `wanted`: a panel that is read soon, or null.
template <int FORMAT, int R>
__attribute__((noinline)) void dot_rows_of(const uint8_t* panel, const uint8_t* wanted, const Rows& x, int row,
                                           f32v* sums) {
  const int groups = x.groups;
  const ptrdiff_t ahead = wanted ? wanted - panel : 0;
  const auto ask_ahead = [ahead](const uint8_t* line) {
    if (R >= LEAST_ASKING_ROWS) __builtin_prefetch(line + ahead, 0, ASKED_CACHE);
  };
  const size_t first = x.at(row, 0);
  const int8_t* a = x.quants + first * GROUP;
  const float *scale = x.scale + first, *scaled_sum = x.scaled_sum + first;
  const int32_t* start = x.start + first;
  const int beside = R == 1 ? 1 << x.shift : BESIDE;
  f32v acc[R] = {};
  for (int g = 0; g < groups; ++g, a += beside * GROUP, scale += beside, scaled_sum += beside, start += beside) {
    const uint8_t* data = panel + quants_at(FORMAT, g);
    const uint16_t* scales = (const uint16_t*)(panel + scales_at(FORMAT, g));
    i32v part[R];
    for (int r = 0; r < R; ++r) part[r] = FORMAT == FOUR ? i32v{} : splat(start[r]);
    if (FORMAT == FOUR) {
      const i32v mask = splat(int32_t(0x0f0f0f0f));
      for (int q = 0; q < QUADS / 2; ++q) {
        i32v packed;
        std::memcpy(&packed, data + q * 64, 64);
        ask_ahead(data + q * 64);
        const i32v low = packed & mask, high = (packed >> 4) & mask;
        for (int r = 0; r < R; ++r) part[r] = dot(part[r], low, a + r * GROUP + 4 * q);
        for (int r = 0; r < R; ++r) part[r] = dot(part[r], high, a + r * GROUP + 4 * q + GROUP / 2);
      }
    } else {
      for (int q = 0; q < QUADS; ++q) {
        i32v w;
        std::memcpy(&w, data + q * 64, 64);
        ask_ahead(data + q * 64);
        w ^= splat(int32_t(0x80808080));  // q + 128, which is not negative: made up for by where the sums start
        for (int r = 0; r < R; ++r) part[r] = dot(part[r], w, a + r * GROUP + 4 * q);
      }
    }
    const f32v d = load_half(scales);
    for (int r = 0; r < R; ++r) acc[r] = fma(to_float(part[r]), d * splat(scale[r]), acc[r]);
    if (FORMAT == FOUR) {
      ask_ahead((const uint8_t*)scales);
      const f32v m = load_half(scales + PANEL);
      for (int r = 0; r < R; ++r) acc[r] = fma(m, splat(scaled_sum[r]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) sums[r] = acc[r];
}

// For `rows` <= DOT_ROWS rows from row on, a multiple of DOT_ROWS.
template <int FORMAT>
INLINE void dot_rows(const uint8_t* panel, const uint8_t* wanted, const Rows& x, int row, int rows, f32v* sums) {
  switch (rows) {
    case 8: return dot_rows_of<FORMAT, 8>(panel, wanted, x, row, sums);
    case 7: return dot_rows_of<FORMAT, 7>(panel, wanted, x, row, sums);
    case 6: return dot_rows_of<FORMAT, 6>(panel, wanted, x, row, sums);
    case 5: return dot_rows_of<FORMAT, 5>(panel, wanted, x, row, sums);
    case 4: return dot_rows_of<FORMAT, 4>(panel, wanted, x, row, sums);
    case 3: return dot_rows_of<FORMAT, 3>(panel, wanted, x, row, sums);
    case 2: return dot_rows_of<FORMAT, 2>(panel, wanted, x, row, sums);
    default: return dot_rows_of<FORMAT, 1>(panel, wanted, x, row, sums);
  }
}

}  // namespace outrider
