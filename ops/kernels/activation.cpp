// Element-wise activations and their gradients.
#include "functions.h"
#include "reduction.h"
#include "vector.h"

namespace ortgraph {
namespace {

constexpr float kDensity = 0.398942280f;    // 1 / sqrt(2 pi)
constexpr float kTwiceTanh = 1.59576912f;   // 2 sqrt(2 / pi)
constexpr float kTwiceCubic = 0.0713548163f;  // 2 * 0.044715 sqrt(2 / pi)

V gelu(V x) { return x * normal(x).cdf; }

V gelu_slope(V x) {
  const Normal n = normal(x);
  return n.cdf + x * n.density * kDensity;
}

// (1 + tanh(u)) / 2 = sigmoid(2 u), without cancellation for negative u.
V gelu_tanh(V x) { return x * sigmoid(x * (kTwiceTanh + kTwiceCubic * (x * x))); }

V gelu_tanh_slope(V x) {
  const V square = x * x;
  const Logistic l = logistic(x * (kTwiceTanh + kTwiceCubic * square));
  return l.s + x * l.s * l.rest * (kTwiceTanh + 3.0f * kTwiceCubic * square);
}

V silu(V x) { return x * sigmoid(x); }
V relu_grad(V dy, V y) { return y > 0.0f ? dy : V{}; }
V tanh_grad(V dy, V y) { return dy * (1.0f - y * y); }
V sigmoid_grad(V dy, V y) { return dy * (y * (1.0f - y)); }
V silu_grad(V dy, V x) {
  const Logistic l = logistic(x);
  return dy * (l.s * (1.0f + x * l.rest));
}

bool is_tanh(const Attributes& a) {
  const std::string form = a.text("approximate", "none");
  expect(form == "none" || form == "tanh", "approximate must be 'none' or 'tanh'");
  return form == "tanh";
}

template <class Function>
void map(const Context& context, const Tensor& x, float* y, const Function& f) {
  context.elements(x.shape.count(), [&](std::int64_t begin, std::int64_t end) {
    const float* from = x.floats() + begin;
    vectors(end - begin, [&](std::int64_t i, auto span) { store(y + begin + i, f(load(from + i, span)), span); });
  });
}

template <class Function>
void map(const Context& context, const Tensor& a, const Tensor& b, float* y, const Function& f) {
  context.elements(same_count(a, b), [&](std::int64_t begin, std::int64_t end) {
    vectors(end - begin, [&](std::int64_t i, auto span) {
      store(y + begin + i, f(load(a.floats() + begin + i, span), load(b.floats() + begin + i, span)), span);
    });
  });
}

// (X) -> Y.
class Gelu final : public Kernel {
 public:
  explicit Gelu(const Attributes& a) : tanh_(is_tanh(a)) {}
  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    float* y = context.floats(0, x.shape);
    tanh_ ? map(context, x, y, gelu_tanh) : map(context, x, y, gelu);
  }

 private:
  bool tanh_;
};

// (dY, X) -> dX.
class GeluGrad final : public Kernel {
 public:
  explicit GeluGrad(const Attributes& a) : tanh_(is_tanh(a)) {}
  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), x = context.input(1);
    float* dx = context.floats(0, x.shape);
    if (tanh_) {
      map(context, dy, x, dx, [](V d, V v) { return d * gelu_tanh_slope(v); });
    } else {
      map(context, dy, x, dx, [](V d, V v) { return d * gelu_slope(v); });
    }
  }

 private:
  bool tanh_;
};

void expect_bias(const Tensor& x, const Tensor& bias) {
  expect(x.shape.rank >= 1 && bias.shape.count() == x.shape.back(), "Bias must have the last dimension's size");
}

// (X [..., N], Bias [N]) -> gelu(X + Bias).
class BiasGelu final : public Kernel {
 public:
  explicit BiasGelu(const Attributes& a) : tanh_(is_tanh(a)) {}
  void compute(const Context& context) const override {
    tanh_ ? run(context, gelu_tanh) : run(context, gelu);
  }

