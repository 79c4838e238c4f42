// Gradients of pooling over one or two spatial dimensions.
#include "window.h"

namespace ortgraph {
namespace {

// (dY, Indices, X) -> dX: dX[Indices[i]] += dY[i]. Indices are flat over the tensor and lie in the plane of dY[i].
class MaxPoolGrad final : public Kernel {
 public:
  explicit MaxPoolGrad(const Attributes&) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), indices = context.input(1), x = context.input(2);
    const std::int64_t count = same_count(dy, indices);
    expect(x.shape.rank >= 3 && dy.shape.rank == x.shape.rank, "X must be [N, C, ...]");
    float* dx = context.floats(0, x.shape);
    const std::int64_t planes = x.shape.count(0, 2), inner = x.shape.count(2, x.shape.rank);
    expect(planes == dy.shape.count(0, 2), "dY does not fit X");
    if (planes == 0) return;
    const std::int64_t outer = count / planes;
    context.rows(planes, inner, [&](std::int64_t begin, std::int64_t end) {
      std::fill(dx + begin * inner, dx + end * inner, 0.0f);
      for (std::int64_t p = begin; p < end; ++p) {
        for (std::int64_t i = p * outer; i < (p + 1) * outer; ++i) {
          const std::int64_t at = indices.ints()[i];
          if (at < p * inner || at >= (p + 1) * inner) refuse("index " + std::to_string(at) + " is outside its plane");
          dx[at] += dy.floats()[i];
        }
      }
    });
  }
};

// (dY, X) -> dX: each dY by the number of its window's elements, added over the window.
class AveragePoolGrad final : public Kernel {
 public:
  explicit AveragePoolGrad(const Attributes& a)
      : kernel_(a.shape("kernel_shape")), strides_(a.shape("strides")), pads_(a.shape("pads")),
        include_(a.integer("count_include_pad", 0) != 0) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), x = context.input(1);
    const std::size_t n = kernel_.rank;
    expect((n == 1 || n == 2) && x.shape.rank == n + 2 && dy.shape.rank == n + 2, "one or two spatial dimensions");
    float* dx = context.floats(0, x.shape);
    const std::int64_t planes = x.shape.count(0, 2), inner = x.shape.count(2, x.shape.rank);
    const Axis ys = n == 2 ? axis(x, dy, 0) : Axis{1, 1, 1, 1, 0, 0}, xs = axis(x, dy, n - 1);
    context.rows(planes, inner, [&](std::int64_t begin, std::int64_t end) {
      std::fill(dx + begin * inner, dx + end * inner, 0.0f);
      for (std::int64_t p = begin; p < end; ++p) {
        const float* from = dy.floats() + p * ys.out * xs.out;
        for (std::int64_t i = 0; i < ys.out; ++i) {
          for (std::int64_t j = 0; j < xs.out; ++j, ++from) spread(*from, ys, i, xs, j, dx + p * inner);
        }
      }
    });
  }

 private:
  struct Axis {
    std::int64_t size, out, kernel, stride, begin, end;

    // The elements that a window covers, and how many count for its mean.
    std::int64_t first(std::int64_t i) const { return std::max<std::int64_t>(0, i * stride - begin); }
    std::int64_t last(std::int64_t i) const { return std::min(size, i * stride - begin + kernel); }
    std::int64_t counted(std::int64_t i, bool pads) const {
      const std::int64_t n = pads ? std::min(i * stride + kernel, size + begin + end) - i * stride : last(i) - first(i);
      return std::max<std::int64_t>(n, 1);
    }
  };

  Axis axis(const Tensor& x, const Tensor& dy, std::size_t i) const {
    const std::size_t n = kernel_.rank;
    return Axis{x.shape.dim[2 + i],
                dy.shape.dim[2 + i],
                kernel_.dim[i],
                strides_.rank ? strides_.dim[i] : 1,
                pads_.rank ? pads_.dim[i] : 0,
                pads_.rank ? pads_.dim[n + i] : 0};
  }

  void spread(float value, const Axis& ys, std::int64_t i, const Axis& xs, std::int64_t j, float* plane) const {
    const float part = value / static_cast<float>(ys.counted(i, include_) * xs.counted(j, include_));
    for (std::int64_t y = ys.first(i); y < ys.last(i); ++y) {
      float* row = plane + y * xs.size;
      for (std::int64_t k = xs.first(j); k < xs.last(j); ++k) row[k] += part;
    }
  }

  Shape kernel_, strides_, pads_;
  bool include_;
};

}  // namespace

void add_pooling(Definitions& to) {
  static Definition max_pool("MaxPoolGrad", {kF, kI, kF}, {kF}, make<MaxPoolGrad>);
  static Definition average_pool("AveragePoolGrad", {kF, kF}, {kF}, make<AveragePoolGrad>);
  to.push_back(&max_pool);
  to.push_back(&average_pool);
}

}  // namespace ortgraph
