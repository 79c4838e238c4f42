// Convolutions whose groups have few channels, depthwise ones above all: a window position is one factor for a whole
// plane, so planes are added up as they lie, and nothing is turned or packed.
#pragma once

#include <vector>

#include "panels.h"
#include "window.h"

namespace ortgraph {
namespace small_groups {

constexpr std::int64_t kFewest = 8;               // channels from which on products of matrices are faster
constexpr std::int64_t kStrip = 4 * kLanes;       // elements that are added up at once
constexpr std::int64_t kBeyond = kStrip + kLanes; // that are read behind the last one, and go nowhere
constexpr int kTaps = 9;                          // sums of dW at once

inline bool fits(const Window& g) { return g.group > 1 && std::min(g.group_channels(), g.group_filters()) < kFewest; }

// Numbers at even and odd places of [0, count), and back.
inline void split_two(const float* from, std::int64_t count, float* even, float* odd) {
  std::int64_t i = 0;
#if defined(__GNUC__) && !defined(__clang__)
  constexpr Vi pick{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const V a = load(from + i, Full{}), b = load(from + i + kLanes, Full{});
    store(even + i / 2, __builtin_shuffle(a, b, pick), Full{});
    store(odd + i / 2, __builtin_shuffle(a, b, pick + 1), Full{});
  }
#endif
  for (; i < count; ++i) (i % 2 ? odd : even)[i / 2] = from[i];
}
inline void join_two(const float* even, const float* odd, std::int64_t count, float* to) {
  std::int64_t i = 0;
#if defined(__GNUC__) && !defined(__clang__)
  constexpr Vi pick{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const V a = load(even + i / 2, Full{}), b = load(odd + i / 2, Full{});
    store(to + i, __builtin_shuffle(a, b, pick), Full{});
    store(to + i + kLanes, __builtin_shuffle(a, b, pick + 8), Full{});
  }
#endif
  for (; i < count; ++i) to[i] = (i % 2 ? odd : even)[i / 2];
}

// One padded plane; rows and columns are apart by their rest modulo the stride, so that neighbouring windows read
// neighbouring elements.
struct Grid {
  std::int64_t step_y, step_x, rows, pitch;
  Grid(std::int64_t height, std::int64_t width, std::int64_t step_y_, std::int64_t step_x_)
      : step_y(step_y_), step_x(step_x_), rows((height + step_y - 1) / step_y), pitch((width + step_x - 1) / step_x) {}

  std::int64_t size() const { return step_y * step_x * rows * pitch + pitch + kBeyond; }
  std::int64_t at(std::int64_t y, std::int64_t x) const {
    return ((y % step_y * step_x + x % step_x) * rows + y / step_y) * pitch + x / step_x;
  }

