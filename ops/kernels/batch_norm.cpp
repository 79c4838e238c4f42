// Batch normalization in training mode and its gradient. A channel's elements are read in one run for each image; they
// stay in the near caches between the passes.
#include "window.h"

namespace ortgraph {
namespace {

// [N, C, ...] as N images of C planes.
struct Pictures {
  std::int64_t images, channels, plane;

  explicit Pictures(const Shape& shape) {
    expect(shape.rank >= 2, "X must be [N, C, ...]");
    images = shape.dim[0], channels = shape.dim[1], plane = shape.count(2, shape.rank);
  }
  std::int64_t count() const { return images * plane; }
  std::int64_t at(std::int64_t image, std::int64_t channel) const { return (image * channels + channel) * plane; }

  // body(first element) for each image of a channel, for channels in fixed pieces.
  template <class Body>
  void each(const Context& context, const Body& body) const {
    context.rows(channels, count(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t c = begin; c < end; ++c) body(c);
    });
  }
};

template <class T>
inline const T* values(const Tensor& t) {
  return static_cast<const T*>(t.raw);
}

// Calls body(T{}) with an element type.
template <class Body>
void with_type(ElementType type, const Body& body) {
  if (type == kBfloat16) return body(Bf16{});
  body(float{});
}

// (X [N, C, ...], Scale, Bias, RunningMean, RunningVar) -> (Y?, NewMean?, NewVar?, SavedMean?, SavedInvStd?).
class BatchNorm final : public Kernel {
 public:
  explicit BatchNorm(const Attributes& a) : epsilon_(a.decimal("epsilon", 1e-5)), momentum_(a.decimal("momentum",
      0.1)) {}

  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    const Pictures p(x.shape);
    const float* given[4];
    for (std::size_t i = 0; i < 4; ++i) {
      const Tensor t = context.input(i + 1);
      expect(t && t.shape.count() == p.channels, "one element per channel");
      given[i] = t.floats();
    }
    const Output y = context.typed_output(0, x.shape);
    float* made[4];
    for (std::size_t i = 0; i < 4; ++i) made[i] = context.floats(i + 1, Shape{p.channels});
    const double count = static_cast<double>(p.count()), ratio = p.count() > 1 ? count / (count - 1) : NAN;
    with_type(x.type, [&](auto type) {
      using T = decltype(type);
      p.each(context, [&](std::int64_t c) {
        double total = 0, squares = 0;
        for (std::int64_t n = 0; n < p.images; ++n) {
          V part{};
          const T* from = values<T>(x) + p.at(n, c);
          vectors(p.plane, [&](std::int64_t i, auto span) { part += load(from + i, span); });
          total += sum(part);
        }
        const double mean = total / count;
        for (std::int64_t n = 0; n < p.images; ++n) {
          V part{};
          const T* from = values<T>(x) + p.at(n, c);
          vectors(p.plane, [&](std::int64_t i, auto span) {
            const V d = keep(load(from + i, span) - static_cast<float>(mean), span);
            part += d * d;
          });
          squares += sum(part);
        }
        const double variance = squares / count;
        const auto inv_std = static_cast<float>(1 / std::sqrt(variance + epsilon_));
        if (made[0]) made[0][c] = blend(given[2][c], mean);
        if (made[1]) made[1][c] = blend(given[3][c], variance * ratio);
        if (made[2]) made[2][c] = static_cast<float>(mean);
        if (made[3]) made[3][c] = inv_std;
        if (!y) return;
        const float factor = inv_std * given[0][c], bias = given[1][c];
        with_type(y.type, [&](auto made_type) {
          for (std::int64_t n = 0; n < p.images; ++n) {
            const T* from = values<T>(x) + p.at(n, c);
            auto* to = static_cast<decltype(made_type)*>(y.raw) + p.at(n, c);
            vectors(p.plane, [&](std::int64_t i, auto span) {
              store(to + i, (load(from + i, span) - static_cast<float>(mean)) * factor + bias, span);
            });
          }
        });
      });
    });
  }

 private:
  float blend(float old, double fresh) const { return static_cast<float>((1 - momentum_) * old + momentum_ * fresh); }

  double epsilon_, momentum_;
};

// (dY, X, Scale, SavedMean, SavedInvStd) -> (dX?, dScale?, dBias?).
class BatchNormGrad final : public Kernel {
 public:
  explicit BatchNormGrad(const Attributes&) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), x = context.input(1), scale = context.input(2), mean = context.input(3),
                 inv_std = context.input(4);
    const Pictures p(x.shape);
    expect(dy.shape == x.shape, "dY and X differ in shape");
    expect(scale.shape.count() == p.channels && mean.shape.count() == p.channels && inv_std.shape.count() == p.channels,
           "one element per channel");
    const Output dx = context.typed_output(0, x.shape);
    float *dscale = context.floats(1, Shape{p.channels}), *dbias = context.floats(2, Shape{p.channels});
    const Statistics s{scale.floats(), mean.floats(), inv_std.floats(), dscale, dbias};
    with_type(dy.type, [&](auto dy_type) {
      with_type(x.type, [&](auto x_type) {
        p.each(context, [&](std::int64_t c) {
          channel(p, c, values<decltype(dy_type)>(dy), values<decltype(x_type)>(x), s, dx);
        });
      });
    });
  }

 private:
  struct Statistics {
    const float *scale, *mean, *inv_std;
    float *dscale, *dbias;
  };

  template <class G, class T>
  static void channel(const Pictures& p, std::int64_t c, const G* dy, const T* x, const Statistics& s,
                      const Output& dx) {
    const float centre = s.mean[c], inv = s.inv_std[c];
    double total = 0, along = 0;
    for (std::int64_t n = 0; n < p.images; ++n) {
      V sums{}, products{};
      const G* g = dy + p.at(n, c);
      const T* from = x + p.at(n, c);
      vectors(p.plane, [&](std::int64_t i, auto span) {
        const V d = load(g + i, span);
        sums += d;
        products += keep(d * ((load(from + i, span) - centre) * inv), span);
      });
      total += sum(sums), along += sum(products);
    }
    if (dx) {
      const auto mean_g = static_cast<float>(total / static_cast<double>(p.count()));
      const auto mean_along = static_cast<float>(along / static_cast<double>(p.count()));
      const float factor = s.scale[c] * inv;
      with_type(dx.type, [&](auto made_type) {
        for (std::int64_t n = 0; n < p.images; ++n) {
          const G* g = dy + p.at(n, c);
          const T* from = x + p.at(n, c);
          auto* to = static_cast<decltype(made_type)*>(dx.raw) + p.at(n, c);
          vectors(p.plane, [&](std::int64_t i, auto span) {
            const V normal = (load(from + i, span) - centre) * inv;
            store(to + i, (load(g + i, span) - mean_g - normal * mean_along) * factor, span);
          });
        }
      });
    }
    if (s.dscale) s.dscale[c] = static_cast<float>(along);
    if (s.dbias) s.dbias[c] = static_cast<float>(total);
  }
};

}  // namespace

void add_batch_norm(Definitions& to) {
  add_variants(to, "BatchNorm", {low(0), kF, kF, kF, kF}, {low(1, kOptional), kF_, kF_, kF_, kF_}, make<BatchNorm>);
  add_variants(to, "BatchNormGrad", {low(0), low(1), kF, kF, kF}, {low(2, kOptional), kF_, kF_}, make<BatchNormGrad>);
}

}  // namespace ortgraph
