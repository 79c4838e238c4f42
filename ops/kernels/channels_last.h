// Convolutions and gradients of their inputs over images whose channels lie last: nothing is gathered. The channels of a
// pixel lie side by side, and so do the pixels of a row of the window; weights are packed in panels, once for each call.
//
// Operands are words of gemm_tile.h: `Single` one float32, `Pair` two bf16 numbers, of channels 2i and 2i + 1.
#pragma once

#include "panels.h"

namespace ortgraph {
namespace channels_last {

constexpr std::int64_t kBlock = 96;  // results' pixels of a part

// Images [first, first + count) of a group of channels as words, with zeros around.
template <class Arithmetic>
void turn_images(const Context& context, const Tensor& x, std::int64_t first, std::int64_t count,
                 std::int64_t all_channels, std::int64_t channel, std::int64_t height, std::int64_t width,
                 const Plan& plan, bool round, Word* to) {
  const std::int64_t rows = plan.y().size, columns = plan.x().size, pixel = plan.pixel(), lead = plan.x().lead;
  const std::int64_t seen = std::max<std::int64_t>(0, std::min(width, columns - lead));
  context.rows(count * rows, columns * plan.in(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t image = i / rows, y = i % rows - plan.y().lead;
      Word* const row = to + i * columns * pixel;
      if (y < 0 || y >= height) {
        std::fill(row, row + columns * pixel, Word{0});
        continue;
      }
      std::fill(row, row + std::min(lead, columns) * pixel, Word{0});
      std::fill(row + std::min(lead + seen, columns) * pixel, row + columns * pixel, Word{0});
      const std::int64_t plane = height * width;
      const std::int64_t from = ((first + image) * all_channels + channel) * plane + y * width;
      turn_channels<Arithmetic::kDepth>(x, from, plane, plan.in(), seen, round, row + lead * pixel, pixel);
    }
  });
}

// Sums of 6 pixels and N vectors of results over the runs of a block.
template <class Arithmetic, int N>
void tile(const Word* const* rows, const std::vector<Run>& runs, const Word* panel, float* const* to, bool add) {
  constexpr int R = gemm::kRows;
  V sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) sum[r][v] = add ? load(to[r] + v * kLanes, Full{}) : V{};
  }
  for (const Run& run : runs) {
    const Word* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows[r] + run.from;
    for (std::int64_t s = 0; s < run.words; ++s, panel += N * kLanes) {
      V column[N];
      for (int v = 0; v < N; ++v) std::memcpy(&column[v], panel + v * kLanes, sizeof(V));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) sum[r][v] = Arithmetic::multiply_add(sum[r][v], row[r] + s, column[v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) store(to[r] + v * kLanes, sum[r][v], Full{});
  }
}

template <class Arithmetic>
auto tile_of(std::int64_t vectors) {
  using Tile = void (*)(const Word* const*, const std::vector<Run>&, const Word*, float* const*, bool);
#ifdef __AVX512F__
  constexpr Tile all[] = {tile<Arithmetic, 1>, tile<Arithmetic, 2>, tile<Arithmetic, 3>, tile<Arithmetic, 4>};
#else
  constexpr Tile all[] = {tile<Arithmetic, 1>};
#endif
  return all[vectors - 1];
}

// Pixels [0, count) of `channels` from [pixel][kPanel] to planes.
template <class T>
void planes_out(const float* from, std::int64_t count, std::int64_t channels, const float* bias, T* to,
                std::int64_t plane) {
  for (std::int64_t c = 0; c < channels; c += kLanes) {
    const std::int64_t height = std::min<std::int64_t>(kLanes, channels - c);
    const V more = bias ? load(bias + c, Part{static_cast<int>(height)}) : V{};
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const int width = static_cast<int>(std::min<std::int64_t>(kLanes, count - i));
      V rows[kLanes] = {};
      for (int r = 0; r < width; ++r) {
        rows[r] = load(from + (i + r) * kPanel + c, Full{});
        if (bias) rows[r] += more;
      }
      turned(rows);
      for (std::int64_t r = 0; r < height; ++r) {
        if (width == kLanes) store(to + (c + r) * plane + i, rows[r], Full{});
        else store(to + (c + r) * plane + i, rows[r], Part{width});
      }
    }
  }
}

