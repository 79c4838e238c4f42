// Products of small matrices that lie in the nearest caches, and the packing that they want.
//
// A word is what one lane multiplies at a time: one float, or two bf16 neighbours along the inner dimension. Words are
// kept in memory as floats whatever their bits mean. A row of words is padded with zeros to whole words.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm_pack.h"
#include "gemm_tile.h"
#include "kernel.h"
#include "vector.h"

namespace ortgraph {

// Operands as float32.
struct Single {
  using Arithmetic = gemm::Single;
  static constexpr int kPair = 1;
  static constexpr gemm::Rounding kRounding = gemm::Rounding::kNone;
  static V round(V v) { return v; }
};

// Operands rounded to bf16, sums in float32.
struct Brain {
  using Arithmetic = gemm::Pair;
  static constexpr int kPair = Arithmetic::kDepth;
  static constexpr gemm::Rounding kRounding = gemm::Rounding::kBf16;
  static V round(V v) { return widen(narrow(v, Bf16{}), Bf16{}); }
};

// Sixteen words from two groups of sixteen numbers: neighbours along a row, or one above the other.
#ifdef __AVX512BF16__
inline V pair_along(V first, V second) {
  return (V)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
inline V pair_across(V upper, V lower) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)lower, (__m512)upper);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (V)_mm512_permutexvar_epi16(order, both);
}
#else
inline V pair_along(V first, V) { return first; }
inline V pair_across(V upper, V) { return upper; }
#endif

// Memory of a thread for the pieces that it works on, kept from run to run: what is given back to the system comes
// back as page faults, which cost more than a small product. A piece is made twice: the first round counts.
class Space {
 public:
  template <class Piece, class... Rest>
  static Piece make(Rest&... rest) {
    Space space;
    { const Piece counted(space, rest...); }
    thread_local Scratch<float> memory(0);
    thread_local std::size_t have = 0;
    if (have < space.used_) {
      memory = Scratch<float>(space.used_);
      have = space.used_;
    }
    space.used_ = 0;
    space.base_ = memory.data();
    return Piece(space, rest...);
  }
  float* take(std::int64_t count) {
    const std::size_t at = used_;
    used_ += static_cast<std::size_t>((std::max<std::int64_t>(count, 0) + kLanes - 1) / kLanes * kLanes);
    return base_ ? base_ + at : nullptr;
  }

 private:
  float* base_ = nullptr;
  std::size_t used_ = 0;
};

constexpr std::int64_t up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

template <class F>
constexpr std::int64_t words_of(std::int64_t n) {
  return (n + F::kPair - 1) / F::kPair;
}

// Where the words of an operand lie: element (i, p) at data[i * row + p * step].
struct Operand {
  const float* data;
  std::int64_t row, step;
};

inline const gemm::Word* as_words(const float* p) { return reinterpret_cast<const gemm::Word*>(p); }

// c[rows, 16 vectors] (+)= a[rows, k] b[k, 16 vectors], k in words.
template <class F>
void product(std::int64_t rows, std::int64_t vectors, std::int64_t k, Operand a, const float* b, std::int64_t b_row,
             float* c, std::int64_t c_row, bool add) {
  // Tiles of nearly equal height: a last one of one or two rows would wait for its sums.
  const std::int64_t count = (rows + gemm::kRows - 1) / gemm::kRows;
  for (std::int64_t n = 0; n < vectors; n += gemm::kVectors) {
    const int many = static_cast<int>(std::min<std::int64_t>(vectors - n, gemm::kVectors));
    for (std::int64_t i = 0, begin = 0; i < count; ++i) {
      const std::int64_t end = rows * (i + 1) / count;
      float* to = c + begin * c_row + n * kLanes;
      const gemm::Tile tile{as_words(a.data + begin * a.row), a.row, a.step, as_words(b + n * kLanes), b_row, k,
                            add ? to : nullptr, c_row, to, c_row};
      gemm::tile_of<typename F::Arithmetic, float>(static_cast<int>(end - begin), many)(tile);
      begin = end;
    }
  }
}

// A matrix in memory: rows of `width` elements, `stride` elements apart.
template <class T>
struct Rows {
  const T* data;
  std::int64_t width, stride;
  const T* row(std::int64_t i) const { return data + i * stride; }
};

inline Part part(std::int64_t left) { return Part{static_cast<int>(std::clamp<std::int64_t>(left, 0, kLanes))}; }

