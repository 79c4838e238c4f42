// Sixteen floats at a time, on any processor: the compiler splits them where its registers are narrower.
//
// `vectors(n, body)` calls body(i, span) for each group; load and store take the span, so one body serves both whole
// groups and the rest of a row. Infinities and NaN behave as IEEE says: comparisons are written so that NaN passes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace ortgraph {

constexpr int kLanes = 16;
typedef float V __attribute__((vector_size(64)));
typedef std::int32_t Vi __attribute__((vector_size(64)));

struct Full {
  static constexpr int size() { return kLanes; }
};
struct Part {
  int lanes;
  int size() const { return lanes; }
};

template <class Body>
inline __attribute__((always_inline)) void vectors(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Full{});
  if (i < n) body(i, Part{static_cast<int>(n - i)});
}

inline V splat(float x) { return x - V{}; }  // not V{} + x: that takes the sign of a negative zero

inline V load(const float* p, Full, float = 0) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, V v, Full) { std::memcpy(p, &v, sizeof v); }
#ifdef __AVX512F__
inline V load(const float* p, Part part, float fill = 0) {
  return (V)_mm512_mask_loadu_ps((__m512)splat(fill), static_cast<__mmask16>((1u << part.lanes) - 1), p);
}
inline void store(float* p, V v, Part part) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << part.lanes) - 1), (__m512)v);
}
#else
inline V load(const float* p, Part part, float fill = 0) {
  V v = splat(fill);
  std::memcpy(&v, p, static_cast<std::size_t>(part.lanes) * sizeof(float));
  return v;
}
inline void store(float* p, V v, Part part) {
  std::memcpy(p, &v, static_cast<std::size_t>(part.lanes) * sizeof(float));
}
#endif
// Low-precision elements as they lie in memory. Rounding is to nearest, ties to even; NaN stays NaN.
struct Bf16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};
typedef std::uint16_t Vh __attribute__((vector_size(32)));
typedef std::uint32_t Vu __attribute__((vector_size(64)));

inline V widen(Vh bits, Bf16) { return reinterpret_cast<V>(__builtin_convertvector(bits, Vu) << 16); }
inline Vh narrow(V v, Bf16) {
  const Vu bits = reinterpret_cast<Vu>(v);
  const Vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : (bits >> 16) | 0x40, Vh);
}
#ifdef __AVX512F__
inline V widen(Vh bits, Half) { return (V)_mm512_cvtph_ps((__m256i)bits); }
inline Vh narrow(V v, Half) { return (Vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
inline V widen(Vh bits, Half) {
  const Vu wide = __builtin_convertvector(bits, Vu), magnitude = (wide & 0x7fff) << 13;
  const Vu scaled = reinterpret_cast<Vu>(reinterpret_cast<V>(magnitude) * 0x1p112f);
  const Vu finite = magnitude < (0x7c00u << 13) ? scaled : magnitude | 0x7f800000;
  return reinterpret_cast<V>(finite | (wide & 0x8000) << 16);
}
inline Vh narrow(V v, Half) {
  const Vu bits = reinterpret_cast<Vu>(v), size = bits & 0x7fffffff;
  const Vu normal = (size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13;
  // Subnormal results: the sum with 1/2 rounds to multiples of 2^-24, the unit of the result.
  const Vu small = reinterpret_cast<Vu>(reinterpret_cast<V>(size) + 0.5f) - 0x3f000000;
  Vu half = size < 0x38800000 ? small : normal;
  half = size >= 0x477ff000 ? Vu{} + 0x7c00 : half;
  half = size > 0x7f800000 ? ((size >> 13) & 0x3ff) | 0x7e00 : half;
  return __builtin_convertvector(half | (bits >> 16 & 0x8000), Vh);
}
#endif

template <class T>
inline Vh load_bits(const T* p, int lanes, Vh bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if (lanes < kLanes) return (Vh)_mm256_mask_loadu_epi16((__m256i)bits, static_cast<__mmask16>((1u << lanes) - 1), p);
#endif
  std::memcpy(&bits, p, static_cast<std::size_t>(lanes) * sizeof(T));
  return bits;
}
template <class T>
inline V load_low(const T* p, int lanes, float fill) {
  return widen(load_bits(p, lanes, narrow(splat(fill), T{})), T{});
}
template <class T>
inline void store_low(T* p, V v, int lanes) {
  const Vh bits = narrow(v, T{});
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if (lanes < kLanes) return _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << lanes) - 1), (__m256i)bits);
#endif
  std::memcpy(p, &bits, static_cast<std::size_t>(lanes) * sizeof(T));
}
inline V load(const Bf16* p, Full, float = 0) { return load_low(p, kLanes, 0); }
inline V load(const Bf16* p, Part part, float fill = 0) { return load_low(p, part.lanes, fill); }
inline V load(const Half* p, Full, float = 0) { return load_low(p, kLanes, 0); }
inline V load(const Half* p, Part part, float fill = 0) { return load_low(p, part.lanes, fill); }
inline void store(Bf16* p, V v, Full) { store_low(p, v, kLanes); }
inline void store(Bf16* p, V v, Part part) { store_low(p, v, part.lanes); }
inline void store(Half* p, V v, Full) { store_low(p, v, kLanes); }
inline void store(Half* p, V v, Part part) { store_low(p, v, part.lanes); }