// Results' channels [channel, channel + plan.out()) of `all_channels`, for images [first, first + count).
template <class Arithmetic>
void multiply(const Context& context, const Plan& plan, const Word* source, const Word* weights, const float* bias,
              std::int64_t first, std::int64_t count, std::int64_t channel, std::int64_t all_channels,
              const Output& y) {
  const std::int64_t plane = plan.rows() * plan.columns(), pixels = count * plane;
  const std::int64_t blocks = (pixels + kBlock - 1) / kBlock, panels = (plan.out() + kPanel - 1) / kPanel;
  context.parallel(static_cast<std::size_t>(blocks * panels), [&](std::size_t part) {
    const std::int64_t begin = static_cast<std::int64_t>(part) % blocks * kBlock;
    const std::int64_t size = std::min(kBlock, pixels - begin), n = static_cast<std::int64_t>(part) / blocks * kPanel;
    const std::int64_t width = std::min(kPanel, plan.lanes() - n), channels = std::min(kPanel, plan.out() - n);
    alignas(64) float sums[(kBlock + 1) * kPanel];
    const Word* from[kBlock];
    std::uint32_t kind[kBlock];
    for (std::int64_t p = 0; p < size; ++p) {
      const std::int64_t image = (begin + p) / plane, at = (begin + p) % plane;
      const auto i = static_cast<std::size_t>(at / plan.columns()), j = static_cast<std::size_t>(at % plan.columns());
      from[p] = source + image * plan.picture() + plan.place(i, j);
      kind[p] = static_cast<std::uint32_t>(plan.kind(i, j));
    }
    const auto multiply_tile = tile_of<Arithmetic>(width / kLanes);
    for (std::size_t k = 0; k < plan.kinds().size(); ++k) {
      std::int64_t of_kind[kBlock], found = 0;
      for (std::int64_t p = 0; p < size; ++p) {
        if (kind[p] == k) of_kind[found++] = p;
      }
      const Kind& made = plan.kinds()[k];
      const Word* panel = weights + made.weights + n * made.words;
      if (made.words == 0) {
        for (std::int64_t i = 0; i < found; ++i) std::fill_n(sums + of_kind[i] * kPanel, width, 0.0f);
      }
      for (std::size_t b = 0; b < made.blocks.size(); ++b) {
        const std::int64_t words = std::min(kWords, made.words - static_cast<std::int64_t>(b) * kWords);
        for (std::int64_t i = 0; i < found; i += gemm::kRows) {
          const Word* rows[gemm::kRows];
          float* to[gemm::kRows];
          for (int r = 0; r < gemm::kRows; ++r) {
            const bool inside = i + r < found;
            const std::int64_t p = inside ? of_kind[i + r] : of_kind[i];
            rows[r] = from[p], to[r] = sums + (inside ? p : kBlock) * kPanel;
          }
          multiply_tile(rows, made.blocks[b], panel, to, b > 0);
        }
        panel += words * width;
      }
    }
    for (std::int64_t p = 0; p < size;) {
      const std::int64_t image = first + (begin + p) / plane, at = (begin + p) % plane;
      const std::int64_t run = std::min(size - p, plane - at);
      const std::int64_t to = (image * all_channels + channel + n) * plane + at;
      const float* const more = bias ? bias + channel + n : nullptr;
      if (y.type == kBfloat16) {
        planes_out(sums + p * kPanel, run, channels, more, static_cast<Bf16*>(y.raw) + to, plane);
      } else {
        planes_out(sums + p * kPanel, run, channels, more, static_cast<float*>(y.raw) + to, plane);
      }
      p += run;
    }
  });
}

