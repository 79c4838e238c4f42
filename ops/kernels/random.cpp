// Counter-based random numbers and dropout: the generator of ops/random.py, bit for bit.
#include <cmath>

#include "kernel.h"
#include "vector.h"

namespace ortgraph {
namespace {

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
constexpr Columns kColumns;

class Generator {
 public:
  Generator(const Tensor& key, const Tensor& step, std::int64_t node) : start_(static_cast<std::uint64_t>(node) * kNode) {
    expect(key && key.shape.count() == 1 && step && step.shape.count() == 1, "Key and Step must have one element");
    seed_ = mix(static_cast<std::uint64_t>(*key.ints()) * kKey + static_cast<std::uint64_t>(*step.ints()) * kStep);
  }

  // The words of one row of 256 elements, as signed numbers.
  void row(std::int64_t i, std::int32_t* words) const {
    const std::uint64_t z = mix(seed_ + start_ + static_cast<std::uint64_t>(i) * kRow);
    const auto high = static_cast<std::uint32_t>(z >> 32);
    const std::uint32_t odd = (static_cast<std::uint32_t>(z) ^ high) | 1;
    for (std::int64_t j = 0; j < kDraws; ++j) {
      const std::uint32_t x = high * kColumns.value[j] + odd;
      words[j] = static_cast<std::int32_t>(x * x);
    }
  }

 private:
  std::uint64_t start_, seed_;
};

// body(row, first element, number of elements) for all rows of 256 elements.
template <class Body>
void draws(const Context& context, std::int64_t count, const Body& body) {
  context.rows((count + kDraws - 1) / kDraws, kDraws, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) body(r, r * kDraws, std::min(kDraws, count - r * kDraws));
  });
}

float keep_scale(double ratio) { return ratio >= 1.0 ? 0.0f : static_cast<float>(1.0 / (1.0 - ratio)); }

// (X, Key, Step) -> (Y?, Mask? [bool]). Without Mask it is its own gradient: dX = Dropout(dY, Key, Step).
class Dropout final : public Kernel {
 public:
  explicit Dropout(const Attributes& a)
      : node_(a.integer("node", 0)), ratio_(a.decimal("ratio", 0.5)), scale_(keep_scale(ratio_)) {
    expect(ratio_ >= 0.0 && ratio_ <= 1.0, "ratio must be within 0 and 1");
  }

  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    const Generator generator(context.input(1), context.input(2), node_);
    const std::int64_t least = static_cast<std::int64_t>(std::ceil(ratio_ * 16777216.0)) - 8388608;
    const bool none = least >= 8388608;
    const auto threshold = static_cast<std::int32_t>(none ? 0 : least * 256);
    float* y = context.floats(0, x.shape);
    auto* mask = static_cast<unsigned char*>(context.output(1, x.shape));
    draws(context, x.shape.count(), [&](std::int64_t row, std::int64_t at, std::int64_t n) {
      std::int32_t words[kDraws];
      generator.row(row, words);
      unsigned char kept[kDraws];
      for (std::int64_t j = 0; j < kDraws; ++j) kept[j] = static_cast<unsigned char>(!none & (words[j] >= threshold));
      if (mask) std::memcpy(mask + at, kept, static_cast<std::size_t>(n));
      if (!y) return;
      const float* from = x.floats() + at;
#pragma GCC ivdep
      for (std::int64_t j = 0; j < n; ++j) y[at + j] = from[j] * static_cast<float>(kept[j]) * scale_;
    });
  }

 private:
  std::int64_t node_;
  double ratio_;
  float scale_;
};

// (dY, Mask [bool]) -> dX.
class DropoutGrad final : public Kernel {
 public:
  explicit DropoutGrad(const Attributes& a) : scale_(keep_scale(a.decimal("ratio", 0.5))) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), mask = context.input(1);
    const auto* kept = static_cast<const unsigned char*>(mask.raw);
    float* dx = context.floats(0, dy.shape);
    context.elements(same_count(dy, mask), [&](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) dx[i] = dy.floats()[i] * static_cast<float>(kept[i]) * scale_;
    });
  }

 private:
  float scale_;
};

// (Key, Step) -> U in [0, 1), multiples of 2^-24.
class RandomUniform final : public Kernel {
 public:
  explicit RandomUniform(const Attributes& a) : node_(a.integer("node", 0)), shape_(a.shape("shape")) {}

  void compute(const Context& context) const override {
    const Generator generator(context.input(0), context.input(1), node_);
    float* u = context.floats(0, shape_);
    draws(context, shape_.count(), [&](std::int64_t row, std::int64_t at, std::int64_t n) {
      std::int32_t words[kDraws];
      generator.row(row, words);
      for (std::int64_t j = 0; j < n; ++j) {
        u[at + j] = static_cast<float>(words[j] >> 8) * 0x1p-24f + 0.5f;
      }
    });
  }

 private:
  std::int64_t node_;
  Shape shape_;
};

}  // namespace

void add_random(Definitions& to) {
  constexpr Port kB_{kBool, kOptional};
  static Definition all[] = {
      {"Dropout", {kF, kI, kI}, {kF_, kB_}, make<Dropout>},
      {"DropoutGrad", {kF, kB}, {kF}, make<DropoutGrad>},
      {"RandomUniform", {kI, kI}, {kF}, make<RandomUniform>},
  };
  for (Definition& definition : all) to.push_back(&definition);
}

}  // namespace ortgraph