// Zero in the lanes outside the span.
inline V keep(V v, Full) { return v; }
inline V keep(V v, Part part) {
  constexpr Vi lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < part.lanes ? v : V{};
}

// Minus infinity in the lanes outside the span.
inline V outside(V v, Full) { return v; }
inline V outside(V v, Part part) {
  constexpr Vi lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < part.lanes ? v : splat(-std::numeric_limits<float>::infinity());
}

// b where it is the larger one or NaN, else a; likewise for the smaller one.
#ifdef __AVX512F__
inline V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
inline V smaller(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline V larger(V a, V b) { return a > b ? a : b; }
inline V smaller(V a, V b) { return a < b ? a : b; }
#endif

// Sums and maxima of the lanes, in one fixed order.
#if defined(__clang__) || __GNUC__ >= 12
#define ORTGRAPH_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define ORTGRAPH_SHUFFLE(v, ...) __builtin_shuffle(v, Vi{__VA_ARGS__})
#endif
inline V halves(V v) { return ORTGRAPH_SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
inline V quarters(V v) { return ORTGRAPH_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
inline V pairs(V v) { return ORTGRAPH_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
inline V neighbours(V v) { return ORTGRAPH_SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }
#undef ORTGRAPH_SHUFFLE

inline float sum(V v) {
  v += halves(v);
  v += quarters(v);
  v += pairs(v);
  v += neighbours(v);
  return v[0];
}
inline float largest(V v) {
  v = larger(v, halves(v));
  v = larger(v, quarters(v));
  v = larger(v, pairs(v));
  v = larger(v, neighbours(v));
  return v[0];
}

inline V magnitude(V x) { return reinterpret_cast<V>(reinterpret_cast<Vi>(x) & 0x7fffffff); }

// exp(r) - 1 for |r| at most log(2) / 2.
inline V exp_rest(V r) {
  V p = splat(1.98581270e-4f);
  p = p * r + 1.39344973e-3f;
  p = p * r + 8.33336171e-3f;
  p = p * r + 4.16664556e-2f;
  p = p * r + 1.66666672e-1f;
  p = p * r + 0.5f;
  return p * r * r + r;
}

// exp(high + low) for |low| much smaller than 1. Relative error below 1.2e-7, subnormal results included.
// Cody-Waite reduction to |r| <= ln(2)/2 and a polynomial fitted for least relative error.
inline V exp_sum(V high, V low) {
  high = smaller(splat(89.0f), larger(splat(-104.0f), high));
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded quotient
  const V shifted = (high + low) * 1.44269504f + magic;
  const V n = shifted - magic;
  V r = high - n * 0.693145751953125f;
  r = r - n * 1.42860677e-6f + low;
  V p = exp_rest(r) + 1.0f;
#ifdef __AVX512F__
  return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Vi exponent = reinterpret_cast<Vi>(shifted) - reinterpret_cast<Vi>(magic);
  const Vi half = exponent >> 1;
  p *= reinterpret_cast<V>((half + 127) << 23);
  return p * reinterpret_cast<V>((exponent - half + 127) << 23);
#endif
}

inline V exp(V x) { return exp_sum(x, V{}); }

inline V sigmoid(V x) { return 1.0f / (1.0f + exp(-x)); }

// s = sigmoid(x) and 1 - s, both with small relative error; x below -87 counts as -87.
struct Logistic {
  V s, rest;
};
inline Logistic logistic(V x) {
  const V e = exp(-larger(splat(-87.0f), x));
  const V s = 1.0f / (1.0f + e);
  return {s, e * s};
}

struct Normal {
  V cdf;      // Phi(x)
  V density;  // exp(-x^2 / 2), without the factor 1 / sqrt(2 pi)
};

// Relative error of Phi below 3e-7 down to where it underflows: Phi(-a) = exp(-a^2/2) P(q) / (1 + a) with
// q = (a - 4) / (a + 4); P is fitted to erfcx(a / sqrt(2)) (1 + a) / 2 for least relative error on 0 <= a <= 14.5.
inline Normal normal(V x) {
  V a = magnitude(x);
  a = smaller(splat(14.5f), a);
  // a^2 without rounding: the leading 12 bits squared are exact, the rest goes into the low part.
  const V lead = reinterpret_cast<V>(reinterpret_cast<Vi>(a) & ~0xfff);
  const V density = exp_sum(-0.5f * (lead * lead), -0.5f * ((a + lead) * (a - lead)));
  const V q = (a - 4.0f) / (a + 4.0f);
  V p = splat(-7.16119506e-05f);
  p = p * q - 6.05581131e-05f;
  p = p * q + 0.000692858744f;
  p = p * q - 0.000303759471f;
  p = p * q - 0.00500438198f;
  p = p * q + 0.0179402028f;
  p = p * q - 0.0321972696f;
  p = p * q + 0.0285999807f;
  p = p * q + 0.0139995961f;
  p = p * q - 0.0967034669f;
  p = p * q + 0.472053207f;
  const V tail = density * p / (1.0f + a);
  return {x > 0.0f ? 1.0f - tail : tail, density};
}

}  // namespace ortgraph
