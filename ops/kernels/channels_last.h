// Convolutions and gradients of their inputs over images whose channels lie last: nothing is gathered. The channels of a
// pixel lie side by side, and so do the pixels of a row of the window; weights are packed in panels, once for each call.
//
// Operands are words of gemm_tile.h: `Single` one float32, `Pair` two bf16 numbers, of channels 2i and 2i + 1.
#pragma once

#include <vector>

#include "gemm_tile.h"
#include "turn.h"
#include "window.h"

namespace ortgraph {
namespace channels_last {

using gemm::Word;
constexpr std::int64_t kPanel = gemm::kColumns;  // results' channels that are worked on at once
constexpr std::int64_t kVectors = gemm::kVectors;
constexpr std::int64_t kBlock = 96;              // results' pixels of a part
constexpr std::int64_t kWords = 128;             // of a dot product at once: their panel stays in the first cache

// Window positions along one axis, for results of one kind: those that see the same ones.
struct Tap {
  std::int64_t index, at;  // the pixel lies `at` behind the result's place
};

// One axis of the source with its padding, and where each result's window lies on it.
struct Axis {
  std::int64_t lead = 0, size = 0;  // zeros in front, and all elements
  std::vector<std::int64_t> place;
  std::vector<std::size_t> kind;
  std::vector<std::vector<Tap>> kinds;

  // Of Y over X.
  static Axis forward(std::int64_t out, std::int64_t step, std::int64_t window, std::int64_t spread,
                      std::int64_t lead) {
    Axis a;
    a.lead = lead, a.size = (out - 1) * step + (window - 1) * spread + 1;
    for (std::int64_t i = 0; i < out; ++i) a.place.push_back(i * step), a.kind.push_back(0);
    a.kinds.emplace_back();
    for (std::int64_t t = 0; t < window; ++t) a.kinds[0].push_back({t, t * spread});
    return a;
  }

  // Of dX over dY: results with the same rest of the stride see the window positions that have it.
  static Axis backward(std::int64_t size, std::int64_t step, std::int64_t window, std::int64_t spread,
                       std::int64_t lead) {
    Axis a;
    a.kinds.resize(static_cast<std::size_t>(step));
    for (std::int64_t t = window - 1; t >= 0; --t) {
      const std::int64_t behind = t * spread / step;
      a.kinds[static_cast<std::size_t>(t * spread % step)].push_back({t, -behind});
      a.lead = std::max(a.lead, behind);
    }
    for (std::int64_t i = 0; i < size; ++i) {
      a.place.push_back((i + lead) / step + a.lead);
      a.kind.push_back(static_cast<std::size_t>((i + lead) % step));
      a.size = std::max(a.size, a.place.back() + 1);
    }
    return a;
  }
};

// Words that lie side by side, counted from a pixel's place.
struct Run {
  std::int64_t from, words;
};

// What results of one kind are made of: taps in the order of their pixels, and these as runs, cut to blocks of kWords.
struct Kind {
  std::vector<std::int64_t> taps;
  std::vector<std::vector<Run>> blocks;
  std::int64_t words = 0, weights = 0;  // of a dot product; where the panels begin
};

// A whole product: geometry only.
class Plan {
 public:
  Plan(Axis y, Axis x, std::int64_t columns, std::int64_t in, std::int64_t out, std::int64_t depth)
      : y_(std::move(y)), x_(std::move(x)), in_(in), out_(out), pixel_((in + depth - 1) / depth) {
    for (const std::vector<Tap>& rows : y_.kinds) {
      for (const std::vector<Tap>& cells : x_.kinds) add(rows, cells, columns);
    }
  }