  // The plane that begins at element `from`; `line` holds one row.
  void fill(const Tensor& t, std::int64_t from, std::int64_t height, std::int64_t width, std::int64_t top,
            std::int64_t left, bool round, float* line, float* to) const {
    std::fill_n(to, size(), 0.0f);
    const std::int64_t last = std::min(height, rows * step_y - top), seen = std::min(width, pitch * step_x - left);
    for (std::int64_t y = 0; y < last && seen > 0; ++y) {
      if (step_x == 1) {
        read(t, from + y * width, seen, round, to + at(y + top, left));
        continue;
      }
      read(t, from + y * width, seen, round, line);
      if (step_x == 2) {
        split_two(line, seen, to + at(y + top, left), to + at(y + top, left + 1));
        continue;
      }
      for (std::int64_t rest = 0; rest < std::min(step_x, seen); ++rest) {
        float* column = to + at(y + top, left + rest);
        for (std::int64_t x = rest; x < seen; x += step_x) *column++ = line[x];
      }
    }
  }
};

// to[i] (+)= sum over taps of w[t] from[i + offsets[t]], i < count.
inline void add_up(const float* from, const std::vector<std::int64_t>& offsets, const float* w, std::int64_t count,
                   bool add, float* to) {
  for (std::int64_t i = 0; i < count; i += kStrip) {
    V sums[4];
    for (int v = 0; v < 4; ++v) sums[v] = add ? load(to + i + v * kLanes, Full{}) : V{};
    for (std::size_t t = 0; t < offsets.size(); ++t) {
      const V factor = splat(w[t]);
      const float* at = from + i + offsets[t];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[v] += factor * load(at + v * kLanes, Full{});
    }
    for (int v = 0; v < 4; ++v) store(to + i + v * kLanes, sums[v], Full{});
  }
}

inline Grid grid_of(const Window& g) { return Grid(g.padded_rows(), g.padded_columns(), g.step_y, g.step_x); }

inline std::vector<std::int64_t> offsets_of(const Window& g, const Grid& grid) {
  std::vector<std::int64_t> all;
  for (std::int64_t t = 0; t < g.taps(); ++t) {
    all.push_back(grid.at(t / g.columns * g.spread_y, t % g.columns * g.spread_x));
  }
  return all;
}

// Weights of a group as floats.
inline void weights_of(const Tensor& w, std::int64_t part, std::int64_t count, bool round, float* to) {
  read(w, part * count, count, round, to);
}

// Y. A part is a group of an image.
inline void convolve(const Context& context, const Window& g, const Tensor& x, const Tensor& w, const float* bias,
                     bool round, const Output& y) {
  const Grid grid = grid_of(g);
  const std::vector<std::int64_t> offsets = offsets_of(g, grid);
  const std::int64_t channels = g.group_channels(), filters = g.group_filters(), count = g.out_rows * grid.pitch;
  const std::int64_t numbers = filters * g.depth();
  context.rows(g.batch * g.group, g.depth() * filters * g.pixels() / 8, [&](std::int64_t begin, std::int64_t end) {
    float* const source = kept(Place::kLocal, channels * grid.size() + numbers + count + kBeyond + g.width + kLanes);
    float *const factors = source + channels * grid.size(), *const sums = factors + numbers,
          *const line = sums + count + kBeyond;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t image = i / g.group, part = i % g.group;
      weights_of(w, part, numbers, round, factors);
      for (std::int64_t c = 0; c < channels; ++c) {
        grid.fill(x, (image * g.channels + part * channels + c) * g.inputs(), g.height, g.width, g.top, g.left, round,
                  line, source + c * grid.size());
      }
      for (std::int64_t f = 0; f < filters; ++f) {
        const std::int64_t filter = part * filters + f;
        for (std::int64_t c = 0; c < channels; ++c) {
          add_up(source + c * grid.size(), offsets, factors + f * g.depth() + c * g.taps(), count, c > 0, sums);
        }
        for (std::int64_t r = 0; r < g.out_rows; ++r) {
          float* const row = sums + r * grid.pitch;
          if (bias) {
            const float more = bias[filter];
            vectors(g.out_columns, [&](std::int64_t j, auto span) { store(row + j, load(row + j, span) + more, span); });
          }
          write(y, ((image * g.filters + filter) * g.out_rows + r) * g.out_columns, g.out_columns, row);
        }
      }
    }
  });
}

// dX: results with the same rests of the stride are a plane of their own, put together row by row.
class InputGradient {
 public:
  InputGradient(const Window& g, bool round)
      : g_(g), round_(round), y_(channels_last::Axis::backward(g.height, g.step_y, g.rows, g.spread_y, g.top)),
        x_(channels_last::Axis::backward(g.width, g.step_x, g.columns, g.spread_x, g.left)),
        grid_(y_.size, x_.size, 1, 1) {
    for (std::size_t i = 0; i < y_.kinds.size(); ++i) {
      for (std::size_t j = 0; j < x_.kinds.size(); ++j) add(i, j);
    }
  }

  void run(const Context& context, const Tensor& dy, const Tensor& w, const Output& dx) const {
    const std::int64_t channels = g_.group_channels(), filters = g_.group_filters(), numbers = filters * g_.depth();
    const std::int64_t sums_size = static_cast<std::int64_t>(rests_.size()) * room();
    context.rows(g_.batch * g_.group, channels * filters * g_.inputs() * g_.taps() / (8 * g_.step_y * g_.step_x),
                 [&](std::int64_t begin, std::int64_t end) {
      float* const source =
          kept(Place::kLocal, filters * grid_.size() + 2 * numbers + sums_size + g_.width + kLanes);
      float *const factors = source + filters * grid_.size(), *const chosen = factors + numbers,
            *const sums = chosen + numbers, *const line = sums + sums_size;
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t image = i / g_.group, part = i % g_.group;
        weights_of(w, part, numbers, round_, factors);
        for (std::int64_t f = 0; f < filters; ++f) {
          grid_.fill(dy, (image * g_.filters + part * filters + f) * g_.pixels(), g_.out_rows, g_.out_columns, y_.lead,
                     x_.lead, round_, line, source + f * grid_.size());
        }
        for (std::int64_t c = 0; c < channels; ++c) {
          for (std::size_t r = 0; r < rests_.size(); ++r) {
            const Rest& rest = rests_[r];
            for (std::int64_t f = 0; f < filters; ++f) {
              const float* from = factors + f * g_.depth() + c * g_.taps();
              for (std::size_t t = 0; t < rest.taps.size(); ++t) chosen[t] = from[rest.taps[t]];
              add_up(source + f * grid_.size(), rest.offsets, chosen, rest.count, f > 0,
                     sums + static_cast<std::int64_t>(r) * room());
            }
          }
          put(sums, (image * g_.channels + part * channels + c) * g_.inputs(), line, dx);
        }
      }
    });
  }

 private:
  struct Rest {
    std::int64_t first = 0, count = 0;  // column; elements of its plane
    std::vector<std::int64_t> taps, offsets;
  };

