// Operands of blocked products (gemm.h): dense matrices of any element type, read where they lie or packed.
#pragma once

#include "gemm_tile.h"

namespace ortgraph {
namespace gemm {

enum class Rounding { kNone, kBf16, kHalf };

// Rows of A as a tile reads them: row m begins at `at + m / 48 * panel + m % 48 * row_step`, its next step is `step` on.
struct Rows {
  const Word* at;
  std::int64_t row_step, step, panel;
  const Word* row(std::int64_t m) const { return at + m / kPanelRows * panel + m % kPanelRows * row_step; }
};
// A panel of B: step s at `at + s * step`.
struct Columns {
  const Word* at;
  std::int64_t step;
};

inline V rounded(V x, Rounding rounding) {
  if (rounding == Rounding::kBf16) return widen(narrow(x, Bf16{}), Bf16{});
  if (rounding == Rounding::kHalf) return widen(narrow(x, Half{}), Half{});
  return x;
}

template <class T>
V load_lanes(const T* p, int lanes) {
  if (lanes >= kLanes) return load(p, Full{});
  if (lanes <= 0) return V{};
#if defined(__AVX512BW__) && defined(__AVX512VL__)  // a copy of a length that is not known is a call
  const auto mask = static_cast<__mmask16>((1u << lanes) - 1);
  if constexpr (std::is_same_v<T, float>) {
    return (V)_mm512_maskz_loadu_ps(mask, p);
  } else {
    return widen((Vh)_mm256_maskz_loadu_epi16(mask, p), T{});
  }
#endif
  return load(p, Part{lanes});
}

// Sixteen words of one row: `lanes` elements that lie side by side along k, then zeros.
template <class Arithmetic, class T>
inline __attribute__((always_inline)) Vu words_along(const T* p, int lanes, Rounding rounding) {
#ifdef __AVX512BF16__
  if constexpr (Arithmetic::kDepth == 2) {
    Vu words{};
    if constexpr (std::is_same_v<T, Bf16>) {
      if (lanes >= 2 * kLanes) {
        std::memcpy(&words, p, sizeof words);
      } else {
        std::memcpy(&words, p, static_cast<std::size_t>(lanes) * sizeof(T));
      }
      return words;
    }
    const V low = load_lanes(p, lanes), high = load_lanes(p + kLanes, lanes - kLanes);
    return (Vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }
#endif
  return reinterpret_cast<Vu>(rounded(load_lanes(p, lanes), rounding));
}

// The words of one step for `lanes` columns that lie side by side; `next` are the elements one further along k, or null.
template <class Arithmetic, class T>
inline __attribute__((always_inline)) Vu words_across(const T* p, const T* next, int lanes, Rounding rounding) {
#ifdef __AVX512BF16__
  if constexpr (Arithmetic::kDepth == 2) {
    const V low = load_lanes(p, lanes), high = next ? load_lanes(next, lanes) : V{};
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Vu)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  }
#endif
  return reinterpret_cast<Vu>(rounded(load_lanes(p, lanes), rounding));
}

// Whole vectors of one step: as many of the `width` columns as the fastest form takes. Returns how many.
template <class Arithmetic, class T>
inline __attribute__((always_inline)) int whole_words(const T* p, const T* next, int width, Rounding rounding, Word* to) {
  int i = 0;
#ifdef __AVX512BF16__
  if constexpr (Arithmetic::kDepth == 2 && std::is_same_v<T, Bf16>) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
      const __m512i low = _mm512_loadu_si512(p + i);
      const __m512i high = next ? _mm512_loadu_si512(next + i) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(low, first, high));
      _mm512_storeu_si512(to + i + kLanes, _mm512_permutex2var_epi16(low, second, high));
    }
    return i;
  }
#endif
  for (; i + kLanes <= width; i += kLanes) {
    const Vu words = words_across<Arithmetic>(p + i, next ? next + i : nullptr, kLanes, rounding);
    std::memcpy(to + i, &words, sizeof words);
  }
  return i;
}