  const Axis& y() const { return y_; }
  const Axis& x() const { return x_; }
  std::int64_t in() const { return in_; }
  std::int64_t out() const { return out_; }
  std::int64_t lanes() const { return (out_ + kLanes - 1) / kLanes * kLanes; }
  std::int64_t pixel() const { return pixel_; }                             // words of one
  std::int64_t picture() const { return y_.size * x_.size * pixel_; }       // words of an image
  std::int64_t weights() const { return weights_; }                         // words of all panels
  std::int64_t rows() const { return static_cast<std::int64_t>(y_.place.size()); }
  std::int64_t columns() const { return static_cast<std::int64_t>(x_.place.size()); }
  const std::vector<Kind>& kinds() const { return kinds_; }
  std::size_t kind(std::size_t i, std::size_t j) const { return y_.kind[i] * x_.kinds.size() + x_.kind[j]; }
  std::int64_t place(std::size_t i, std::size_t j) const { return (y_.place[i] * x_.size + x_.place[j]) * pixel_; }

  // Where the words of a window position's channels go, 16 results from `lane` on, and from one to the next.
  struct Slot {
    std::int64_t at, step;
  };
  Slot slot(std::size_t kind, std::size_t tap, std::int64_t lane) const {
    const std::int64_t first = lane / kPanel * kPanel, width = std::min(kPanel, lanes() - first);
    const Kind& k = kinds_[kind];
    return {k.weights + first * k.words + static_cast<std::int64_t>(tap) * pixel_ * width + lane - first, width};
  }

 private:
  void add(const std::vector<Tap>& rows, const std::vector<Tap>& cells, std::int64_t columns) {
    Kind k;
    k.weights = weights_;
    std::int64_t room = 0, end = -1;
    for (const Tap& row : rows) {
      for (const Tap& cell : cells) {
        k.taps.push_back(row.index * columns + cell.index);
        std::int64_t from = (row.at * x_.size + cell.at) * pixel_;
        for (std::int64_t left = pixel_; left > 0;) {
          if (room == 0) k.blocks.emplace_back(), room = kWords, end = -1;
          const std::int64_t words = std::min(left, room);
          std::vector<Run>& runs = k.blocks.back();
          if (!runs.empty() && from == end) runs.back().words += words;
          else runs.push_back({from, words});
          from += words, end = from, left -= words, room -= words;
        }
      }
    }
    k.words = static_cast<std::int64_t>(k.taps.size()) * pixel_;
    weights_ += k.words * lanes();
    kinds_.push_back(std::move(k));
  }