  void add(std::size_t i, std::size_t j) {
    Rest rest;
    const auto y = std::find(y_.kind.begin(), y_.kind.end(), i), x = std::find(x_.kind.begin(), x_.kind.end(), j);
    if (y != y_.kind.end() && x != x_.kind.end()) {
      rest.first = x - x_.kind.begin();
      const std::int64_t place = y_.place[static_cast<std::size_t>(y - y_.kind.begin())] * grid_.pitch +
                                 x_.place[static_cast<std::size_t>(rest.first)];
      rest.count = std::count(y_.kind.begin(), y_.kind.end(), i) * grid_.pitch;
      for (const channels_last::Tap& row : y_.kinds[i]) {
        for (const channels_last::Tap& cell : x_.kinds[j]) {
          rest.taps.push_back(row.index * g_.columns + cell.index);
          rest.offsets.push_back(place + row.at * grid_.pitch + cell.at);
        }
      }
    }
    rests_.push_back(std::move(rest));
  }
  std::int64_t room() const { return ((g_.height + g_.step_y - 1) / g_.step_y) * grid_.pitch + kBeyond; }

  void put(const float* sums, std::int64_t at, float* line, const Output& dx) const {
    for (std::int64_t y = 0; y < g_.height; ++y) {
      const std::int64_t kind = static_cast<std::int64_t>(y_.kind[static_cast<std::size_t>(y)]) * g_.step_x;
      const auto row = [&](std::int64_t j) { return sums + (kind + j) * room() + y / g_.step_y * grid_.pitch; };
      const auto first = [&](std::int64_t j) { return rests_[static_cast<std::size_t>(kind + j)].first; };
      if (g_.step_x == 1) {
        write(dx, at + y * g_.width, g_.width, row(0));
        continue;
      }
      if (g_.step_x == 2 && g_.width > 1) {
        const std::int64_t leading = first(0) == 0 ? 0 : 1;
        join_two(row(leading), row(1 - leading), g_.width, line);
      } else {
        for (std::int64_t j = 0; j < g_.step_x; ++j) {
          const float* from = row(j);
          if (rests_[static_cast<std::size_t>(kind + j)].count == 0) continue;
          for (std::int64_t x = first(j); x < g_.width; x += g_.step_x) line[x] = *from++;
        }
      }
      write(dx, at + y * g_.width, g_.width, line);
    }
  }

  const Window& g_;
  bool round_;
  channels_last::Axis y_, x_;
  Grid grid_;
  std::vector<Rest> rests_;
};

// sums[t] += d[j] x[offsets[t] + j] for up to kTaps positions, j < count.
inline void along(const float* d, const float* x, const std::int64_t* offsets, std::int64_t count, V (&sums)[kTaps]) {
  vectors(count, [&](std::int64_t j, auto span) {
    const V factor = load(d + j, span);
#pragma GCC unroll 9
    for (int t = 0; t < kTaps; ++t) sums[t] += factor * keep(load(x + offsets[t] + j, Full{}), span);
  });
}

// dW. A part is a group; its images are added up in order.
inline void weight_gradient(const Context& context, const Window& g, const Tensor& dy, const Tensor& x, bool round,
                            float* dw) {
  const Grid grid = grid_of(g);
  std::vector<std::int64_t> offsets = offsets_of(g, grid);
  while (offsets.size() % kTaps) offsets.push_back(offsets.back());
  const std::int64_t channels = g.group_channels(), filters = g.group_filters(), numbers = filters * g.depth();
  context.rows(g.group, g.batch * numbers * g.pixels() / 8, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t result = filters * g.pixels();
    float* const source = kept(Place::kLocal, channels * grid.size() + result + g.width + kLanes);
    float *const gradient = source + channels * grid.size(), *const line = gradient + result;
    const Scratch<double> sums(static_cast<std::size_t>(numbers));
    for (std::int64_t part = begin; part < end; ++part) {
      std::fill_n(sums.data(), numbers, 0.0);
      for (std::int64_t image = 0; image < g.batch; ++image) {
        for (std::int64_t c = 0; c < channels; ++c) {
          grid.fill(x, (image * g.channels + part * channels + c) * g.inputs(), g.height, g.width, g.top, g.left,
                    round, line, source + c * grid.size());
        }
        read(dy, (image * g.filters + part * filters) * g.pixels(), result, round, gradient);
        for (std::int64_t i = 0; i < filters * channels; ++i) {
          const float *d = gradient + i / channels * g.pixels(), *from = source + i % channels * grid.size();
          for (std::int64_t t = 0; t < g.taps(); t += kTaps) {
            V some[kTaps] = {};
            for (std::int64_t r = 0; r < g.out_rows; ++r) {
              along(d + r * g.out_columns, from + r * grid.pitch, offsets.data() + t, g.out_columns, some);
            }
            for (std::int64_t k = 0; k < std::min<std::int64_t>(kTaps, g.taps() - t); ++k) {
              sums[static_cast<std::size_t>(i * g.taps() + t + k)] += sum(some[k]);
            }
          }
        }
      }
      for (std::int64_t i = 0; i < numbers; ++i) {
        dw[part * numbers + i] = static_cast<float>(sums[static_cast<std::size_t>(i)]);
      }
    }
  });
}

}  // namespace small_groups
}  // namespace ortgraph
