// Counter-based random numbers and dropout: the generator of ops/random.py, bit for bit.
#include "generator.h"
#include "vector.h"

namespace ortgraph {
namespace {

// body(row, first element, number of elements) for all rows of 256 elements.
template <class Body>
void draws(const Context& context, std::int64_t count, const Body& body) {
  context.rows((count + kDraws - 1) / kDraws, kDraws, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) body(r, r * kDraws, std::min(kDraws, count - r * kDraws));
  });
}

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
    const Threshold threshold(ratio_);
    float* y = context.floats(0, x.shape);
    auto* mask = static_cast<unsigned char*>(context.output(1, x.shape));
    draws(context, x.shape.count(), [&](std::int64_t row, std::int64_t at, std::int64_t n) {
      std::int32_t words[kDraws];
      generator.row(row, words);
      unsigned char kept[kDraws];
      for (std::int64_t j = 0; j < kDraws; ++j) kept[j] = static_cast<unsigned char>(!threshold.none & (words[j] >= threshold.word));
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
