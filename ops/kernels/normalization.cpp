// Layer normalization over the trailing dimensions, its fused forms and its gradient.
#include "reduction.h"
#include "vector.h"

namespace ortgraph {
namespace {

// The shape split at `axis`: `rows` groups of `width` elements; statistics keep the leading dimensions.
struct Split {
  std::int64_t rows, width;
  Shape statistics, tail;

  Split(const Shape& shape, std::int64_t axis) {
    const auto rank = static_cast<std::int64_t>(shape.rank);
    if (axis < 0) axis += rank;
    expect(axis >= 0 && axis < rank, "axis is outside the input's dimensions");
    const auto first = static_cast<std::size_t>(axis);
    rows = shape.count(0, first);
    width = shape.count(first, shape.rank);
    statistics = shape;
    for (std::size_t i = first; i < shape.rank; ++i) {
      statistics.dim[i] = 1;
      tail.dim[tail.rank++] = shape.dim[i];
    }
  }
};

// One row: mean and 1 / sqrt(variance + epsilon) in two passes over a row that stays in the first cache.
inline void statistics(const float* x, std::int64_t n, float epsilon, float* mean, float* inv_std) {
  V total{};
  vectors(n, [&](std::int64_t i, auto span) { total += load(x + i, span); });
  const float centre = sum(total) / static_cast<float>(n);
  V squares{};
  vectors(n, [&](std::int64_t i, auto span) {
    const V d = keep(load(x + i, span) - centre, span);
    squares += d * d;
  });
  *mean = centre;
  *inv_std = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + epsilon);
}

inline void normalize(const float* x, std::int64_t n, float mean, float inv_std, const float* scale, const float* bias,
                      float* y) {
  vectors(n, [&](std::int64_t i, auto span) {
    V normal = (load(x + i, span) - mean) * inv_std * load(scale + i, span);
    if (bias) normal += load(bias + i, span);
    store(y + i, normal, span);
  });
}

struct Options {
  std::int64_t axis;
  float epsilon;
  explicit Options(const Attributes& a)
      : axis(a.integer("axis", -1)), epsilon(static_cast<float>(a.decimal("epsilon", 1e-5))) {}
};

// (X, Scale, Bias?) -> (Y, Mean?, InvStdDev?), as the ONNX operator.
class LayerNorm final : public Kernel {
 public:
  explicit LayerNorm(const Attributes& a) : options_(a) {}

  void compute(const Context& context) const override {
    const Tensor x = context.input(0), scale = context.input(1), bias = context.input(2);
    const Split split(x.shape, options_.axis);
    const std::int64_t n = split.width;
    expect(scale.shape.count() == n && (!bias || bias.shape.count() == n), "Scale and Bias must have one row's size");
    float* y = context.floats(0, x.shape);
    float* means = context.floats(1, split.statistics);
    float* inv_stds = context.floats(2, split.statistics);
    context.rows(split.rows, n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        float mean, inv_std;
        statistics(x.floats() + r * n, n, options_.epsilon, &mean, &inv_std);
        normalize(x.floats() + r * n, n, mean, inv_std, scale.floats(), bias.floats(), y + r * n);
        if (means) means[r] = mean;
        if (inv_stds) inv_stds[r] = inv_std;
      }
    });
  }

 private:
  Options options_;
};

// (A, B, Scale, Bias?, Addend? [last dimension]) -> (Sum, Y, Mean?, InvStdDev?): Sum = A + Addend + B, Y = norm(Sum).
class AddLayerNorm final : public Kernel {
 public:
  explicit AddLayerNorm(const Attributes& a) : options_(a) {}

  void compute(const Context& context) const override {
    const Tensor a = context.input(0), b = context.input(1), scale = context.input(2), bias = context.input(3),
                 addend = context.input(4);
    same_count(a, b);
    const Split split(a.shape, options_.axis);
    const std::int64_t n = split.width;
    expect(scale.shape.count() == n && (!bias || bias.shape.count() == n), "Scale and Bias must have one row's size");
    expect(!addend || addend.shape.count() == n, "Addend must have one row's size");
    float* sums = context.floats(0, a.shape);
    float* y = context.floats(1, a.shape);
    float* means = context.floats(2, split.statistics);
    float* inv_stds = context.floats(3, split.statistics);
    context.rows(split.rows, n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const float *from_a = a.floats() + r * n, *from_b = b.floats() + r * n;
        float* row = sums + r * n;
        vectors(n, [&](std::int64_t i, auto span) {
          V x = load(from_a + i, span);
          if (addend) x += load(addend.floats() + i, span);
          store(row + i, x + load(from_b + i, span), span);
        });
        float mean, inv_std;
        statistics(row, n, options_.epsilon, &mean, &inv_std);
        normalize(row, n, mean, inv_std, scale.floats(), bias.floats(), y + r * n);
        if (means) means[r] = mean;
        if (inv_stds) inv_stds[r] = inv_std;
      }
    });
  }

 private:
  Options options_;
};

