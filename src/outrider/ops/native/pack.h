// Weights into the packed layout of gemm.h.
//
// EIGHT: d = max|w| / 127. FOUR: of two choices the one with the smaller squared error: the whole range (m = min,
// d = (max - min) / 15) or a range around zero (d = -extreme / 8, m = -8 d). A group whose values lie on such a grid
// already, as those of Q8_0 and of Q4_1 and Q4_0 files do, is kept exactly.
#pragma once

#include "product.h"

namespace outrider {

// Round to nearest even; beyond the largest finite value infinity.
inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  const float size = as_float(int32_t(bits));
  if (!(size < 65520.f)) return sign | 0x7c00;
  if (size < 6.103515625e-5f) return sign | uint16_t(std::nearbyint(size * 16777216.f));
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | uint16_t((bits - (112u << 23)) >> 13);
}

struct Grid {
  float d, m, error;  // w = d * q + m, and what that loses in squares
  uint16_t half_d, half_m;
  uint8_t q[GROUP];
};

inline Grid fit(const float* w, int real, float d, float m) {
  Grid grid;
  grid.half_d = float_to_half(d);
  grid.half_m = float_to_half(m);
  grid.d = half_to_float(grid.half_d);
  grid.m = half_to_float(grid.half_m);
  grid.error = 0.f;
  for (int i = 0; i < GROUP; ++i) {
    const float steps = grid.d == 0.f ? 0.f : (w[i] - grid.m) / grid.d;
    const int q = int(std::nearbyint(std::min(15.f, std::max(0.f, steps))));
    grid.q[i] = uint8_t(q);
    const float lost = w[i] - (grid.d * float(q) + grid.m);
    if (i < real) grid.error += lost * lost;
  }
  return grid;
}

inline Grid fit_eight(const float* w, int real, float top) {
  Grid grid;
  grid.half_d = float_to_half(top / 127.f);
  grid.half_m = 0;
  grid.d = half_to_float(grid.half_d);
  grid.m = 0.f;
  grid.error = 0.f;
  for (int i = 0; i < GROUP; ++i) {
    const float steps = grid.d == 0.f ? 0.f : w[i] / grid.d;
    const float q = std::nearbyint(std::min(127.f, std::max(-127.f, steps)));
    grid.q[i] = uint8_t(int8_t(q));
    const float lost = w[i] - grid.d * q;
    if (i < real) grid.error += lost * lost;
  }
  return grid;
}

// `real` of the group's weights exist; those behind meet activations of zero and may hold anything.
inline Grid fit_group(const float* w, int real, int format) {
  float low = w[0], high = w[0];
  for (int i = 1; i < real; ++i) low = std::min(low, w[i]), high = std::max(high, w[i]);
  const float extreme = -low > high ? low : high;
  if (format == EIGHT) return fit_eight(w, real, std::fabs(extreme));
  const Grid whole = fit(w, real, (high - low) / 15.f, low);
  const float step = half_to_float(float_to_half(extreme / -8.f));
  const Grid around = fit(w, real, step, -8.f * step);
  return around.error < whole.error ? around : whole;
}

inline void store_group(const Grid& grid, int format, int output, int group, uint8_t* panel) {
  uint8_t* quants = panel + quants_at(format, group);
  uint16_t* scales = (uint16_t*)(panel + scales_at(format, group));
  for (int i = 0; i < GROUP; ++i) {
    const int quad = i / 4, byte = output * 4 + i % 4;
    if (format == EIGHT) quants[quad * 64 + byte] = grid.q[i];
    else quants[quad % 4 * 64 + byte] |= uint8_t(grid.q[i] << (quad / 4 * 4));
  }
  scales[output] = grid.half_d;
  if (format == FOUR) scales[PANEL + output] = grid.half_m;
}

// weights [*, inputs]; output o of the packed matrix is row order[o], or zero where that is -1. Returns the squared
// error relative to the weights' squares; NaN where a weight or a scale is not finite. data must be zeroed.
template <class T>
double pack(Pool& pool, const T* weights, int inputs, const int64_t* order, int panels, int format, uint8_t* data) {
  const int groups = (inputs + GROUP - 1) / GROUP;
  std::vector<double> lost(panels, 0.0), total(panels, 0.0);
  pool.run(panels, [&](int p, int) {
    uint8_t* panel = data + p * panel_bytes(format, groups);
    for (int o = 0; o < PANEL; ++o)
      for (int g = 0; g < groups; ++g) {
        float w[GROUP] = {};
        const int64_t row = order[p * PANEL + o];
        const int real = std::min(GROUP, inputs - g * GROUP);
        for (int i = 0; row >= 0 && i < real; ++i) w[i] = value(weights[row * inputs + g * GROUP + i]);
        const Grid grid = fit_group(w, real, format);
        const bool finite = (grid.half_d & 0x7c00) != 0x7c00 && (grid.half_m & 0x7c00) != 0x7c00;
        lost[p] += finite ? grid.error : NAN;
        for (float x : w) total[p] += double(x) * x;
        store_group(grid, format, o, g, panel);
      }
  });
  double all_lost = 0.0, all = 0.0;
  for (int p = 0; p < panels; ++p) all_lost += lost[p], all += total[p];
  return all == 0.0 ? all_lost : all_lost / all;
}

}  // namespace outrider
