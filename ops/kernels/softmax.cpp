// Softmax over the last dimension, with scale and mask fused in, and its gradients.
#include "vector.h"

#include "kernel.h"

namespace ortgraph {
namespace {

void expect_last(const Attributes& a) {
  // A positive axis cannot be checked before the rank is known; the table's Python side refuses it.
  expect(a.integer("axis", -1) >= -1, "only the last axis");
}

// Where the mask's row for a row of X starts: the mask is aligned to the right and broadcast over dimensions of size 1.
class MaskRows {
 public:
  MaskRows(const Tensor& mask, const Shape& x) : data_(mask.floats()), x_(x) {
    if (!mask) return;
    expect(mask.shape.rank <= x.rank, "Mask has more dimensions than X");
    const std::size_t lead = x.rank - mask.shape.rank;
    std::int64_t stride = 1;
    for (std::size_t i = x.rank; i-- > lead;) {
      const std::int64_t d = mask.shape.dim[i - lead];
      expect(d == 1 || d == x.dim[i], "Mask does not broadcast to X");
      stride_[i] = d == 1 ? 0 : stride;
      stride *= d;
    }
  }

  const float* row(std::int64_t r) const {
    std::int64_t offset = 0;
    for (std::size_t i = x_.rank - 1; i-- > 0;) {
      offset += r % x_.dim[i] * stride_[i];
      r /= x_.dim[i];
    }
    return data_ + offset;
  }
  bool one_per_row() const { return stride_[x_.rank - 1] == 0; }

 private:
  const float* data_;
  const Shape x_;
  std::int64_t stride_[kMaxRank] = {};
};

// (X [..., T], Mask? broadcast to X) -> Y = softmax(scale X + Mask) over the last dimension. With zero_empty_rows a row
// of minus infinity only (every position masked) gives zeros instead of NaN.
class ScaledMaskedSoftmax final : public Kernel {
 public:
  explicit ScaledMaskedSoftmax(const Attributes& a) : scale_(static_cast<float>(a.decimal("scale", 1.0))), zero_empty_(a.integer("zero_empty_rows", 0) != 0) {
    expect_last(a);
  }

  void compute(const Context& context) const override {
    const Tensor x = context.input(0), mask = context.input(1);
    expect(x.shape.rank >= 1, "X must have a dimension");
    const MaskRows masks(mask, x.shape);
    const std::int64_t n = x.shape.back();
    float* y = context.floats(0, x.shape);
    context.rows(x.shape.rows(), n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const float* from = x.floats() + r * n;
        if (!mask) {
          row(n, y + r * n, [&](std::int64_t i, auto span) { return load(from + i, span) * scale_; });
        } else if (masks.one_per_row()) {
          const float same = *masks.row(r);
          row(n, y + r * n, [&](std::int64_t i, auto span) { return load(from + i, span) * scale_ + same; });
        } else {
          const float* add = masks.row(r);
          row(n, y + r * n, [&](std::int64_t i, auto span) { return load(from + i, span) * scale_ + load(add + i, span); });
        }
      }
    });
  }

 private:
  template <class Score>
  void row(std::int64_t n, float* y, const Score& score) const {
    V best = splat(-std::numeric_limits<float>::infinity());
    vectors(n, [&](std::int64_t i, auto span) {
      const V z = score(i, span);
      best = larger(outside(z, span), best);
      store(y + i, z, span);
    });
    const float top = largest(best);
    if (zero_empty_ && empty(y, n, top)) {
      std::fill(y, y + n, 0.0f);
      return;
    }
    V total{};
    vectors(n, [&](std::int64_t i, auto span) {
      const V e = exp(load(y + i, span) - top);
      total += keep(e, span);
      store(y + i, e, span);
    });
    const float inverse = 1.0f / sum(total);
    vectors(n, [&](std::int64_t i, auto span) { store(y + i, load(y + i, span) * inverse, span); });
  }

  // NaN may have been passed over by the maximum.
  static bool empty(const float* y, std::int64_t n, float top) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    return top == kLowest && std::all_of(y, y + n, [](float z) { return z == kLowest; });
  }

  float scale_;
  bool zero_empty_;
};

// (dY, Y) -> dX = scale Y (dY - sum(Y dY)).
class SoftmaxGrad final : public Kernel {
 public:
  explicit SoftmaxGrad(const Attributes& a) : scale_(static_cast<float>(a.decimal("scale", 1.0))) { expect_last(a); }

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), y = context.input(1);
    same_count(dy, y);
    const std::int64_t n = y.shape.back();
    float* dx = context.floats(0, y.shape);
    context.rows(y.shape.rows(), n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const float *d = dy.floats() + r * n, *p = y.floats() + r * n;
        V total{};
        vectors(n, [&](std::int64_t i, auto span) { total += load(d + i, span) * load(p + i, span); });
        const float along = sum(total);
        vectors(n, [&](std::int64_t i, auto span) {
          store(dx + r * n + i, load(p + i, span) * (load(d + i, span) - along) * scale_, span);
        });
      }
    });
  }

 private:
  float scale_;
};

// (dY, Y = log-probabilities) -> dX = dY - exp(Y) sum(dY).
class LogSoftmaxGrad final : public Kernel {
 public:
  explicit LogSoftmaxGrad(const Attributes& a) { expect_last(a); }

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), y = context.input(1);
    same_count(dy, y);
    const std::int64_t n = y.shape.back();
    float* dx = context.floats(0, y.shape);
    context.rows(y.shape.rows(), n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const float *d = dy.floats() + r * n, *p = y.floats() + r * n;
        V total{};
        vectors(n, [&](std::int64_t i, auto span) { total += load(d + i, span); });
        const float all = sum(total);
        vectors(n, [&](std::int64_t i, auto span) {
          store(dx + r * n + i, load(d + i, span) - exp(load(p + i, span)) * all, span);
        });
      }
    });
  }
};

}  // namespace

void add_softmax(Definitions& to) {
  static Definition all[] = {
      {"ScaledMaskedSoftmax", {kF, kF_}, {kF}, make<ScaledMaskedSoftmax>},
      {"Softmax", {kF}, {kF}, make<ScaledMaskedSoftmax>},
      {"ScaledSoftmaxGrad", {kF, kF}, {kF}, make<SoftmaxGrad>},
      {"SoftmaxGrad", {kF, kF}, {kF}, make<SoftmaxGrad>},
      {"LogSoftmaxGrad", {kF, kF}, {kF}, make<LogSoftmaxGrad>},
  };
  for (Definition& definition : all) to.push_back(&definition);
}

}  // namespace ortgraph