// Sixteen rows of sixteen words become columns.
inline void transpose(const Vu (&in)[kLanes], Vu (&out)[kLanes]) {
#ifdef __AVX512F__
  __m512i pair[kLanes], four[kLanes], half[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    pair[i] = _mm512_unpacklo_epi32((__m512i)in[i], (__m512i)in[i + 1]);
    pair[i + 1] = _mm512_unpackhi_epi32((__m512i)in[i], (__m512i)in[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 2; ++j) {
      four[i + 2 * j] = _mm512_unpacklo_epi64(pair[i + j], pair[i + j + 2]);
      four[i + 2 * j + 1] = _mm512_unpackhi_epi64(pair[i + j], pair[i + j + 2]);
    }
  }
  for (int i = 0; i < kLanes; i += 8) {
    for (int j = 0; j < 4; ++j) {
      half[i + j] = _mm512_shuffle_i32x4(four[i + j], four[i + j + 4], 0x88);
      half[i + j + 4] = _mm512_shuffle_i32x4(four[i + j], four[i + j + 4], 0xdd);
    }
  }
  for (int j = 0; j < 8; ++j) {
    out[j] = (Vu)_mm512_shuffle_i32x4(half[j], half[j + 8], 0x88);
    out[j + 8] = (Vu)_mm512_shuffle_i32x4(half[j], half[j + 8], 0xdd);
  }
#else
  Word words[kLanes][kLanes];
  std::memcpy(words, in, sizeof words);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) out[i][j] = words[j][i];
  }
#endif
}

// A dense matrix: element (i, k) at data[i * stride + k] when it lies along k, else at data[k * stride + i].
template <class Arithmetic, class T>
struct Dense {
  const T* data;
  std::int64_t stride;
  bool along_k;
  Rounding rounding;

  // Whether the words lie in memory as a tile reads them.
  static constexpr bool kWords = Arithmetic::kDepth == 2 ? std::is_same_v<T, Bf16> : std::is_same_v<T, float>;
  bool in_place(std::int64_t kn) const {
    return kWords && (Arithmetic::kDepth == 2 || rounding == Rounding::kNone) && kn % Arithmetic::kDepth == 0;
  }

  bool rows_in_place(std::int64_t kn) const {
    return along_k ? in_place(kn) && stride % Arithmetic::kDepth == 0 : across_in_place(kn);
  }
  // Whether steps of k are read where they lie: so near to one another that they do not compete for lines of the caches.
  bool across_in_place(std::int64_t kn) const {
    const std::int64_t bytes = stride * static_cast<std::int64_t>(sizeof(T));
    return !along_k && Arithmetic::kDepth == 1 && in_place(kn) && bytes <= 4096 && (bytes & -bytes) <= 1024;
  }
  std::int64_t space_words(std::int64_t mn, std::int64_t kn) const {
    const std::int64_t steps = (kn + Arithmetic::kDepth - 1) / Arithmetic::kDepth;
    if (!along_k) return (mn + kPanelRows - 1) / kPanelRows * kPanelRows * steps;
    return mn * row_words(steps);
  }
  __attribute__((noinline)) Rows rows(std::int64_t m0, std::int64_t mn, std::int64_t k0, std::int64_t kn, Word* space) const {
    const std::int64_t steps = (kn + Arithmetic::kDepth - 1) / Arithmetic::kDepth;
    if (across_in_place(kn)) {
      return {reinterpret_cast<const Word*>(data + k0 * stride + m0), 1, stride, kPanelRows};
    }
    if (!along_k) {
      for (std::int64_t m = 0; m < mn; m += kPanelRows) {
        pack(m0 + m, std::min<std::int64_t>(kPanelRows, mn - m), k0, kn, kPanelRows, space + m * steps);
      }
      return {space, 1, kPanelRows, kPanelRows * steps};
    }
    if (rows_in_place(kn)) {
      const std::int64_t step = stride / Arithmetic::kDepth;
      return {reinterpret_cast<const Word*>(data + m0 * stride + k0), step, 1, kPanelRows * step};
    }
    const std::int64_t width = row_words(steps);
    for (std::int64_t m = 0; m < mn; ++m) {
      const T* row = data + (m0 + m) * stride + k0;
      Word* to = space + m * width;
      for (std::int64_t s = 0; s < steps; s += kLanes) {
        const std::int64_t k = s * Arithmetic::kDepth;
        const Vu words = words_along<Arithmetic>(row + k, static_cast<int>(std::min<std::int64_t>(kn - k, 64)), rounding);
        std::memcpy(to + s, &words, sizeof words);
      }
    }
    return {space, width, 1, kPanelRows * width};
  }
  // Whole vectors, and not a multiple of the distance at which cache lines compete.
  static std::int64_t row_words(std::int64_t steps) {
    const std::int64_t whole = (steps + kLanes - 1) / kLanes * kLanes;
    return whole % 64 == 0 ? whole + kLanes : whole;
  }

