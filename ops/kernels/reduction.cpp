// Gradients of a bias: sums over all dimensions but the last.
#include "reduction.h"

namespace ortgraph {
namespace {

constexpr std::int64_t kWide = 2048;     // columns from which tasks of columns keep all cores busy
constexpr std::int64_t kColumns = 512;  // columns of one such task

// (dY [..., N]) -> dBias [N]; with keepdims the leading dimensions stay as 1.
class BiasGrad final : public Kernel {
 public:
  explicit BiasGrad(const Attributes& a) : keep_(a.integer("keepdims", 0) != 0) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0);
    expect(dy.shape.rank >= 1, "dY must have a dimension");
    Shape shape{dy.shape.back()};
    if (keep_) {
      shape = dy.shape;
      std::fill(shape.dim.begin(), shape.dim.begin() + (shape.rank - 1), 1);
    }
    column_sum(context, dy.floats(), dy.shape.rows(), dy.shape.back(), context.floats(0, shape));
  }

 private:
  bool keep_;
};

}  // namespace

void column_sum(const Context& context, const float* x, std::int64_t rows, std::int64_t width, float* out) {
  if (width >= kWide) {
    context.parallel(static_cast<std::size_t>((width + kColumns - 1) / kColumns), [&](std::size_t part) {
      const std::int64_t from = static_cast<std::int64_t>(part) * kColumns, n = std::min(kColumns, width - from);
      std::fill(out + from, out + from + n, 0.0f);
      for (std::int64_t begin = 0; begin < rows; begin += 64) {
        float block[kColumns] = {};
        for (std::int64_t r = begin; r < std::min(rows, begin + 64); ++r) {
          const float* row = x + r * width + from;
          for (std::int64_t c = 0; c < n; ++c) block[c] += row[c];
        }
        for (std::int64_t c = 0; c < n; ++c) out[from + c] += block[c];
      }
    });
    return;
  }
  const Partials partials(rows, width);
  context.rows(rows, width, [&](std::int64_t begin, std::int64_t end) {
    add_rows(x, begin, end, width, partials.clear(begin));
  });
  partials.total(0, width, out);
}

void add_reduction(Definitions& to) {
  static Definition bias_grad("BiasGrad", {kF}, {kF}, make<BiasGrad>);
  to.push_back(&bias_grad);
}

}  // namespace ortgraph
