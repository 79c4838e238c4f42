// Gradients of convolution over one or two spatial dimensions.
#include "channels_last.h"
#include "gather.h"
#include "small_groups.h"
#include "weight_gradient.h"
#include "winograd.h"

namespace ortgraph {
namespace {

// The rows (or columns) of X that see a given rest of the window: x + lead = step q + rest, and the window positions
// whose offset has that rest, each with the rows of dY that it lies behind.
struct Rest {
  std::int64_t first, count, quotient;  // x = first + step i, i < count; q = quotient + i
  std::vector<std::int64_t> taps, behind;

  Rest(std::int64_t rest, std::int64_t size, std::int64_t lead, std::int64_t step, std::int64_t window,
       std::int64_t spread) {
    first = ((rest - lead) % step + step) % step;
    count = first < size ? (size - first - 1) / step + 1 : 0;
    quotient = (first + lead - rest) / step;
    for (std::int64_t t = 0; t < window; ++t) {
      if (t * spread % step != rest) continue;
      taps.push_back(t);
      behind.push_back((t * spread - rest) / step);
    }
  }
};

// dX of one group: each rest of the stride is a convolution of its own over dY, with the window positions that have it.
class InputGradient {
 public:
  InputGradient(const Window& g, bool round, bool pairs) : g_(g), round_(round), pairs_(pairs) {
    for (std::int64_t r = 0; r < g.step_y; ++r) y_.emplace_back(r, g.height, g.top, g.step_y, g.rows, g.spread_y);
    for (std::int64_t r = 0; r < g.step_x; ++r) x_.emplace_back(r, g.width, g.left, g.step_x, g.columns, g.spread_x);
    extent(y_, &front_y_, &rows_);
    extent(x_, &front_x_, &columns_);
  }

  Planes planes() const { return Planes(g_.group_filters(), rows_, columns_, 1); }

  void run(const Context& context, const Tensor& dy, const Weights& weights, std::int64_t part, float* source,
           const Output& dx) const {
    const std::int64_t from = part * g_.group_filters() * g_.depth();
    const float* left = pairs_ ? nullptr : weights.data() + from;
    const std::uint16_t* low = pairs_ ? weights.low() + from : nullptr;
    for (std::int64_t first = 0; first < g_.batch; first += g_.images()) {
      const std::int64_t count = std::min(g_.images(), g_.batch - first);
      pad(context, dy, first, count, g_.filters, part * g_.group_filters(), g_.group_filters(), g_.out_rows,
          g_.out_columns, front_y_, front_x_, 1, planes(), round_, source);
      for (const Rest& y : y_) {
        for (const Rest& x : x_) one(context, y, x, first, count, part, source, left, low, dx);
      }
    }
  }

 private:
  static void extent(const std::vector<Rest>& rests, std::int64_t* front, std::int64_t* size) {
    *front = 0, *size = 1;
    for (const Rest& rest : rests) {
      for (const std::int64_t behind : rest.behind) *front = std::max(*front, behind);
    }
    for (const Rest& rest : rests) *size = std::max(*size, rest.quotient + rest.count + *front);
  }
  void one(const Context& context, const Rest& y, const Rest& x, std::int64_t first, std::int64_t count,
           std::int64_t part, const float* source, const float* left, const std::uint16_t* low,
           const Output& dx) const {
    const Planes p = planes();
    std::vector<std::int64_t> offsets, left_offsets;
    for (std::int64_t f = 0; f < g_.group_filters(); ++f) {
      for (std::size_t i = 0; i < y.taps.size(); ++i) {
        for (std::size_t j = 0; j < x.taps.size(); ++j) {
          const std::int64_t row = front_y_ + y.quotient - y.behind[i], column = front_x_ + x.quotient - x.behind[j];
          offsets.push_back(f * p.plane + row * p.pitch + column);
          left_offsets.push_back(f * g_.depth() + y.taps[i] * g_.columns + x.taps[j]);
        }
      }
    }
    Job job{count, y.count, x.count, p.image, p.pitch, offsets.data(), static_cast<std::int64_t>(offsets.size()),
                  source, left, g_.taps(), left_offsets.data(), g_.group_channels()};
    if (pairs_) job.pairs = paired_rows(context, job, low, words_for(job));
    multiply(context, job, [&](std::int64_t m, std::int64_t pixel, std::int64_t n, const float* values) {
      const std::int64_t channel = part * g_.group_channels() + m, whole = y.count * x.count;
      const bool dense = g_.step_x == 1 && g_.step_y == 1;
      while (n > 0) {
        const std::int64_t image = (first + pixel / whole) * g_.channels + channel, at = pixel % whole;
        const std::int64_t i = at / x.count, j = at % x.count;
        const std::int64_t run = std::min(n, dense ? whole - at : x.count - j);
        const std::int64_t to = image * g_.inputs() + (y.first + i * g_.step_y) * g_.width + x.first + j * g_.step_x;
        if (g_.step_x == 1) {
          write(dx, to, run, values);
        } else {
          for (std::int64_t k = 0; k < run; ++k) write(dx, to + k * g_.step_x, 1, values + k);
        }
        pixel += run, n -= run, values += run;
      }
    });
  }

