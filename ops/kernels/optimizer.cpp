// AdamW with PyTorch's arithmetic (fused form): one pass over weight, gradient and both moments.
#include <cmath>

#include "adamw.h"
#include "vector.h"

namespace ortgraph {
namespace {

void check_shapes(const Tensor& w, const Tensor& g, const Tensor& m, const Tensor& v) {
  expect(w && g && m && v, "W, G, M and V are required");
  expect(w.shape.count() == g.shape.count() && w.shape.count() == m.shape.count() && w.shape.count() == v.shape.count(),
         "W, G, M and V differ in shape");
}

// (LearningRate, Step, W, G, M, V, GradScale?) -> (W', M', V'). W', M', V' may lie over W, M, V.
class AdamW final : public Kernel {
 public:
  explicit AdamW(const Attributes& a) : rule_(a) {}

  void compute(const Context& context) const override {
    const Tensor w = context.input(2), g = context.input(3), m = context.input(4), v = context.input(5);
    check_shapes(w, g, m, v);
    const AdamStep step = rule_.at(context.input(0), context.input(1), context.input(6));
    float* w_new = context.floats(0, w.shape);
    float* m_new = context.floats(1, m.shape);
    float* v_new = context.floats(2, v.shape);
    context.elements(w.shape.count(), [&](std::int64_t begin, std::int64_t end) {
      adam_update(step, end - begin, w.floats() + begin, g.floats() + begin, m.floats() + begin, v.floats() + begin,
                  w_new + begin, m_new + begin, v_new + begin);
    });
  }

 private:
  AdamRule rule_;
};

// (LearningRate, Step, GradScale?, then W, G, M, V of every tensor) -> (W', M', V' of every tensor).
class MultiAdamW final : public Kernel {
 public:
  explicit MultiAdamW(const Attributes& a) : rule_(a) {}

  void compute(const Context& context) const override {
    const std::size_t first = 3, count = (context.inputs() - first) / 4;
    expect(context.inputs() == first + 4 * count, "expects W, G, M and V of every tensor");
    const AdamStep step = rule_.at(context.input(0), context.input(1), context.input(2));
    std::vector<Slice> slices;
    for (std::size_t t = 0; t < count; ++t) add(context, first + 4 * t, 3 * t, slices);
    context.parallel(slices.size(), [&](std::size_t i) {
      const Slice& s = slices[i];
      adam_update(step, s.n, s.w, s.g, s.m, s.v, s.w_new, s.m_new, s.v_new);
    });
  }

 private:
  struct Slice {
    std::int64_t n;
    const float *w, *g, *m, *v;
    float *w_new, *m_new, *v_new;
  };
  static constexpr std::int64_t kSlice = 32768;

  static void add(const Context& context, std::size_t input, std::size_t output, std::vector<Slice>& slices) {
    const Tensor w = context.input(input), g = context.input(input + 1), m = context.input(input + 2),
                 v = context.input(input + 3);
    check_shapes(w, g, m, v);
    float* w_new = context.floats(output, w.shape);
    float* m_new = context.floats(output + 1, m.shape);
    float* v_new = context.floats(output + 2, v.shape);
    for (std::int64_t i = 0, total = w.shape.count(); i < total; i += kSlice) {
      slices.push_back({std::min(kSlice, total - i), w.floats() + i, g.floats() + i, m.floats() + i, v.floats() + i,
                        w_new + i, m_new + i, v_new + i});
    }
  }

  AdamRule rule_;
};

// (tensors) -> sum of the squares of all their elements, a scalar.
// Sums are made per slice in float32 lanes and added in double, in order. Scratch: 8 bytes per slice.
class SquaredNorm final : public Kernel {
 public:
  explicit SquaredNorm(const Attributes&) {}

  void compute(const Context& context) const override {
    std::vector<std::pair<const float*, std::int64_t>> slices;
    for (std::size_t t = 0, count = context.inputs(); t < count; ++t) {
      const Tensor g = context.input(t);
      for (std::int64_t i = 0, total = g.shape.count(); i < total; i += kSlice) {
        slices.emplace_back(g.floats() + i, std::min(kSlice, total - i));
      }
    }
    const Scratch<double> sums(slices.size());
    context.parallel(slices.size(), [&](std::size_t i) { sums[i] = squares(slices[i].first, slices[i].second); });
    double total = 0;
    for (std::size_t i = 0; i < slices.size(); ++i) total += sums[i];
    *context.floats(0, Shape{}) = static_cast<float>(total);
  }

 private:
  static constexpr std::int64_t kSlice = 32768;
  static constexpr std::int64_t kBlock = 1024;

  static double squares(const float* x, std::int64_t n) {
    double total = 0;
    for (std::int64_t from = 0; from < n; from += kBlock) {
      V lanes{};
      vectors(std::min(kBlock, n - from), [&](std::int64_t i, auto span) {
        const V v = load(x + from + i, span);
        lanes += v * v;
      });
      total += sum(lanes);
    }
    return total;
  }
};

}  // namespace

AdamStep AdamRule::at(const Tensor& rate, const Tensor& step, const Tensor& scale) const {
  expect(rate && rate.shape.count() == 1, "LearningRate must have one element");
  expect(step && step.shape.count() == 1, "Step must have one element");
  expect(!scale || scale.shape.count() == 1, "GradScale must have one element");
  const double lr = *rate.floats();
  const double n = static_cast<double>(*step.ints());
  const double correction1 = 1.0 - std::pow(beta1_, n);
  const double correction2 = 1.0 - std::pow(beta2_, n);
  AdamStep s;
  s.decay = static_cast<float>(1.0 - lr * weight_decay_);
  s.beta1 = static_cast<float>(beta1_);
  s.rest1 = static_cast<float>(1.0 - beta1_);
  s.beta2 = static_cast<float>(beta2_);
  s.rest2 = static_cast<float>(1.0 - beta2_);
  s.root2 = static_cast<float>(std::sqrt(correction2));
  s.epsilon = static_cast<float>(epsilon_);
  s.size = static_cast<float>(lr / correction1);
  s.scale = scale ? *scale.floats() : 1.0f;
  return s;
}

void add_optimizer(Definitions& to) {
  static Definition adamw("AdamW", {kF, kI, kF, kF, kF, kF, kF_}, {kF, kF, kF}, make<AdamW>);
  static Definition multi("MultiAdamW", {kF, kI, kF_, kFs}, {kFs}, make<MultiAdamW>);
  static Definition norm("SquaredNorm", {kFs}, {kF}, make<SquaredNorm>);
  to.insert(to.end(), {&adamw, &multi, &norm});
}

}  // namespace ortgraph
