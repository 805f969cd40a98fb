// Sixteen-lane vectors: the only place that knows about instruction sets, beside the integer products in gemm.h and, in
// attention.h, transposing and pairs.
//
// Contract: every operation gives the same bits on every instruction set. Products and sums are never contracted
// (-ffp-contract=off); where a fused multiply-add is meant, fma() says so. Sums over lanes add in one fixed order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define OUTRIDER_AVX512 1
#endif
#if OUTRIDER_AVX512 && defined(__AVX512BF16__)
#define OUTRIDER_BF16 1
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace outrider {

constexpr int LANES = 16;
typedef float f32v __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t bf16;

// Begins with a cache line, so that no vector of it lies across two, which costs two accesses.
template <class T>
struct OnLines {
  using value_type = T;
  OnLines() = default;
  template <class U>
  OnLines(const OnLines<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
  bool operator==(const OnLines&) const { return true; }
  bool operator!=(const OnLines&) const { return false; }
};
template <class T>
using Buffer = std::vector<T, OnLines<T>>;

// Not 0 + x, which is an addition.
INLINE f32v splat(float x) { return f32v{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE i32v splat(int32_t x) { return i32v{} + x; }
INLINE f32v load(const float* p) { return *reinterpret_cast<const f32v*>(p); }
// Zeros behind the first `count`.
INLINE f32v load_some(const float* p, int count) {
  if (count >= LANES) return load(p);
  f32v x = {};
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return x;
}
INLINE void store(float* p, f32v x) { *reinterpret_cast<f32v*>(p) = x; }

INLINE f32v fma(f32v a, f32v b, f32v c) {
#if OUTRIDER_AVX512
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  f32v r;
  for (int i = 0; i < LANES; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

// The second where either is NaN.
INLINE f32v max(f32v a, f32v b) {
#if OUTRIDER_AVX512
  return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
INLINE f32v min(f32v a, f32v b) {
#if OUTRIDER_AVX512
  return (f32v)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}
INLINE i32v max(i32v a, i32v b) { return a > b ? a : b; }
// Magnitude as an integer: ordered like the magnitudes, with NaN above infinity, so that no maximum loses a NaN.
INLINE i32v magnitude(f32v a) { return (i32v)a & splat(int32_t(0x7fffffff)); }
INLINE float as_float(int32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
INLINE f32v to_float(i32v a) { return __builtin_convertvector(a, f32v); }

// To the nearest integer, ties to even; |x| < 2^22.
INLINE f32v round_even(f32v x) {
  const f32v magic = splat(12582912.f);
  return (x + magic) - magic;
}
INLINE i32v to_int(f32v whole) { return __builtin_convertvector(whole, i32v); }

// Lanes i and i + 8 first, then i and i + 4, ...
INLINE float sum(f32v x) {
#if OUTRIDER_AVX512
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] + x[i + width];
  return x[0];
#endif
}
INLINE int32_t sum(i32v x) {
#if OUTRIDER_AVX512
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
#endif
}
INLINE int32_t largest(i32v x) {
#if OUTRIDER_AVX512
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t m = x[0];
  for (int i = 1; i < LANES; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}
INLINE float largest(f32v x) {
#if OUTRIDER_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float m = x[0];
  for (int i = 1; i < LANES; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}

// e^x to about 1 ulp within -87..88, clamped outside: e^-inf is not 0 but 1e-38, so masked scores are zeroed apart.
INLINE f32v exp(f32v x) {
  x = min(splat(88.f), max(splat(-87.f), x));
  const f32v n = round_even(x * splat(1.44269504f));
  f32v r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32v p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.f));
  return (f32v)((i32v)p + (to_int(n) << 23));
}

// bfloat16: the upper half of a float, rounded to nearest even.
INLINE float from_bf16(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
INLINE bf16 to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN stays one
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE f32v load(const bf16* p) {
#if OUTRIDER_AVX512
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  f32v r;
  for (int i = 0; i < LANES; ++i) r[i] = from_bf16(p[i]);
  return r;
#endif
}
INLINE f32v round_to_bf16(f32v x) {
  const i32v bits = (i32v)x, up = bits + splat(int32_t(0x7fff)) + ((bits >> 16) & splat(int32_t(1)));
  return x == x ? (f32v)(up & splat(int32_t(0xffff0000))) : splat(NAN);
}
INLINE float value(float x) { return x; }
INLINE float value(bf16 x) { return from_bf16(x); }
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = to_bf16(x); }

// Binary16 scales. Weights have no infinities, so only finite values come here.
INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  float f;
  if (exponent == 0) {
    f = float(mantissa) * 5.9604644775390625e-8f;
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const uint32_t bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  std::memcpy(&f, &bits, 4);
  return f;
}
INLINE f32v load_half(const uint16_t* p) {
#if OUTRIDER_AVX512
  return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  f32v r;
  for (int i = 0; i < LANES; ++i) r[i] = half_to_float(p[i]);
  return r;
#endif
}

}  // namespace outrider