  const Window& g_;
  bool round_, pairs_;
  std::vector<Rest> y_, x_;
  std::int64_t front_y_, front_x_, rows_, columns_;
};

// out[f] = sum of dY over images and pixels.
void bias_gradient(const Context& context, const Tensor& dy, const Window& g, float* out) {
  context.rows(g.filters, g.batch * g.pixels(), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float line[512];
    for (std::int64_t f = begin; f < end; ++f) {
      double total = 0;
      for (std::int64_t n = 0; n < g.batch; ++n) {
        for (std::int64_t p = 0; p < g.pixels(); p += 512) {
          const std::int64_t count = std::min<std::int64_t>(512, g.pixels() - p);
          read(dy, (n * g.filters + f) * g.pixels() + p, count, false, line);
          V part{};
          vectors(count, [&](std::int64_t i, auto span) { part += load(line + i, span); });
          total += sum(part);
        }
      }
      out[f] = static_cast<float>(total);
    }
  });
}

// (dY, X, W) -> (dX?, dW?, dBias?); all three are rounded to `precision` first, dBias sums dY as it is.
class ConvGrad final : public Kernel {
 public:
  explicit ConvGrad(const Attributes& a) : options_(a), round_(rounds(a)) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), x = context.input(1), w = context.input(2);
    const Window g = options_.of(x.shape, w.shape);
    expect(dy.shape.count() == g.batch * g.filters * g.pixels(), "dY does not fit X and W");
    const Output dx = context.typed_output(0, x.shape);
    float* dw = context.floats(1, w.shape);
    float* dbias = context.floats(2, Shape{g.filters});
    if (dbias) bias_gradient(context, dy, g, dbias);
    if (dx && x.shape.count()) input_gradient(context, g, dy, w, dx);
    if (dw && w.shape.count()) weight_gradient(context, g, dy, x, dw);
  }

 private:
  void input_gradient(const Context& context, const Window& g, const Tensor& dy, const Tensor& w,
      const Output& dx) const {
    if (small_groups::fits(g)) return small_groups::InputGradient(g, round_).run(context, dy, w, dx);
    const bool pairs = pairs_for(dy, w, round_), fits = channels_last::fits(g.group_channels());
    if (pairs && fits) return channels_last::input_gradient<gemm::Pair>(context, g, dy, w, round_, dx);
    if (const auto t = winograd::turned_around(winograd::tiling_of(g)); winograd::has_form(g) && winograd::pays(t)) {
      const Weights weights(context, w, round_, false);
      float* const turned = kept(Place::kFilters, winograd::kPoints * w.shape.count() / g.taps());
      winograd::transform_weights(context, weights.data(), g.filters, g.channels, true, turned);
      return winograd::convolve(context, dy, t, round_, turned, nullptr, dx);
    }
    const bool strided = g.step_y > 1 || g.step_x > 1;
    if (fits && strided) return channels_last::input_gradient<gemm::Single>(context, g, dy, w, round_, dx);
    const Weights weights(context, w, round_, pairs);
    const InputGradient gradient(g, round_, pairs);
    float* source = kept(Place::kSource, g.images() * gradient.planes().image + kSlack);
    for (std::int64_t part = 0; part < g.group; ++part) {
      gradient.run(context, dy, weights, part, source, dx);
    }
  }

  void weight_gradient(const Context& context, const Window& g, const Tensor& dy, const Tensor& x, float* dw) const {
    if (small_groups::fits(g)) return small_groups::weight_gradient(context, g, dy, x, round_, dw);
    if (pairs_for(dy, x, round_)) {
      const WeightGradient<gemm::Pair> gradient(g);
      for (std::int64_t part = 0; part < g.group; ++part) gradient.run(context, dy, x, round_, part, dw);
      return;
    }
    if (const auto t = winograd::tiling_of(g); winograd::has_form(g) && winograd::pays(t)) {
      return winograd::weight_gradient(context, dy, x, t, round_, dw);
    }
    const WeightGradient<gemm::Single> gradient(g);
    for (std::int64_t part = 0; part < g.group; ++part) gradient.run(context, dy, x, round_, part, dw);
  }

  WindowOptions options_;
  bool round_;
};

}  // namespace

void add_convolution_grad(Definitions& to) {
  add_variants(to, "ConvGrad", {low(0), low(1), low(2)}, {low(3, kOptional), kF_, kF_}, make<ConvGrad>);
}

}  // namespace ortgraph
