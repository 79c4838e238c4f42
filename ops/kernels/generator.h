// The generator of ops/random.py, bit for bit.
#pragma once

#include <cmath>

#include "kernel.h"

namespace ortgraph {

constexpr std::int64_t kDraws = 256;  // elements that share one 64-bit state
constexpr std::uint64_t kKey = 0x9E3779B97F4A7C15, kStep = 0xD1B54A32D192ED03, kNode = 0x8CB92BA72F3D8DD7,
                        kRow = 0xAEF17502108EF2D9;

constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 32)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 29)) * 0x94D049BB133111EB;
  return z ^ (z >> 32);
}

struct Columns {
  std::uint32_t value[kDraws];
  constexpr Columns() : value{} {
    for (std::uint64_t j = 0; j < kDraws; ++j) {
      value[j] = static_cast<std::uint32_t>(((mix(j * kRow + kNode) & 0x7FFFFF00) | j) * 2);
    }
  }
};
inline constexpr Columns kColumns;

class Generator {
 public:
  Generator(const Tensor& key, const Tensor& step, std::int64_t node)
      : start_((static_cast<std::uint64_t>(node) + 1) * kNode) {
    expect(key && key.shape.count() == 1 && step && step.shape.count() == 1, "Key and Step must have one element");
    seed_ = mix(static_cast<std::uint64_t>(*key.ints()) * kKey + static_cast<std::uint64_t>(*step.ints()) * kStep);
  }

  // The words of one row of 256 elements, as signed numbers.
  void row(std::int64_t i, std::int32_t* words) const { part(i, 0, kDraws, words); }

  // words[j] of row i, for begin <= j < end.
  void part(std::int64_t i, std::int64_t begin, std::int64_t end, std::int32_t* words) const {
    const std::uint64_t z = mix(seed_ + start_ + static_cast<std::uint64_t>(i) * kRow);
    const auto high = static_cast<std::uint32_t>(z >> 32);
    const std::uint32_t odd = (static_cast<std::uint32_t>(z) ^ high) | 1;
    for (std::int64_t j = begin; j < end; ++j) {
      const std::uint32_t x = high * kColumns.value[j] + odd;
      words[j] = static_cast<std::int32_t>(x * x);
    }
  }

 private:
  std::uint64_t start_, seed_;
};

inline float keep_scale(double ratio) { return ratio >= 1.0 ? 0.0f : static_cast<float>(1.0 / (1.0 - ratio)); }

// Words below it are dropped; none is kept where `none` holds.
struct Threshold {
  explicit Threshold(double ratio) {
    const std::int64_t least = static_cast<std::int64_t>(std::ceil(ratio * 16777216.0)) - 8388608;
    none = least >= 8388608;
    word = static_cast<std::int32_t>(none ? 0 : least * 256);
  }
  bool none;
  std::int32_t word;
};

}  // namespace ortgraph