  Axis y_, x_;
  std::int64_t in_, out_, pixel_, weights_ = 0;
  std::vector<Kind> kinds_;
};

// Panels from W [filters, channels, taps], for Y: the filters are the results.
template <class Arithmetic, class T>
void pack_filters(const Context& context, const T* w, std::int64_t taps, const Plan& plan, bool round, Word* to) {
  constexpr std::int64_t kDepth = Arithmetic::kDepth;
  const std::int64_t c = plan.in(), f = plan.out();
  const std::int64_t chunk = std::min((c + kDepth - 1) / kDepth * kDepth, std::max<std::int64_t>(256 / taps / 2 * 2, 2));
  const std::int64_t chunks = (c + chunk - 1) / chunk, groups = plan.lanes() / kLanes;
  const std::vector<std::int64_t>& order = plan.kinds()[0].taps;
  context.rows(groups * chunks, chunk * taps * kLanes, [&](std::int64_t begin, std::int64_t end) {
    float* const lines = kept(Place::kLocal, (chunk * taps + kLanes) * kLanes);
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t lane = part / chunks * kLanes, first = part % chunks * chunk;
      const std::int64_t count = std::min(chunk, c - first), numbers = count * taps;
      for (std::int64_t j = 0; j < numbers; j += kLanes) {
        const int n = static_cast<int>(std::min<std::int64_t>(kLanes, numbers - j));
        V rows[kLanes] = {};
        for (std::int64_t r = 0; r < std::min<std::int64_t>(kLanes, f - lane); ++r) {
          const T* from = w + ((lane + r) * c + first) * taps + j;
          rows[r] = n == kLanes ? load(from, Full{}) : load(from, Part{n});
        }
        turned(rows);
        for (int r = 0; r < kLanes; ++r) store(lines + (j + r) * kLanes, rows[r], Full{});
      }
      for (std::size_t t = 0; t < order.size(); ++t) {
        const Plan::Slot slot = plan.slot(0, t, lane);
        for (std::int64_t i = 0; i < count; i += kDepth) {
          const float* from = lines + (i * taps + order[t]) * kLanes;
          const V odd = i + 1 < count ? load(from + taps * kLanes, Full{}) : V{};
          store_words(to + slot.at + (first + i) / kDepth * slot.step,
                      Words<kDepth>::of(load(from, Full{}), odd, round), kLanes);
        }
      }
    }
  });
}

// The same for dX: the channels are the results.
template <class Arithmetic, class T>
void pack_channels(const Context& context, const T* w, std::int64_t taps, const Plan& plan, bool round, Word* to) {
  constexpr std::int64_t kDepth = Arithmetic::kDepth;
  const std::int64_t f = plan.in(), c = plan.out(), groups = plan.lanes() / kLanes;
  std::vector<Plan::Slot> slots(static_cast<std::size_t>(groups * taps));  // a tap belongs to one kind
  for (std::size_t k = 0; k < plan.kinds().size(); ++k) {
    const std::vector<std::int64_t>& order = plan.kinds()[k].taps;
    for (std::size_t t = 0; t < order.size(); ++t) {
      for (std::int64_t g = 0; g < groups; ++g) {
        slots[static_cast<std::size_t>(g * taps + order[t])] = plan.slot(k, t, g * kLanes);
      }
    }
  }
  const std::int64_t words = (f + kDepth - 1) / kDepth, panels = (groups + kVectors - 1) / kVectors;
  context.rows(panels * words, kDepth * kPanel * taps, [&](std::int64_t begin, std::int64_t end) {
    float* const line = kept(Place::kLocal, (kPanel * taps + 2 * kLanes));
    for (std::int64_t part = begin; part < end; ++part) {
      const std::int64_t word = part % words, first = part / words * kPanel;
      const std::int64_t count = std::min(kPanel, c - first), numbers = count * taps;
      const T* const even = w + (word * kDepth * c + first) * taps;
      const T* const odd = kDepth == 2 && word * kDepth + 1 < f ? even + c * taps : nullptr;
      const std::int64_t next = word + 1 < words ? kDepth * c * taps : 0;  // memory far away: nobody else fetches it
      for (std::int64_t j = 0; j < numbers; j += kLanes) {
        const int n = static_cast<int>(std::min<std::int64_t>(kLanes, numbers - j));
        __builtin_prefetch(even + next + j);
        if (odd) __builtin_prefetch(odd + next + j);
        store(line + j, reinterpret_cast<V>(Words<kDepth>::at(even + j, odd ? odd + j : nullptr, n, round)), Full{});
      }
      for (std::int64_t g = first / kLanes; g < std::min(groups, first / kLanes + kVectors); ++g) {
        const float* const from = line + (g * kLanes - first) * taps;
        const std::int64_t rows = std::min<std::int64_t>(kLanes, c - g * kLanes);
        for (std::int64_t t = 0; t < taps; t += kLanes) {
          V read[kLanes] = {};
          if (taps == 1) {
            read[0] = load(from, Part{static_cast<int>(rows)});
          } else {
            for (std::int64_t r = 0; r < rows; ++r) read[r] = load(from + r * taps + t, Full{});
            turned(read);
          }
          for (std::int64_t i = 0; i < std::min<std::int64_t>(kLanes, taps - t); ++i) {
            const Plan::Slot& slot = slots[static_cast<std::size_t>(g * taps + t + i)];
            store(reinterpret_cast<float*>(to + slot.at + word * slot.step), read[i], Full{});
          }
        }
      }
    }
  });
}

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
