// Geometry of two-dimensional windows, and images laid out so that every window position is a constant offset.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "vector.h"

namespace ortgraph {

// Sizes of one convolution; one spatial dimension counts as a picture of one row.
struct Window {
  std::int64_t batch, channels, height, width, filters, rows, columns, out_rows, out_columns;
  std::int64_t step_y, step_x, spread_y, spread_x, top, left, group;

  std::int64_t group_channels() const { return channels / group; }
  std::int64_t group_filters() const { return filters / group; }
  std::int64_t taps() const { return rows * columns; }
  std::int64_t inputs() const { return height * width; }
  std::int64_t pixels() const { return out_rows * out_columns; }
  std::int64_t depth() const { return group_channels() * taps(); }  // length of one dot product
  // Rows and columns of an image with its padding, as far as windows reach.
  std::int64_t padded_rows() const { return (out_rows - 1) * step_y + (rows - 1) * spread_y + 1; }
  std::int64_t padded_columns() const { return (out_columns - 1) * step_x + (columns - 1) * spread_x + 1; }
  // Images that are worked on at once: enough pixels for whole tiles, whatever the batch.
  std::int64_t images() const {
    constexpr std::int64_t kPixels = 512;
    return std::max<std::int64_t>(1, std::min(batch, (kPixels + pixels() - 1) / std::max<std::int64_t>(pixels(), 1)));
  }
};

class WindowOptions {
 public:
  explicit WindowOptions(const Attributes& a)
      : strides_(a.shape("strides")), pads_(a.shape("pads")), spreads_(a.shape("dilations")),
        group_(a.integer("group", 1)) {
    expect(a.text("auto_pad", "NOTSET") == "NOTSET", "auto_pad must be NOTSET");
  }

  Window of(const Shape& x, const Shape& w) const {
    expect(x.rank == w.rank && (x.rank == 3 || x.rank == 4), "X and W must have one or two spatial dimensions");
    const std::size_t n = x.rank - 2;
    expect(strides_.rank == 0 || strides_.rank == n, "one stride per spatial dimension");
    expect(spreads_.rank == 0 || spreads_.rank == n, "one dilation per spatial dimension");
    expect(pads_.rank == 0 || pads_.rank == 2 * n, "two pads per spatial dimension");
    Window g{};
    g.batch = x.dim[0], g.channels = x.dim[1], g.filters = w.dim[0], g.group = group_;
    expect(group_ > 0 && g.channels == w.dim[1] * group_ && g.filters % group_ == 0, "W does not fit X and group");
    const bool two = n == 2;
    const auto option = [&](const Shape& s, std::size_t axis) { return s.rank ? s.dim[axis] : 1; };
    const auto pad = [&](std::size_t axis) { return pads_.rank ? pads_.dim[axis] : 0; };
    g.height = two ? x.dim[2] : 1, g.width = x.dim[n + 1], g.rows = two ? w.dim[2] : 1, g.columns = w.dim[n + 1];
    g.step_y = two ? option(strides_, 0) : 1, g.step_x = option(strides_, n - 1);
    g.spread_y = two ? option(spreads_, 0) : 1, g.spread_x = option(spreads_, n - 1);
    g.top = two ? pad(0) : 0, g.left = pad(n - 1);
    g.out_rows = two ? steps(g.height + pad(0) + pad(2), g.rows, g.step_y, g.spread_y) : 1;
    g.out_columns = steps(g.width + pad(n - 1) + pad(2 * n - 1), g.columns, g.step_x, g.spread_x);
    return g;
  }

 private:
  static std::int64_t steps(std::int64_t size, std::int64_t window, std::int64_t step, std::int64_t spread) {
    const std::int64_t free = size - (window - 1) * spread - 1;
    return free < 0 ? 0 : free / step + 1;
  }