  Columns panel(std::int64_t n0, std::int64_t nn, std::int64_t k0, std::int64_t kn, int width, bool once,
                Word* space) const {
    if (nn == width && (across_in_place(kn) || (once && !along_k && Arithmetic::kDepth == 1 && in_place(kn)))) {
      return {reinterpret_cast<const Word*>(data + k0 * stride + n0), stride};
    }
    pack(n0, nn, k0, kn, width, space);
    return {space, width};
  }

  // Rows far apart are not foreseen by the processor. Addresses beyond the matrix do no harm.
  static constexpr std::int64_t kAhead = 16;
  static void fetch(const T* p, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += 64 / static_cast<std::int64_t>(sizeof(T))) __builtin_prefetch(p + i);
  }

  // Words of elements [i0, i0 + in), `width` a step (a multiple of 16), zeros beyond the end.
  __attribute__((noinline)) void pack(std::int64_t i0, std::int64_t in, std::int64_t k0, std::int64_t kn, int width, Word* to) const {
    const std::int64_t steps = (kn + Arithmetic::kDepth - 1) / Arithmetic::kDepth;
    if (along_k) return pack_along(i0, in, k0, kn, steps, width, to);
    for (std::int64_t s = 0; s < steps; ++s) {
      const std::int64_t k = k0 + s * Arithmetic::kDepth;  // the last step of an odd block has one element
      const T* p = data + k * stride + i0;
      const T* next = k + 1 < k0 + kn ? p + stride : nullptr;
      fetch(p + kAhead * stride, in);
      if (next) fetch(next + kAhead * stride, in);
      int i = in == width ? whole_words<Arithmetic>(p, next, width, rounding, to + s * width) : 0;
      for (; i < width; i += kLanes) {
        const Vu words = words_across<Arithmetic>(p + i, next ? next + i : nullptr, static_cast<int>(in) - i, rounding);
        std::memcpy(to + s * width + i, &words, sizeof words);
      }
    }
  }

  __attribute__((noinline)) void pack_along(std::int64_t i0, std::int64_t in, std::int64_t k0, std::int64_t kn, std::int64_t steps, int width,
                  Word* to) const {
    for (int i = 0; i < width; i += kLanes) {
      for (std::int64_t s = 0; s < steps; s += kLanes) {
        Vu in_words[kLanes], out_words[kLanes];
        const std::int64_t k = s * Arithmetic::kDepth;
        const int lanes = static_cast<int>(std::min<std::int64_t>(kn - k, 64));
        for (int r = 0; r < kLanes; ++r) {
          in_words[r] = i + r < in ? words_along<Arithmetic>(data + (i0 + i + r) * stride + k0 + k, lanes, rounding) : Vu{};
        }
        transpose(in_words, out_words);
        const std::int64_t count = std::min<std::int64_t>(kLanes, steps - s);
        for (std::int64_t r = 0; r < count; ++r) std::memcpy(to + (s + r) * width + i, &out_words[r], sizeof(Vu));
      }
    }
  }
};

}  // namespace gemm
}  // namespace ortgraph