 private:
  template <class Function>
  static void run(const Context& context, const Function& f) {
    const Tensor x = context.input(0), bias = context.input(1);
    expect_bias(x, bias);
    const std::int64_t n = x.shape.back();
    float* y = context.floats(0, x.shape);
    context.rows(x.shape.rows(), n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        vectors(n, [&](std::int64_t i, auto span) {
          store(y + r * n + i, f(load(x.floats() + r * n + i, span) + load(bias.floats() + i, span)), span);
        });
      }
    });
  }

  bool tanh_;
};

// (dY, X [..., N], Bias? [N]) -> (dX, dBias?): X is the value before the bias was added.
class BiasGeluGrad final : public Kernel {
 public:
  explicit BiasGeluGrad(const Attributes& a) : tanh_(is_tanh(a)) {}
  void compute(const Context& context) const override {
    tanh_ ? run(context, gelu_tanh_slope) : run(context, gelu_slope);
  }

 private:
  template <class Function>
  static void run(const Context& context, const Function& slope) {
    const Tensor dy = context.input(0), x = context.input(1), bias = context.input(2);
    expect(x.shape.rank >= 1, "X must have a dimension");
    if (bias) expect_bias(x, bias);
    same_count(dy, x);
    const std::int64_t n = x.shape.back(), rows = x.shape.rows();
    float* dx = context.floats(0, x.shape);
    float* dbias = context.floats(1, Shape{n});
    const Partials partials(rows, n);
    context.rows(rows, n, [&](std::int64_t begin, std::int64_t end) {
      float* sums = partials.clear(begin);
      for (std::int64_t r = begin; r < end; ++r) {
        vectors(n, [&](std::int64_t i, auto span) {
          V z = load(x.floats() + r * n + i, span);
          if (bias) z += load(bias.floats() + i, span);
          const V d = load(dy.floats() + r * n + i, span) * slope(z);
          store(dx + r * n + i, d, span);
          store(sums + i, load(sums + i, span) + d, span);
        });
      }
    });
    if (dbias) partials.total(0, n, dbias);
  }

  bool tanh_;
};

template <V (*function)(V)>
class Unary final : public Kernel {
 public:
  explicit Unary(const Attributes&) {}
  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    map(context, x, context.floats(0, x.shape), function);
  }
};

// (dY, the saved forward value) -> dX.
template <V (*function)(V, V)>
class Gradient final : public Kernel {
 public:
  explicit Gradient(const Attributes&) {}
  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), saved = context.input(1);
    map(context, dy, saved, context.floats(0, dy.shape), function);
  }
};

// (X) -> Y.
class Elu final : public Kernel {
 public:
  explicit Elu(const Attributes& a) : alpha_(static_cast<float>(a.decimal("alpha", 1.0))) {}
  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    map(context, x, context.floats(0, x.shape),
        [&](V v) { return v > 0.0f ? v : alpha_ * exp_minus_one(smaller(V{}, v)); });
  }

 private:
  float alpha_;
};

}  // namespace

void add_activation(Definitions& to) {
  static Definition all[] = {
      {"Gelu", {kF}, {kF}, make<Gelu>},
      {"GeluGrad", {kF, kF}, {kF}, make<GeluGrad>},
      {"BiasGelu", {kF, kF}, {kF}, make<BiasGelu>},
      {"BiasGeluGrad", {kF, kF, kF_}, {kF, kF_}, make<BiasGeluGrad>},
      {"Silu", {kF}, {kF}, make<Unary<silu>>},
      {"Sigmoid", {kF}, {kF}, make<Unary<sigmoid>>},
      {"Log", {kF}, {kF}, make<Unary<logarithm>>},
      {"Sqrt", {kF}, {kF}, make<Unary<root>>},
      {"Erf", {kF}, {kF}, make<Unary<error_function>>},
      {"Elu", {kF}, {kF}, make<Elu>},
      {"SiluGrad", {kF, kF}, {kF}, make<Gradient<silu_grad>>},
      {"ReluGrad", {kF, kF}, {kF}, make<Gradient<relu_grad>>},
      {"TanhGrad", {kF, kF}, {kF}, make<Gradient<tanh_grad>>},
      {"SigmoidGrad", {kF, kF}, {kF}, make<Gradient<sigmoid_grad>>},
  };
  for (Definition& definition : all) to.push_back(&definition);
}

}  // namespace ortgraph
