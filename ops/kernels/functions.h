// Functions of sixteen floats that ONNX Runtime's own kernels lose digits of, and what they are made of.
#pragma once

#include <cmath>

#include "vector.h"

namespace ortgraph {

template <class Function>
inline V lanes(V x, const Function& f) {
  for (int i = 0; i < kLanes; ++i) x[i] = f(x[i]);
  return x;
}
#ifdef __AVX512F__
inline V root(V x) { return (V)_mm512_sqrt_ps((__m512)x); }
#else
inline V root(V x) { return lanes(x, [](float a) { return std::sqrt(a); }); }
#endif

// log(x): x = 2^e m with sqrt(1/2) <= m < sqrt(2), log m = 2 atanh(s), s = (m - 1) / (m + 1), by its series. Relative
// error below 2e-7; 0 gives -infinity, negative numbers NaN.
inline V logarithm(V x) {
  const Vi tiny = x < 1.17549435e-38f;
  const V scaled = tiny ? x * 8388608.0f : x;
  Vi bits = reinterpret_cast<Vi>(scaled) - 0x3f3504f3;
  const Vi exponent = bits >> 23;
  const V m = reinterpret_cast<V>((bits & 0x7fffff) + 0x3f3504f3);
  const V e = __builtin_convertvector(exponent, V) - (tiny ? splat(23.0f) : V{});
  const V s = (m - 1.0f) / (m + 1.0f), z = s * s;
  V p = splat(1.0f / 9.0f);
  p = p * z + 1.0f / 7.0f;
  p = p * z + 1.0f / 5.0f;
  p = p * z + 1.0f / 3.0f;
  const V twice = s + s;
  V y = e * 0.693145752f + (twice + (twice * z * p + e * 1.42860677e-06f));
  y = x == std::numeric_limits<float>::infinity() ? x : y;
  y = x == 0.0f ? splat(-std::numeric_limits<float>::infinity()) : y;
  return (x < 0.0f) | (x != x) ? splat(std::numeric_limits<float>::quiet_NaN()) : y;
}

// erf(x): its series up to 0.9, beyond it 1 - 2 Phi(-sqrt(2) |x|).
inline V error_function(V x) {
  const V a = magnitude(x), z = x * x;
  V p = splat(-1.0f / 6894720.0f);
  p = p * z + 1.0f / 685440.0f;
  p = p * z - 1.0f / 75600.0f;
  p = p * z + 1.0f / 9360.0f;
  p = p * z - 1.0f / 1320.0f;
  p = p * z + 1.0f / 216.0f;
  p = p * z - 1.0f / 42.0f;
  p = p * z + 1.0f / 10.0f;
  p = p * z - 1.0f / 3.0f;
  const V small = 1.12837917f * (x + x * z * p);
  const V large = 1.0f - 2.0f * normal(-1.41421356f * a).cdf;
  const Vi sign_bit = reinterpret_cast<Vi>(x) & static_cast<std::int32_t>(0x80000000);
  const V signed_large = reinterpret_cast<V>(reinterpret_cast<Vi>(large) | sign_bit);
  return a < 0.9f ? small : signed_large;
}


// exp(x) - 1 for x <= 0, without cancellation: with x = n log 2 + r it is 2^n (exp(r) - 1) + (2^n - 1).
inline V exp_minus_one(V x) {
  const V bounded = larger(splat(-40.0f), x);  // exp(x) is below the digits of 1 there
  const V magic = splat(12582912.0f);
  const V shifted = bounded * 1.44269504f + magic;
  const V n = shifted - magic;
  const V r = bounded - n * 0.693145751953125f - n * 1.42860677e-6f;
  const V p = exp_rest(r);
  const Vi exponent = reinterpret_cast<Vi>(shifted) - reinterpret_cast<Vi>(magic);
  const V power = reinterpret_cast<V>((exponent + 127) << 23);
  const V y = power * p + (power - 1.0f);
  return (x == 0.0f) | (x != x) ? x : y;
}

}  // namespace ortgraph
