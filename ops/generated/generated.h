// What generated kernels are written with, beside the headers of ops/kernels.
//
// A value of a row is held as sixteen floats (V) or sixteen choices (Mask: all bits or none). `get` and `put` move one
// group of lanes between memory and registers; lanes outside a span are neither read nor written.
#pragma once

#include <cmath>

#include "functions.h"
#include "generator.h"
#include "reduction.h"
#include "vector.h"

namespace ortgraph {

typedef Vi Mask;
typedef std::uint8_t Vb __attribute__((vector_size(16)));

constexpr std::int64_t kTile = 4096;     // elements of a row that are worked on at a time
constexpr std::int64_t kInlineRow = 4096;  // longest row whose intermediate values lie on the stack

// body(i, span) for each group of lanes in columns [from, to).
template <class Body>
inline __attribute__((always_inline)) void columns(std::int64_t from, std::int64_t to, const Body& body) {
  std::int64_t i = from;
  for (; i + kLanes <= to; i += kLanes) body(i, Full{});
  if (i < to) body(i, Part{static_cast<int>(to - i)});
}

template <class T, class Span>
inline V get(const T* p, Span span) {
  return load(p, span);
}
template <class T, class Span>
inline void put(T* p, V v, Span span) {
  store(p, v, span);
}
#ifdef __AVX512F__
inline V get(const float* p, Part part) {
  return (V)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << part.lanes) - 1), p);
}
inline void put(float* p, V v, Part part) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << part.lanes) - 1), (__m512)v);
}
#endif
template <class Span>
inline Mask get(const bool* p, Span span) {
  Vb bytes{};
  std::memcpy(&bytes, p, static_cast<std::size_t>(span.size()));
  return __builtin_convertvector(bytes, Vi) != 0;
}
template <class Span>
inline void put(bool* p, Mask m, Span span) {
  const Vb bytes = __builtin_convertvector(m & 1, Vb);
  std::memcpy(p, &bytes, static_cast<std::size_t>(span.size()));
}
template <class Span>
inline Mask get(const std::int32_t* p, Span span) {
  Mask m{};
  std::memcpy(&m, p, static_cast<std::size_t>(span.size()) * sizeof(std::int32_t));
  return m;
}

inline V one(const float* p) { return splat(*p); }
inline V one(const Bf16* p) { return splat(load(p, Part{1})[0]); }
inline V one(const Half* p) { return splat(load(p, Part{1})[0]); }
inline V one(const std::int64_t* p) { return splat(static_cast<float>(*p)); }
inline Mask one(const bool* p) { return Mask{} - static_cast<std::int32_t>(*p); }
inline void put_one(float* p, V v) { *p = v[0]; }
inline void put_one(Bf16* p, V v) { store(p, v, Part{1}); }
inline void put_one(Half* p, V v) { store(p, v, Part{1}); }
inline void put_one(bool* p, Mask m) { *p = m[0] != 0; }

inline V select(Mask m, V a, V b) { return m ? a : b; }
inline Mask select(Mask m, Mask a, Mask b) { return (m & a) | (~m & b); }
inline Mask select_mask(Mask m, Mask a, Mask b) { return (m & a) | (~m & b); }
inline V indicator(Mask m) { return m ? splat(1.0f) : V{}; }
inline V as_bf16(V v) { return widen(narrow(v, Bf16{}), Bf16{}); }
inline V as_half(V v) { return widen(narrow(v, Half{}), Half{}); }

// The greater and the lesser number; NaN when either is.
inline V maximum(V a, V b) { return (a > b) | (a != a) ? a : b; }
inline V minimum(V a, V b) { return (a < b) | (a != a) ? a : b; }

inline V clip_low(V x, V low) { return x < low ? low : x; }
inline V clip_high(V x, V high) { return x > high ? high : x; }
inline Mask equals(V a, V b) { return a == b; }
inline Mask equals(Mask a, Mask b) { return ~(a ^ b); }

// Lanes outside a span become what does not count.
inline V min_outside(V v, Full) { return v; }
inline V min_outside(V v, Part part) { return -outside(-v, part); }
template <class Span>
inline V max_outside(V v, Span span) {
  return outside(v, span);
}
inline float max_of(V v) {
  v = maximum(v, halves(v));
  v = maximum(v, quarters(v));
  v = maximum(v, pairs(v));
  return maximum(v, neighbours(v))[0];
}
inline V peak_outside(V v, Full) { return v; }
inline V peak_outside(V v, Part part) { return outside(v, part); }
inline float peak_of(V v) { return largest(v); }
inline float min_of(V v) {
  v = minimum(v, halves(v));
  v = minimum(v, quarters(v));
  v = minimum(v, pairs(v));
  return minimum(v, neighbours(v))[0];
}

#ifdef __AVX512F__
template <int mode>
inline V rounded(V x) { return (V)_mm512_roundscale_ps((__m512)x, mode); }
inline V round_down(V x) { return rounded<_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC>(x); }
inline V round_up(V x) { return rounded<_MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC>(x); }
inline V round_even(V x) { return rounded<_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC>(x); }
#else
inline V round_down(V x) { return lanes(x, [](float a) { return std::floor(a); }); }
inline V round_up(V x) { return lanes(x, [](float a) { return std::ceil(a); }); }
inline V round_even(V x) { return lanes(x, [](float a) { return std::nearbyint(a); }); }
#endif

inline V power(V x, V y) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::pow(x[i], y[i]);
  return x;
}
inline V sine(V x) { return lanes(x, [](float a) { return std::sin(a); }); }
inline V cosine(V x) { return lanes(x, [](float a) { return std::cos(a); }); }
inline V sign(V x) { return x > 0.0f ? splat(1.0f) : x < 0.0f ? splat(-1.0f) : x; }