// Whether results of so many channels fill their vectors.
inline bool fits(std::int64_t channels) { return 4 * channels >= 3 * ((channels + kLanes - 1) / kLanes * kLanes); }

// Images that are worked on at once: about 1 MiB of words.
inline std::int64_t images(const Plan& plan, std::int64_t batch) {
  return std::max<std::int64_t>(1, std::min(batch, (std::int64_t{1} << 18) / std::max<std::int64_t>(plan.picture(), 1)));
}

// All images of a group, from its weights on.
template <class Arithmetic>
void all_images(const Context& context, const Plan& plan, const Tensor& x, std::int64_t batch, std::int64_t height,
                std::int64_t width, std::int64_t part, std::int64_t group, const Word* weights, const float* bias,
                bool round, const Output& y) {
  const std::int64_t some = images(plan, batch);
  Word* const source = reinterpret_cast<Word*>(kept(Place::kSource, some * plan.picture()));
  for (std::int64_t first = 0; first < batch; first += some) {
    const std::int64_t count = std::min(some, batch - first);
    turn_images<Arithmetic>(context, x, first, count, group * plan.in(), part * plan.in(), height, width, plan, round,
                            source);
    multiply<Arithmetic>(context, plan, source, weights, bias, first, count, part * plan.out(), group * plan.out(), y);
  }
}

inline Plan plan_of(const Window& g, std::int64_t depth) {
  return Plan(Axis::forward(g.out_rows, g.step_y, g.rows, g.spread_y, g.top),
              Axis::forward(g.out_columns, g.step_x, g.columns, g.spread_x, g.left), g.columns, g.group_channels(),
              g.group_filters(), depth);
}
inline Plan turned_around(const Window& g, std::int64_t depth) {
  return Plan(Axis::backward(g.height, g.step_y, g.rows, g.spread_y, g.top),
              Axis::backward(g.width, g.step_x, g.columns, g.spread_x, g.left), g.columns, g.group_filters(),
              g.group_channels(), depth);
}

// Y.
template <class Arithmetic>
void convolve(const Context& context, const Window& g, const Tensor& x, const Tensor& w, const float* bias, bool round,
              const Output& y) {
  const Plan plan = plan_of(g, Arithmetic::kDepth);
  Word* const weights = reinterpret_cast<Word*>(kept(Place::kFilters, plan.weights()));
  for (std::int64_t part = 0; part < g.group; ++part) {
    const std::int64_t at = part * g.group_filters() * g.depth();
    const auto pack = [&](const auto* from) {
      pack_filters<Arithmetic>(context, from + at, g.taps(), plan, round, weights);
    };
    if (w.type == kBfloat16) pack(static_cast<const Bf16*>(w.raw));
    else pack(w.floats());
    all_images<Arithmetic>(context, plan, x, g.batch, g.height, g.width, part, g.group, weights, bias, round, y);
  }
}

// dX.
template <class Arithmetic>
void input_gradient(const Context& context, const Window& g, const Tensor& dy, const Tensor& w, bool round,
                    const Output& dx) {
  const Plan plan = turned_around(g, Arithmetic::kDepth);
  Word* const weights = reinterpret_cast<Word*>(kept(Place::kFilters, plan.weights()));
  for (std::int64_t part = 0; part < g.group; ++part) {
    const std::int64_t size = g.group_filters() * g.depth();
    const auto pack = [&](const auto* from) {
      pack_channels<Arithmetic>(context, from + part * size, g.taps(), plan, round, weights);
    };
    if (w.type == kBfloat16) pack(static_cast<const Bf16*>(w.raw));
    else pack(w.floats());
    all_images<Arithmetic>(context, plan, dy, g.batch, g.out_rows, g.out_columns, part, g.group, weights, nullptr,
                           round, dx);
  }
}

}  // namespace channels_last
}  // namespace ortgraph
