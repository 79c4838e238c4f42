// Convolution over one or two spatial dimensions.
#include "channels_last.h"
#include "gather.h"
#include "small_groups.h"
#include "winograd.h"

namespace ortgraph {
namespace {

// (X, W, B?) -> Y, as the ONNX operator; X and W are rounded to `precision` first. Scratch: padded images of about 512
// pixels, and W where it is converted.
class Conv final : public Kernel {
 public:
  explicit Conv(const Attributes& a) : options_(a), round_(rounds(a)) {}

  void compute(const Context& context) const override {
    const Tensor x = context.input(0), w = context.input(1), bias = context.input(2);
    const Window g = options_.of(x.shape, w.shape);
    expect(!bias || bias.shape.count() == g.filters, "one bias per filter");
    Shape shape = x.shape;
    shape.dim[1] = g.filters, shape.dim[x.shape.rank - 1] = g.out_columns;
    if (x.shape.rank == 4) shape.dim[2] = g.out_rows;
    const Output y = context.typed_output(0, shape);
    if (shape.count() == 0) return;
    const float* const more = bias ? bias.floats() : nullptr;
    if (small_groups::fits(g)) return small_groups::convolve(context, g, x, w, more, round_, y);
    const bool in_pairs = pairs_for(x, w, round_);
    if (in_pairs && channels_last::fits(g.group_filters())) {
      return channels_last::convolve<gemm::Pair>(context, g, x, w, more, round_, y);
    }
    if (const winograd::Tiling t = winograd::tiling_of(g); winograd::has_form(g) && winograd::pays(t)) {
      float* const weights = kept(Place::kFilters, winograd::kPoints * w.shape.count() / g.taps());
      const Weights plain(context, w, round_, false);
      winograd::transform_weights(context, plain.data(), g.filters, g.channels, false, weights);
      return winograd::convolve(context, x, t, round_, weights, more, y);
    }
    const Planes planes(g.group_channels(), g.padded_rows(), g.padded_columns(), g.step_x);
    float* source = kept(Place::kSource, g.images() * planes.image + kSlack);
    const Weights weights(context, w, round_, in_pairs);
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(g.depth()));
    for (std::int64_t k = 0; k < g.depth(); ++k) {
      const std::int64_t c = k / g.taps(), row = k % g.taps() / g.columns * g.spread_y,
          column = k % g.columns * g.spread_x;
      offsets[static_cast<std::size_t>(k)] =
          c * planes.plane + row * planes.pitch + column % g.step_x * planes.phase + column / g.step_x;
    }
    PairedRows pairs;
    if (in_pairs) {
      const Job all{1, 1, 1, 0, 0, nullptr, g.depth(), nullptr, nullptr, g.depth(), nullptr, g.filters};
      pairs = paired_rows(context, all, weights.low(), words_for(all));
    }
    for (std::int64_t first = 0; first < g.batch; first += g.images()) {
      const std::int64_t count = std::min(g.images(), g.batch - first);
      for (std::int64_t part = 0; part < g.group; ++part) {
        pad(context, x, first, count, g.channels, part * g.group_channels(), g.group_channels(), g.height, g.width,
            g.top,
            g.left, g.step_x, planes, round_, source);
        PairedRows some = pairs;
        some.at = pairs.at ? pairs.at + part * g.group_filters() * pairs.row : nullptr;
        const float* left = in_pairs ? nullptr : weights.data() + part * g.group_filters() * g.depth();
        const Job job{count, g.out_rows, g.out_columns, planes.image, g.step_y * planes.pitch, offsets.data(),
                      g.depth(), source, left, g.depth(), nullptr, g.group_filters(), some};
        multiply(context, job, [&](std::int64_t m, std::int64_t pixel, std::int64_t n, float* values) {
          const std::int64_t filter = part * g.group_filters() + m;
          if (bias) {
            const float b = bias.floats()[filter];
            vectors(n, [&](std::int64_t i, auto span) { store(values + i, load(values + i, span) + b, span); });
          }
          while (n > 0) {
            const std::int64_t at = pixel % g.pixels(), run = std::min(n, g.pixels() - at);
            write(y, ((first + pixel / g.pixels()) * g.filters + filter) * g.pixels() + at, run, values);
            pixel += run, n -= run, values += run;
          }
        });
      }
    }
  }

 private:
  WindowOptions options_;
  bool round_;
};

}  // namespace

void add_convolution(Definitions& to) {
  add_variants(to, "Conv", {low(0), low(1), kF_}, {low(2)}, make<Conv>);
}

}  // namespace ortgraph