  Shape strides_, pads_, spreads_;
  std::int64_t group_;
};

// Elements [at, at + n) of a float32 or bf16 tensor as floats; with `round` as bf16 would hold them.
inline void read(const Tensor& t, std::int64_t at, std::int64_t n, bool round, float* to) {
  if (t.type == kBfloat16) {
    const Bf16* from = static_cast<const Bf16*>(t.raw) + at;
    return vectors(n, [&](std::int64_t i, auto span) { store(to + i, load(from + i, span), span); });
  }
  const float* from = t.floats() + at;
  if (!round) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  vectors(n, [&](std::int64_t i, auto span) { store(to + i, widen(narrow(load(from + i, span), Bf16{}), Bf16{}),
      span); });
}

inline void write(const Output& t, std::int64_t at, std::int64_t n, const float* from) {
  if (t.type == kBfloat16) {
    Bf16* to = static_cast<Bf16*>(t.raw) + at;
    return vectors(n, [&](std::int64_t i, auto span) { store(to + i, load(from + i, span), span); });
  }
  std::memcpy(static_cast<float*>(t.raw) + at, from, static_cast<std::size_t>(n) * sizeof(float));
}

// Memory of a thread that is kept from run to run: what goes back to the system comes back as page faults, which cost
// more than a small product. One place for each use.
enum class Place { kSource, kTurned, kSums, kLocal, kFilters, kPlaces };

inline float* kept(Place place, std::int64_t count) {
  struct Memory {
    float* data = nullptr;
    std::size_t size = 0;
    ~Memory() { std::free(data); }
  };
  thread_local Memory memory[static_cast<int>(Place::kPlaces)];
  Memory& m = memory[static_cast<int>(place)];
  const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(float) + 63) / 64 * 64;
  if (bytes > m.size) {
    std::free(m.data);
    m.size = 0;
    m.data = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (!m.data) throw std::bad_alloc();
    m.size = bytes;
  }
  return m.data;
}

// Rows become columns.
inline void transpose(V (&rows)[kLanes]) {
#if defined(__GNUC__) && !defined(__clang__)
  constexpr Vi lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int s = 8; s > 0; s /= 2) {
    const Vi upper = (lane & s) != 0 ? lane - s + kLanes : lane, lower = (lane & s) != 0 ? lane + kLanes : lane + s;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & s) continue;
      const V a = rows[i], b = rows[i + s];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + s] = __builtin_shuffle(a, b, lower);
    }
  }
#else
  V turned[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) turned[j][i] = rows[i][j];
  }
  for (int i = 0; i < kLanes; ++i) rows[i] = turned[i];
#endif
}

// to[i * pitch + c] = from[c * plane + i] for `count` i and `channels` c; with `round` as bf16 would hold them.
template <class T>
void turn(const T* from, std::int64_t plane, std::int64_t channels, std::int64_t count, bool round, float* to,
          std::int64_t pitch) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int width = static_cast<int>(std::min<std::int64_t>(kLanes, count - i));
    for (std::int64_t c = 0; c < channels; c += kLanes) {
      const int height = static_cast<int>(std::min<std::int64_t>(kLanes, channels - c));
      V rows[kLanes] = {};
      for (int r = 0; r < height; ++r) {
        const T* row = from + (c + r) * plane + i;
        rows[r] = width == kLanes ? load(row, Full{}) : load(row, Part{width});
        if (round) rows[r] = widen(narrow(rows[r], Bf16{}), Bf16{});
      }
      transpose(rows);
      for (int j = 0; j < width; ++j) {
        float* column = to + (i + j) * pitch + c;
        if (height == kLanes) store(column, rows[j], Full{});
        else store(column, rows[j], Part{height});
      }
    }
  }
}

inline void turn(const Tensor& x, std::int64_t at, std::int64_t plane, std::int64_t channels, std::int64_t count,
                 bool round, float* to, std::int64_t pitch) {
  if (count <= 0) return;
  if (x.type == kBfloat16) return turn(static_cast<const Bf16*>(x.raw) + at, plane, channels, count, round, to, pitch);
  turn(x.floats() + at, plane, channels, count, round, to, pitch);
}

}  // namespace ortgraph
