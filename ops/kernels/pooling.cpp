// Max pooling and the gradients of pooling, over one or two spatial dimensions.
#include "window.h"

namespace ortgraph {
namespace {

// X -> (Y, Indices?): the largest value of each window and the first place where it lies, flat over the tensor; where a
// window has NaN, the last one.
class MaxPool final : public Kernel {
 public:
  explicit MaxPool(const Attributes& a)
      : kernel_(a.shape("kernel_shape")), strides_(a.shape("strides")), pads_(a.shape("pads")) {
    expect(a.integer("ceil_mode", 0) == 0 && a.integer("storage_order", 0) == 0, "ceil_mode, storage_order must be 0");
    expect(a.text("auto_pad", "NOTSET") == "NOTSET", "auto_pad must be NOTSET");
  }

  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    const std::size_t n = kernel_.rank;
    expect((n == 1 || n == 2) && x.shape.rank == n + 2, "one or two spatial dimensions");
    const Axis ys = n == 2 ? axis(x.shape.dim[2], 0) : Axis{1, 1, 1, 0, 1}, xs = axis(x.shape.dim[n + 1], n - 1);
    Shape shape = x.shape;
    if (n == 2) shape.dim[2] = ys.out;
    shape.dim[n + 1] = xs.out;
    float* y = context.floats(0, shape);
    std::int64_t* indices = static_cast<std::int64_t*>(context.output(1, shape));
    if (shape.count() == 0) return;
    const std::int64_t inner = ys.size * xs.size, outer = ys.out * xs.out;
    const Planes planes(1, ys.size, (xs.out - 1) * xs.stride + xs.kernel, xs.stride);
    context.rows(x.shape.count(0, 2), inner, [&](std::int64_t begin, std::int64_t end) {
      float* const plane = kept(Place::kLocal, planes.plane + kLanes);
      std::fill(plane, plane + planes.plane + kLanes, -std::numeric_limits<float>::infinity());
      for (std::int64_t p = begin; p < end; ++p) {
        spread(x.floats() + p * inner, ys.size, xs, planes, plane);
        for (std::int64_t i = 0; i < ys.out; ++i) {
          const std::int64_t at = p * outer + i * xs.out;
          row(plane, planes, ys, xs, i, p * inner, y ? y + at : nullptr, indices ? indices + at : nullptr);
        }
      }
    });
  }

 private:
  struct Axis {
    std::int64_t size, kernel, stride, begin, out;
  };
  // Columns by their rest modulo the stride, so that neighbouring windows read neighbouring elements.
  struct Planes {
    std::int64_t phase, pitch, plane;
    Planes(std::int64_t, std::int64_t rows, std::int64_t columns, std::int64_t step)
        : phase((columns + step - 1) / step), pitch(phase * step), plane(rows * pitch) {}
  };

  Axis axis(std::int64_t size, std::size_t i) const {
    const std::int64_t begin = pads_.rank ? pads_.dim[i] : 0, end = pads_.rank ? pads_.dim[kernel_.rank + i] : 0;
    const std::int64_t stride = strides_.rank ? strides_.dim[i] : 1, free = size + begin + end - kernel_.dim[i];
    expect(begin < kernel_.dim[i] && end < kernel_.dim[i], "pads must be smaller than the window");
    return {size, kernel_.dim[i], stride, begin, free < 0 ? 0 : free / stride + 1};
  }

  static void spread(const float* x, std::int64_t rows, const Axis& xs, const Planes& planes, float* to) {
    const std::int64_t count = std::min(xs.size, planes.pitch - xs.begin);
    for (std::int64_t r = 0; r < rows; ++r, x += xs.size, to += planes.pitch) {
      for (std::int64_t rest = 0; rest < xs.stride; ++rest) {
        const std::int64_t first = ((rest - xs.begin) % xs.stride + xs.stride) % xs.stride;
        float* phase = to + rest * planes.phase + (first + xs.begin) / xs.stride;
        for (std::int64_t j = first; j < count; j += xs.stride) *phase++ = x[j];
      }
    }
  }

  static void row(const float* plane, const Planes& planes, const Axis& ys, const Axis& xs, std::int64_t i,
                  std::int64_t start, float* y, std::int64_t* indices) {
    constexpr Vi lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const std::int64_t top = i * ys.stride - ys.begin, first = std::max<std::int64_t>(top, 0);
    const std::int64_t last = std::min(ys.size, top + ys.kernel);
    vectors(xs.out, [&](std::int64_t j, auto span) {
      V best = splat(-std::numeric_limits<float>::infinity());
      const Vi column = (lane + static_cast<int>(j)) * static_cast<int>(xs.stride) - static_cast<int>(xs.begin);
      Vi place = (column < 0 ? Vi{} : column) + static_cast<int>(first * xs.size);
      for (std::int64_t r = first; r < last; ++r) {
        for (std::int64_t k = 0; k < xs.kernel; ++k) {
          const V value =
              load(plane + r * planes.pitch + k % xs.stride * planes.phase + k / xs.stride + j, Full{});
          const Vi taken = (value > best) | (value != value);
          best = taken ? value : best;
          place = taken ? column + static_cast<int>(r * xs.size + k) : place;
        }
      }
      if (y) store(y + j, best, span);
      if (!indices) return;
      for (int l = 0; l < span.size(); ++l) indices[j + l] = start + place[l];
    });
  }

  Shape kernel_, strides_, pads_;
};

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
  static Definition max_values("MaxPool", {kF}, {{kFloat, kOptional}, {kInt64, kOptional}}, make<MaxPool>);
  static Definition max_pool("MaxPoolGrad", {kF, kI, kF}, {kF}, make<MaxPoolGrad>);
  to.push_back(&max_values);
  static Definition average_pool("AveragePoolGrad", {kF, kF}, {kF}, make<AveragePoolGrad>);
  to.push_back(&max_pool);
  to.push_back(&average_pool);
}

}  // namespace ortgraph