// log(1 + x) without cancellation: Kahan's correction of the rounded sum.
inline V log_one_plus(V x) {
  const V u = 1.0f + x;
  const V y = logarithm(u) * (x / (u - 1.0f));
  return (u == 1.0f) | (u == std::numeric_limits<float>::infinity()) ? x : y;
}
inline V softplus(V x) { return maximum(x, V{}) + log_one_plus(exp(-magnitude(x))); }

// tanh(x): a continued fraction up to 0.625, beyond it (1 - e) / (1 + e) with e = exp(-2 |x|).
inline V hyperbolic_tangent(V x) {
  const V a = magnitude(x), z = x * x;
  const V small = x * (135135.0f + z * (17325.0f + z * (378.0f + z))) /
                  (135135.0f + z * (62370.0f + z * (3150.0f + z * 28.0f)));
  const V e = exp(-2.0f * a);
  const V large = (1.0f - e) / (1.0f + e);
  const Mask sign_bit = reinterpret_cast<Vi>(x) & static_cast<std::int32_t>(0x80000000);
  const V signed_large = reinterpret_cast<V>(reinterpret_cast<Vi>(large) | sign_bit);
  return a < 0.625f ? small : signed_large;
}

constexpr float kDensity = 0.398942280f;     // 1 / sqrt(2 pi)
constexpr float kTwiceTanh = 1.59576912f;    // 2 sqrt(2 / pi)
constexpr float kTwiceCubic = 0.0713548163f;  // 2 * 0.044715 sqrt(2 / pi)
inline V gelu(V x) { return x * normal(x).cdf; }
inline V gelu_slope(V x) {
  const Normal n = normal(x);
  return n.cdf + x * n.density * kDensity;
}
inline V gelu_tanh(V x) { return x * sigmoid(x * (kTwiceTanh + kTwiceCubic * (x * x))); }
inline V gelu_tanh_slope(V x) {
  const V square = x * x;
  const Logistic l = logistic(x * (kTwiceTanh + kTwiceCubic * square));
  return l.s + x * l.s * l.rest * (kTwiceTanh + 3.0f * kTwiceCubic * square);
}
inline V silu_slope(V x) {
  const Logistic l = logistic(x);
  return l.s * (1.0f + x * l.rest);
}

// Offset of a row in an input that repeats along some of the leading dimensions: `sizes` are their lengths, `strides`
// what one step along each adds.
template <std::size_t n>
inline std::int64_t row_offset(std::int64_t row, const std::int64_t (&sizes)[n], const std::int64_t (&strides)[n]) {
  std::int64_t offset = 0;
  for (std::size_t d = n; d-- > 1;) {
    const std::int64_t next = row / sizes[d];
    offset += (row - next * sizes[d]) * strides[d];
    row = next;
  }
  return offset + row * strides[0];
}

// The same offset, from row to row.
template <std::size_t n>
class Walk {
 public:
  Walk(std::int64_t row, const std::int64_t (&sizes)[n], const std::int64_t (&strides)[n])
      : sizes_(sizes), strides_(strides), offset_(row_offset(row, sizes, strides)) {
    for (std::size_t d = n; d-- > 0;) {
      const std::int64_t size = d ? sizes[d] : row + 1;
      index_[d] = row % size;
      row /= size;
    }
  }
  std::int64_t offset() const { return offset_; }
  void next() {
    for (std::size_t d = n; d-- > 0;) {
      offset_ += strides_[d];
      if (++index_[d] < sizes_[d] || d == 0) return;
      offset_ -= strides_[d] * sizes_[d];
      index_[d] = 0;
    }
  }

 private:
  const std::int64_t (&sizes_)[n];
  const std::int64_t (&strides_)[n];
  std::int64_t index_[n];
  std::int64_t offset_;
};

// Words drawn for `count` elements from element `first` on.
inline void draw_words(const Generator& generator, std::int64_t first, std::int64_t count, std::int32_t* words) {
  for (std::int64_t at = first; at < first + count;) {
    const std::int64_t column = at % kDraws;
    const std::int64_t n = std::min(kDraws - column, first + count - at);
    generator.part(at / kDraws, column, column + n, words + (at - first) - column);
    at += n;
  }
}
inline Mask kept(Mask words, const Threshold& threshold) {
  return threshold.none ? Mask{} : words >= threshold.word;
}
inline V uniform(Mask words) { return __builtin_convertvector(words >> 8, V) * 0x1p-24f + 0.5f; }

// Intermediate rows of one piece of work, on the stack when they are short.
template <std::size_t rows>
class Workspace {
 public:
  explicit Workspace(std::int64_t width)
      : stride_((width + kLanes - 1) / kLanes * kLanes),
        heap_(width > kInlineRow ? static_cast<std::size_t>(stride_) * rows : 0),
        data_(width > kInlineRow ? heap_.data() : inline_) {}
  float* row(std::size_t i) { return data_ + static_cast<std::int64_t>(i) * stride_; }
  std::int32_t* words(std::size_t i) { return reinterpret_cast<std::int32_t*>(row(i)); }

 private:
  std::int64_t stride_;
  Scratch<float> heap_;
  alignas(64) float inline_[rows * kInlineRow];
  float* data_;
};

inline const void* data_of(const Context& context, std::size_t index, std::int64_t count) {
  const Tensor tensor = context.input(index);
  expect(tensor && tensor.shape.count() == count, "an input has another size than the graph says");
  return tensor.raw;
}

}  // namespace ortgraph