// What the sixth input of the gradient is: nothing, an addend of dX, or an addend of dY.
enum class Extra { kNone, kResult, kIncoming };

// (dY, X, Mean, InvStdDev, Scale?, extra) -> (dX?, dScale?, dBias?).
template <Extra kExtra>
class LayerNormGrad final : public Kernel {
 public:
  explicit LayerNormGrad(const Attributes& a) : axis_(a.integer("axis", -1)) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), x = context.input(1), mean = context.input(2), inv_std = context.input(3),
                 scale = context.input(4), extra = kExtra == Extra::kNone ? Tensor{} : context.input(5);
    same_count(dy, x);
    const Split split(x.shape, axis_);
    const std::int64_t n = split.width;
    expect(mean.shape.count() == split.rows && inv_std.shape.count() == split.rows, "one Mean and InvStdDev per row");
    expect(!scale || scale.shape.count() == n, "Scale must have one row's size");
    if (kExtra != Extra::kNone) same_count(extra, x);
    const Row row{n, scale.floats()};
    float* dx = context.floats(0, x.shape);
    float* dscale = context.floats(1, split.tail);
    float* dbias = context.floats(2, split.tail);
    const Partials partials(split.rows, n, 2);
    context.rows(split.rows, n, [&](std::int64_t begin, std::int64_t end) {
      float* sums = partials.clear(begin);
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t at = r * n;
        row.run(dy.floats() + at, x.floats() + at, mean.floats()[r], inv_std.floats()[r],
                kExtra == Extra::kNone ? nullptr : extra.floats() + at, dx ? dx + at : nullptr, sums);
      }
    });
    if (dscale) partials.total(0, n, dscale);
    if (dbias) partials.total(n, n, dbias);
  }

 private:
  struct Row {
    std::int64_t n;
    const float* scale;

    // sums[0:n] += dY x_hat, sums[n:2n] += dY; dX = InvStd (g - mean(g) - x_hat mean(g x_hat)), g = dY Scale.
    void run(const float* dy, const float* x, float mean, float inv_std, const float* extra, float* dx,
             float* sums) const {
      const auto incoming = [&](std::int64_t i, auto span) {
        const V d = load(dy + i, span);
        return kExtra == Extra::kIncoming ? d + load(extra + i, span) : d;
      };
      V plain{}, along{};
      vectors(n, [&](std::int64_t i, auto span) {
        const V d = incoming(i, span);
        const V x_hat = keep((load(x + i, span) - mean) * inv_std, span);
        const V g = scale ? d * load(scale + i, span) : d;
        plain += g;
        along += g * x_hat;
        store(sums + i, load(sums + i, span) + d * x_hat, span);
        store(sums + n + i, load(sums + n + i, span) + d, span);
      });
      if (!dx) return;
      const float centre = sum(plain) / static_cast<float>(n), slope = sum(along) / static_cast<float>(n);
      vectors(n, [&](std::int64_t i, auto span) {
        const V d = incoming(i, span);
        const V g = scale ? d * load(scale + i, span) : d;
        const V x_hat = (load(x + i, span) - mean) * inv_std;
        V result = (g - centre - x_hat * slope) * inv_std;
        if (kExtra == Extra::kResult) result += load(extra + i, span);
        store(dx + i, result, span);
      });
    }
  };

  std::int64_t axis_;
};

}  // namespace

void add_normalization(Definitions& to) {
  static Definition all[] = {
      {"LayerNorm", {kF, kF, kF_}, {kF, kF_, kF_}, make<LayerNorm>},
      {"AddLayerNorm", {kF, kF, kF, kF_, kF_}, {kF, kF, kF_, kF_}, make<AddLayerNorm>},
      {"LayerNormGrad", {kF, kF, kF, kF, kF_}, {kF_, kF_, kF_}, make<LayerNormGrad<Extra::kNone>>},
      {"LayerNormGradAdd", {kF, kF, kF, kF, kF_, kF}, {kF_, kF_, kF_}, make<LayerNormGrad<Extra::kResult>>},
      {"AddLayerNormGrad", {kF, kF, kF, kF, kF_, kF}, {kF_, kF_, kF_}, make<LayerNormGrad<Extra::kIncoming>>},
  };
  for (Definition& definition : all) to.push_back(&definition);
}

}  // namespace ortgraph
