// Images with their channels last, as words for products: one float32, or two bf16 numbers that are added up together.
#pragma once

#include "gemm_pack.h"
#include "window.h"

namespace ortgraph {

// Rows become columns.
inline void turned(V (&rows)[kLanes]) {
#ifdef __AVX512F__
  Vu from[kLanes], to[kLanes];
  std::memcpy(from, rows, sizeof from);
  gemm::transpose(from, to);
  std::memcpy(rows, to, sizeof to);
#else
  transpose(rows);
#endif
}

inline Vu rounded_bits(V x) {
#ifdef __AVX512BF16__
  return __builtin_convertvector((Vh)_mm512_cvtneps_pbh((__m512)x), Vu);
#else
  return __builtin_convertvector(narrow(x, Bf16{}), Vu);
#endif
}

// Numbers as bf16, each in the lower half of a word.
inline Vu low_bits(const float* p, int lanes) {
  return rounded_bits(lanes == kLanes ? load(p, Full{}) : load(p, Part{lanes}));
}
inline Vu low_bits(const Bf16* p, int lanes) { return __builtin_convertvector(load_bits(p, lanes, Vh{}), Vu); }

// Sixteen words, from numbers in registers or in memory; `odd` counts for pairs only and may be null.
template <int kDepth>
struct Words;
template <>
struct Words<1> {
  static Vu of(V x, V, bool round) { return reinterpret_cast<Vu>(round ? widen(narrow(x, Bf16{}), Bf16{}) : x); }
  template <class T>
  static Vu at(const T* x, const T*, int lanes, bool round) {
    return of(lanes == kLanes ? load(x, Full{}) : load(x, Part{lanes}), V{}, round);
  }
};
template <>
struct Words<2> {
  static Vu of(V even, V odd, bool) { return rounded_bits(even) | rounded_bits(odd) << 16; }
  template <class T>
  static Vu at(const T* even, const T* odd, int lanes, bool) {
    const Vu first = low_bits(even, lanes);
    return odd ? first | low_bits(odd, lanes) << 16 : first;
  }
};

inline void store_words(gemm::Word* to, Vu words, std::int64_t count) {
  float* const at = reinterpret_cast<float*>(to);
  if (count >= kLanes) store(at, reinterpret_cast<V>(words), Full{});
  else store(at, reinterpret_cast<V>(words), Part{static_cast<int>(count)});
}

// Pixels [0, count) from planes: word w of pixel i comes from even[w * step + i] and odd[w * step + i], goes to
// to[i * pitch + w]. The first `pairs` of `words` have an odd number, the others zero.
template <int kDepth, class T>
void turn_words(const T* even, const T* odd, std::int64_t step, std::int64_t words, std::int64_t pairs,
                std::int64_t count, bool round, gemm::Word* to, std::int64_t pitch) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int width = static_cast<int>(std::min<std::int64_t>(kLanes, count - i));
    for (std::int64_t w = 0; w < words; w += kLanes) {
      const std::int64_t height = std::min<std::int64_t>(kLanes, words - w);
      V rows[kLanes] = {};
      for (std::int64_t r = 0; r < height; ++r) {
        const std::int64_t at = (w + r) * step + i;
        const T* second = kDepth == 2 && w + r < pairs ? odd + at : nullptr;
        rows[r] = reinterpret_cast<V>(Words<kDepth>::at(even + at, second, width, round));
      }
      turned(rows);
      for (int j = 0; j < width; ++j) store_words(to + (i + j) * pitch + w, reinterpret_cast<Vu>(rows[j]), height);
    }
  }
}

// `count` pixels of `channels` planes from element `at` on: pairs of channels.
template <int kDepth>
void turn_channels(const Tensor& x, std::int64_t at, std::int64_t plane, std::int64_t channels, std::int64_t count,
                   bool round, gemm::Word* to, std::int64_t pitch) {
  const auto turn_from = [&](const auto* from) {
    turn_words<kDepth>(from, from + plane, kDepth * plane, (channels + kDepth - 1) / kDepth, channels / kDepth, count,
                       round, to, pitch);
  };
  if (count <= 0) return;
  if (x.type == kBfloat16) return turn_from(static_cast<const Bf16*>(x.raw) + at);
  turn_from(x.floats() + at);
}

// The same with pairs of images, `apart` elements from each other; `both`: there is a second one.
template <int kDepth>
void turn_in_pairs(const Tensor& x, std::int64_t at, std::int64_t apart, bool both, std::int64_t plane,
                   std::int64_t channels, std::int64_t count, bool round, gemm::Word* to, std::int64_t pitch) {
  const auto turn_from = [&](const auto* from) {
    turn_words<kDepth>(from, from + (both ? apart : 0), plane, channels, both ? channels : 0, count, round, to, pitch);
  };
  if (count <= 0) return;
  if (x.type == kBfloat16) return turn_from(static_cast<const Bf16*>(x.raw) + at);
  turn_from(x.floats() + at);
}

}  // namespace ortgraph