template <class T>
V load_up_to(const T* p, std::int64_t left) {
  return left >= kLanes ? load(p, Full{}) : left > 0 ? load(p, part(left)) : V{};
}

// Words from the elements at p, of which `left` are given.
template <class F, class T>
V words(const T* p, std::int64_t left) {
  const auto lanes = static_cast<int>(std::clamp<std::int64_t>(left, 0, 2 * kLanes));
  return reinterpret_cast<V>(gemm::words_along<typename F::Arithmetic>(p, lanes, F::kRounding));
}

// Transposes 16 by 16 words.
inline void turn(V* v) {
  Vu in[kLanes], out[kLanes];
  std::memcpy(in, v, sizeof in);
  gemm::transpose(in, out);
  std::memcpy(v, out, sizeof out);
}

// to[word, lane] = word of row `lane`, for `rows` rows padded with zeros to `lanes`, the row length of `to`.
template <class F, class T>
void pack_turned(const Rows<T>& x, std::int64_t first, std::int64_t rows, float* to, std::int64_t lanes) {
  const std::int64_t count = words_of<F>(x.width);
  for (std::int64_t r = 0; r < lanes; r += kLanes) {
    for (std::int64_t w = 0; w < count; w += kLanes) {
      V v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        v[i] = r + i < rows ? words<F>(x.row(first + r + i) + w * F::kPair, x.width - w * F::kPair) : V{};
      }
      turn(v);
      const std::int64_t many = std::min<std::int64_t>(kLanes, count - w);
      for (std::int64_t i = 0; i < many; ++i) store(to + (w + i) * lanes + r, v[i], Full{});
    }
  }
}

// to[i, column] = word of rows kPair i.. at a column: rows over the inner dimension; `width` is the row length of `to`.
template <class F, class T>
void pack_down(const Rows<T>& x, std::int64_t first, std::int64_t rows, float* to, std::int64_t width) {
  for (std::int64_t r = 0; r < rows; r += F::kPair, to += width) {
    const T *upper = x.row(first + r), *lower = upper + x.stride;
    const bool both = r + 1 < rows;
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const auto lanes = static_cast<int>(std::clamp<std::int64_t>(x.width - c, 0, kLanes));
      const T* next = both ? lower + c : nullptr;
      const Vu made = gemm::words_across<typename F::Arithmetic>(upper + c, next, lanes, F::kRounding);
      store(to + c, reinterpret_cast<V>(made), Full{});
    }
  }
}

// The rows as they are, in words; `width` is the row length of `to`, a multiple of 16.
template <class F, class T>
void pack_along(const Rows<T>& x, std::int64_t first, std::int64_t rows, float* to, std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r, to += width) {
    for (std::int64_t w = 0; w < width; w += kLanes) {
      store(to + w, words<F>(x.row(first + r) + w * F::kPair, x.width - w * F::kPair), Full{});
    }
  }
}

// Rows as left operand, without a copy where memory holds words already.
template <class F, class T>
Operand left_rows(const Rows<T>& x, std::int64_t first, std::int64_t rows, float* space) {
  constexpr bool low = F::kPair == 2 && std::is_same_v<T, Bf16>;
  constexpr bool same = low || (std::is_same_v<F, Single> && std::is_same_v<T, float>);
  if constexpr (same) {
    if (x.width % F::kPair == 0 && x.stride % F::kPair == 0 && reinterpret_cast<std::uintptr_t>(x.data) % 4 == 0) {
      return {reinterpret_cast<const float*>(x.row(first)), x.stride / F::kPair, 1};
    }
  }
  const std::int64_t width = up(words_of<F>(x.width), kLanes);
  pack_along<F>(x, first, rows, space, width);
  return {space, width, 1};
}

struct Right {
  const float* data;
  std::int64_t row;
};

// Rows as right operand, likewise.
template <class F, class T>
Right right_rows(const Rows<T>& x, std::int64_t first, std::int64_t rows, float* space) {
  if constexpr (std::is_same_v<F, Single> && std::is_same_v<T, float>) {
    if (x.width % kLanes == 0) return {x.row(first), x.stride};
  }
  const std::int64_t width = up(x.width, kLanes);
  pack_down<F>(x, first, rows, space, width);
  return {space, width};
}

}  // namespace ortgraph
