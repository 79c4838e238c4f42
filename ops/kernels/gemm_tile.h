// The innermost part of blocked products (gemm.h): a tile of sums in registers.
//
// Operands are 32-bit words, one for each step of k: a float32, or two bfloat16 that lie side by side along k.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <cstring>

#include "vector.h"

namespace ortgraph {
namespace gemm {

using Word = std::uint32_t;

#ifdef __AVX512F__
constexpr int kVectors = 4;  // vectors of a panel: 6 x 4 sums, 4 operands and a broadcast fill 32 registers
#else
constexpr int kVectors = 1;  // 6 x 16 sums fill the registers of AVX2 (as 12) and of NEON (as 24)
#endif
constexpr int kColumns = kVectors * kLanes;  // of a panel of B
constexpr int kRows = 6;                     // of a tile of sums
constexpr int kPanelRows = 48;               // of a panel of A: whole tiles and whole vectors

// How a step multiplies: `Single` one float32 product, `Pair` two bfloat16 products, both added to float32.
struct Single {
  static constexpr int kDepth = 1;
  static V multiply_add(V sum, const Word* a, V b) {
    float x;
    std::memcpy(&x, a, sizeof x);
    return sum + x * b;
  }
};
#ifdef __AVX512BF16__
struct Pair {
  static constexpr int kDepth = 2;
  static V multiply_add(V sum, const Word* a, V b) {
    int pair;
    std::memcpy(&pair, a, sizeof pair);
    return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
  }
};
#else
using Pair = Single;  // packing rounds to bfloat16 and widens again
#endif

// Sums of R rows and N vectors of columns: row r reads a[r * row_step + s * step], step s reads b + s * b_step.
struct Tile {
  const Word* a;
  std::int64_t row_step, step;
  const Word* b;
  std::int64_t b_step, steps;
  const float* from;        // what the sums start from; null for zeros
  std::int64_t from_width;  // from one row to the next
  void* to;
  std::int64_t width;
};

inline void store_rounded(float* p, V x) { store(p, x, Full{}); }
// The processor's own rounding, where it has one: subnormal results become zero, as they do in its products.
inline void store_rounded(Bf16* p, V x) {
#ifdef __AVX512BF16__
  const __m256bh bits = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &bits, sizeof bits);
#else
  store(p, x, Full{});
#endif
}

template <class Arithmetic, class T, int R, int N>
void multiply(const Tile& t) {
  V sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) sum[r][v] = t.from ? load(t.from + r * t.from_width + v * kLanes, Full{}) : V{};
  }
  const Word* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = t.a + r * t.row_step;
  const Word* b = t.b;
  std::int64_t at = 0;
  for (std::int64_t s = 0; s < t.steps; ++s, at += t.step, b += t.b_step) {
    V column[N];
    for (int v = 0; v < N; ++v) std::memcpy(&column[v], b + v * kLanes, sizeof(V));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sum[r][v] = Arithmetic::multiply_add(sum[r][v], rows[r] + at, column[v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) store_rounded(static_cast<T*>(t.to) + r * t.width + v * kLanes, sum[r][v]);
  }
}

using Multiply = void (*)(const Tile&);

template <class Arithmetic, class T, int R>
constexpr Multiply of_rows(int vectors) {
#ifdef __AVX512F__
  constexpr Multiply all[] = {multiply<Arithmetic, T, R, 1>, multiply<Arithmetic, T, R, 2>,
                              multiply<Arithmetic, T, R, 3>, multiply<Arithmetic, T, R, 4>};
#else
  constexpr Multiply all[] = {multiply<Arithmetic, T, R, 1>};
#endif
  return all[vectors - 1];
}

// The tile of 1 to 6 rows and 1 to kVectors vectors that leaves elements of type T.
template <class Arithmetic, class T>
Multiply tile_of(int rows, int vectors) {
  constexpr Multiply (*all[])(int) = {of_rows<Arithmetic, T, 1>, of_rows<Arithmetic, T, 2>, of_rows<Arithmetic, T, 3>,
                                      of_rows<Arithmetic, T, 4>, of_rows<Arithmetic, T, 5>, of_rows<Arithmetic, T, 6>};
  return all[rows - 1](vectors);
}

}  // namespace gemm
}  // namespace ortgraph
