// Stride-one 3x3 convolutions and their gradients by minimal filtering: a tile of 2x2 results comes from 4x4
// transformed pixels and weights, sixteen products of matrices with 4/9 of the multiplications (Winograd's
// F(2x2, 3x3)).
//
// All transforms work on sixteen channels at a time. A value that is not finite makes the 2x2 results of its tile so.
#pragma once

#include "gather.h"

namespace ortgraph {
namespace winograd {

constexpr std::int64_t kPoints = 16;       // products
constexpr std::int64_t kPanel = 4 * kLanes;
constexpr std::int64_t kTiles = 48;        // of a part: their transforms stay in the second cache
constexpr std::int64_t kWidestRow = 128;   // tiles of a row
constexpr std::int64_t kLength = 128;      // channels that are added up at once: a panel stays in the first cache
constexpr std::int64_t kDeep = 96;         // tiles that a gradient of weights adds up at once
constexpr std::int64_t kRound = 640 << 10; // floats of transformed tiles between two rounds of it
constexpr std::int64_t kSkew = kLanes;     // between points, so that they do not compete for the same cache lines

// Images in channels, as far as one side of the convolution is concerned.
struct Side {
  std::int64_t channels, height, width;
  std::int64_t pixels() const { return height * width; }
};

// Tiles of 2x2 pixels of `out`; the tile at (i, j) sees the 4x4 pixels of `in` from (2 i - top, 2 j - left) on.
struct Tiling {
  std::int64_t batch;
  Side in, out;
  std::int64_t top, left;

  std::int64_t across() const { return (out.width + 1) / 2; }
  std::int64_t down() const { return (out.height + 1) / 2; }
  std::int64_t rows() const { return batch * down(); }
  std::int64_t tiles() const { return rows() * across(); }
};

// Sums of R rows and N vectors of columns: row r reads a[r * row + s * step], step s reads b + s * b_step.
struct Operands {
  const float* a;
  std::int64_t row, step;
  const float* b;
  std::int64_t b_step, steps;
  float* sums;
  std::int64_t width;  // from one row of sums to the next
  bool add;            // to what lies in sums
};

template <int R, int N>
void multiply(const Operands& t) {
  V sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) sum[r][v] = t.add ? load(t.sums + r * t.width + v * kLanes, Full{}) : V{};
  }
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = t.a + r * t.row;
  const float* b = t.b;
  std::int64_t at = 0;
  for (std::int64_t s = 0; s < t.steps; ++s, at += t.step, b += t.b_step) {
    V column[N];
    for (int v = 0; v < N; ++v) column[v] = load(b + v * kLanes, Full{});
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V factor = splat(rows[r][at]);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sum[r][v] += factor * column[v];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N; ++v) store(t.sums + r * t.width + v * kLanes, sum[r][v], Full{});
  }
}

using Multiply = void (*)(const Operands&);
template <int N>
Multiply of_rows(int rows) {
  constexpr Multiply all[] = {multiply<1, N>, multiply<2, N>, multiply<3, N>,
                              multiply<4, N>, multiply<5, N>, multiply<6, N>};
  return all[rows - 1];
}
constexpr int kRows = 6;
// For up to kRows rows and four vectors.
inline Multiply tile_of(std::int64_t rows, std::int64_t vectors) {
  constexpr Multiply (*all[])(int) = {of_rows<1>, of_rows<2>, of_rows<3>, of_rows<4>};
  return all[vectors - 1](static_cast<int>(std::min<std::int64_t>(rows, kRows)));
}

inline Tiling tiling_of(const Window& g) {
  return {g.batch, {g.channels, g.height, g.width}, {g.filters, g.out_rows, g.out_columns}, g.top, g.left};
}
// dX is the same over dY, with the filters turned around.
inline Tiling turned_around(const Tiling& t) { return {t.batch, t.out, t.in, 2 - t.top, 2 - t.left}; }

inline bool has_form(const Window& g) {
  const bool dense = g.step_y == 1 && g.step_x == 1 && g.spread_y == 1 && g.spread_x == 1;
  return g.rows == 3 && g.columns == 3 && dense && g.group == 1 && g.channels % kLanes == 0 &&
         g.filters % kLanes == 0 && std::min(g.channels, g.filters) >= 32;
}
// Whether it takes less time than the direct product: the transform of the weights must be worth it.
inline bool pays(const Tiling& t) {
  constexpr std::int64_t kWeights = 600;     // multiplications that the transform of one filter's channel costs
  constexpr std::int64_t kMost = 512 * 512;  // of these: 16 MiB in memory
  if (t.across() > kWidestRow || t.tiles() == 0 || t.in.channels * t.out.channels > kMost) return false;
  return 9 * t.batch * t.out.pixels() > kPoints * t.tiles() + kWeights;
}

// d <- B' d B: 4x4 pixels.
inline __attribute__((always_inline)) void pixels_in(V (&d)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const V a = d[i], b = d[4 + i], c = d[8 + i], e = d[12 + i];
    d[i] = a - c, d[4 + i] = b + c, d[8 + i] = c - b, d[12 + i] = b - e;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    V* r = d + 4 * i;
    const V a = r[0], b = r[1], c = r[2], e = r[3];
    r[0] = a - c, r[1] = b + c, r[2] = c - b, r[3] = b - e;
  }
}
// y = A' m A: 2x2 results.
inline __attribute__((always_inline)) void results_out(const V (&m)[16], V (&y)[4]) {
  V upper[4], lower[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    upper[i] = m[i] + m[4 + i] + m[8 + i];
    lower[i] = m[4 + i] - m[8 + i] - m[12 + i];
  }
  y[0] = upper[0] + upper[1] + upper[2], y[1] = upper[1] - upper[2] - upper[3];
  y[2] = lower[0] + lower[1] + lower[2], y[3] = lower[1] - lower[2] - lower[3];
}
// d = A y A': 2x2 pixels of dY.
inline __attribute__((always_inline)) void results_in(const V (&y)[4], V (&d)[16]) {
  const V rows[8] = {y[0], y[1], y[0] + y[2], y[1] + y[3], y[0] - y[2], y[1] - y[3], -y[2], -y[3]};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const V a = rows[2 * i], b = rows[2 * i + 1];
    d[4 * i] = a, d[4 * i + 1] = a + b, d[4 * i + 2] = a - b, d[4 * i + 3] = -b;
  }
}
// u = G g G': 3x3 weights.
inline __attribute__((always_inline)) void weights_in(const V (&g)[9], V (&u)[16]) {
  V rows[12];
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    const V ends = 0.5f * (g[j] + g[6 + j]), middle = 0.5f * g[3 + j];
    rows[j] = g[j], rows[3 + j] = ends + middle, rows[6 + j] = ends - middle, rows[9 + j] = g[6 + j];
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const V* r = rows + 3 * i;
    const V ends = 0.5f * (r[0] + r[2]), middle = 0.5f * r[1];
    u[4 * i] = r[0], u[4 * i + 1] = ends + middle, u[4 * i + 2] = ends - middle, u[4 * i + 3] = r[2];
  }
}
// g = G' s G: gradients of 3x3 weights.
inline __attribute__((always_inline)) void weights_out(const V (&s)[16], V (&g)[9]) {
  V rows[12];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const V both = 0.5f * (s[4 + j] + s[8 + j]);
    rows[j] = s[j] + both, rows[4 + j] = 0.5f * (s[4 + j] - s[8 + j]), rows[8 + j] = both + s[12 + j];
  }
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    const V* r = rows + 4 * i;
    const V both = 0.5f * (r[1] + r[2]);
    g[3 * i] = r[0] + both, g[3 * i + 1] = 0.5f * (r[1] - r[2]), g[3 * i + 2] = both + r[3];
  }
}

// Weights W [filters, channels, 3, 3], transformed: point, panel of 64 results, then [operand channel][result channel].
// `around`: for dX, whose results are the channels.
inline void transform_weights(const Context& context, const float* w, std::int64_t filters, std::int64_t channels,
                              bool around, float* to) {
  const std::int64_t in = around ? filters : channels, out = around ? channels : filters;
  constexpr std::int64_t kBlock = kLanes;  // operand channels of a part
  const std::int64_t blocks = in / kBlock;
  context.parallel(static_cast<std::size_t>(blocks * ((out + kPanel - 1) / kPanel)), [&](std::size_t part) {
    const std::int64_t panel = static_cast<std::int64_t>(part) / blocks * kPanel, width = std::min(kPanel, out - panel);
    const std::int64_t first = static_cast<std::int64_t>(part) % blocks * kBlock;
    const auto put = [&](std::int64_t i, std::int64_t o, const V (&taps)[9]) {
      V u[16];
      weights_in(taps, u);
      float* at = to + panel * in + i * width + (o - panel);
#pragma GCC unroll 16
      for (int p = 0; p < 16; ++p) store(at + p * in * out, u[p], Full{});
    };
    for (std::int64_t o = panel; o < panel + width; o += kLanes) {
      if (around) {
        for (std::int64_t f = first; f < first + kBlock; ++f) {
          V rows[kLanes], taps[9];
          const bool last = f + 1 == filters && o + kLanes == channels;
          for (int r = 0; r < kLanes; ++r) {
            const float* from = w + (f * channels + o + r) * 9;
            rows[r] = last && r + 1 == kLanes ? load(from, Part{9}) : load(from, Full{});
          }
          transpose(rows);
          for (int t = 0; t < 9; ++t) taps[t] = rows[8 - t];
          put(f, o, taps);
        }
        continue;
      }
      V lines[9 * kLanes];  // of channel c and position t, over filters
      for (int v = 0; v < 9; ++v) {
        V rows[kLanes];
        for (int r = 0; r < kLanes; ++r) rows[r] = load(w + ((o + r) * channels + first) * 9 + v * kLanes, Full{});
        transpose(rows);
        std::copy(rows, rows + kLanes, lines + v * kLanes);
      }
      for (int c = 0; c < kLanes; ++c) {
        V taps[9];
        for (int t = 0; t < 9; ++t) taps[t] = lines[9 * c + t];
        put(first + c, o, taps);
      }
    }
  });
}

// Rows of tiles [row, end) of one image.
struct Segment {
  std::int64_t image, row, end;
};
template <class Body>
void segments(const Tiling& t, std::int64_t begin, std::int64_t end, const Body& body) {
  for (std::int64_t r = begin; r < end;) {
    const std::int64_t image = r / t.down(), row = r % t.down(), count = std::min(end - r, t.down() - row);
    body(Segment{image, row, row + count}, (r - begin) * t.across());
    r += count;
  }
}

// Transforms of the tiles of rows [begin, end): to[point * apart + tile * channels + channel]. `line` holds the images'
// rows, channels last.
inline void transform_pixels(const Tensor& x, const Tiling& t, std::int64_t begin, std::int64_t end, bool round,
                             float* line, float* to, std::int64_t apart) {
  alignas(64) static const float zeros[kLanes] = {};
  const std::int64_t c = t.in.channels;
  segments(t, begin, end, [&](const Segment& s, std::int64_t tile) {
    const std::int64_t first = std::max<std::int64_t>(0, 2 * s.row - t.top),
                       last = std::min(t.in.height, 2 * s.end + 2 - t.top);
    turn(x, s.image * c * t.in.pixels() + first * t.in.width, t.in.pixels(), c, (last - first) * t.in.width, round,
         line, c);
    for (std::int64_t i = s.row; i < s.end; ++i) {
      for (std::int64_t j = 0; j < t.across(); ++j, ++tile) {
        const float* from[16];
        std::int64_t moves[16];
        for (int k = 0; k < 16; ++k) {
          const std::int64_t y = 2 * i - t.top + k / 4, column = 2 * j - t.left + k % 4;
          const bool inside = y >= 0 && y < t.in.height && column >= 0 && column < t.in.width;
          from[k] = inside ? line + ((y - first) * t.in.width + column) * c : zeros;
          moves[k] = inside ? 1 : 0;
        }
        for (std::int64_t n = 0; n < c; n += kLanes) {
          V d[16];
#pragma GCC unroll 16
          for (int k = 0; k < 16; ++k) d[k] = load(from[k] + moves[k] * n, Full{});
          pixels_in(d);
#pragma GCC unroll 16
          for (int k = 0; k < 16; ++k) store(to + k * apart + tile * c + n, d[k], Full{});
        }
      }
    }
  });
}

// The same of dY: tiles of 2x2 pixels of `out`.
inline void transform_results(const Tensor& dy, const Tiling& t, std::int64_t begin, std::int64_t end, bool round,
                              float* line, float* to, std::int64_t apart) {
  const std::int64_t f = t.out.channels;
  segments(t, begin, end, [&](const Segment& s, std::int64_t tile) {
    const std::int64_t first = 2 * s.row, last = std::min(t.out.height, 2 * s.end);
    turn(dy, s.image * f * t.out.pixels() + first * t.out.width, t.out.pixels(), f, (last - first) * t.out.width, round,
         line, f);
    for (std::int64_t i = s.row; i < s.end; ++i) {
      for (std::int64_t j = 0; j < t.across(); ++j, ++tile) {
        const float* from = line + ((2 * i - first) * t.out.width + 2 * j) * f;
        const bool right = 2 * j + 1 < t.out.width, below = 2 * i + 1 < t.out.height;
        const std::int64_t next = t.out.width * f;
        for (std::int64_t n = 0; n < f; n += kLanes) {
          const V y[4] = {load(from + n, Full{}), right ? load(from + f + n, Full{}) : V{},
                          below ? load(from + next + n, Full{}) : V{},
                          right && below ? load(from + next + f + n, Full{}) : V{}};
          V d[16];
          results_in(y, d);
#pragma GCC unroll 16
          for (int k = 0; k < 16; ++k) store(to + k * apart + tile * f + n, d[k], Full{});
        }
      }
    }
  });
}

// Pixels [0, count) of 16 channels from [pixel][kPanel] to planes.
template <class T>
void planes_out(const float* from, std::int64_t count, T* to, std::int64_t plane) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = static_cast<int>(std::min<std::int64_t>(kLanes, count - i));
    V rows[kLanes] = {};
    for (int r = 0; r < lanes; ++r) rows[r] = load(from + (i + r) * kPanel, Full{});
    transpose(rows);
    for (int r = 0; r < kLanes; ++r) {
      if (lanes == kLanes) store(to + r * plane + i, rows[r], Full{});
      else store(to + r * plane + i, rows[r], Part{lanes});
    }
  }
}

inline std::int64_t rows_of_part(const Tiling& t) {
  return std::max<std::int64_t>(1, std::min(t.rows(), kTiles / t.across()));
}
// Floats of one part: image rows, transformed tiles, products, results.
inline std::int64_t line_size(const Tiling& t, std::int64_t rows) {
  return std::max((2 * rows + 2) * t.in.width * t.in.channels, 2 * rows * t.out.width * t.out.channels);
}
inline std::int64_t part_size(const Tiling& t) {
  const std::int64_t rows = rows_of_part(t), tiles = rows * t.across();
  return line_size(t, rows) + kPoints * (tiles * t.in.channels + kSkew) + kPoints * (tiles * kPanel + kSkew) +
         4 * tiles * kPanel;
}

// Y (or dX) from transformed weights.
inline void convolve(const Context& context, const Tensor& x, const Tiling& t, bool round, const float* weights,
                     const float* bias, const Output& y) {
  const std::int64_t rows = rows_of_part(t), blocks = (t.rows() + rows - 1) / rows;
  const std::int64_t in = t.in.channels, out = t.out.channels;
  const std::int64_t panels = (out + kPanel - 1) / kPanel;
  std::int64_t together = panels;
  while (together > 1 && blocks * ((panels + together - 1) / together) < 8) together = (together + 1) / 2;
  const std::int64_t chunks = (panels + together - 1) / together;
  context.parallel(static_cast<std::size_t>(blocks * chunks), [&](std::size_t part) {
    const std::int64_t begin = static_cast<std::int64_t>(part) % blocks * rows, end = std::min(t.rows(), begin + rows);
    const std::int64_t tiles = (end - begin) * t.across();
    const std::int64_t apart = tiles * in + kSkew, sums_apart = tiles * kPanel + kSkew;
    float* const line = kept(Place::kLocal, part_size(t));
    float* const pixels = line + line_size(t, rows);
    float* const sums = pixels + kPoints * apart;
    float* const results = sums + kPoints * sums_apart;
    transform_pixels(x, t, begin, end, round, line, pixels, apart);
    const std::int64_t first = static_cast<std::int64_t>(part) / blocks * together;
    for (std::int64_t p = first; p < std::min(panels, first + together); ++p) {
      const std::int64_t n = p * kPanel, width = std::min(kPanel, out - n);
      for (std::int64_t k = 0; k < kPoints; ++k) {
        const float* panel = weights + k * in * out + n * in;
        for (std::int64_t c = 0; c < in; c += kLength) {
          for (std::int64_t m = 0; m < tiles; m += kRows) {
            tile_of(tiles - m, width / kLanes)({pixels + k * apart + m * in + c, in, 1, panel + c * width, width,
                                                std::min(kLength, in - c), sums + k * sums_apart + m * kPanel, kPanel,
                                                c > 0});
          }
        }
      }
      segments(t, begin, end, [&](const Segment& s, std::int64_t tile) {
        const std::int64_t top = 2 * s.row, bottom = std::min(t.out.height, 2 * s.end);
        for (std::int64_t i = s.row; i < s.end; ++i) {
          for (std::int64_t j = 0; j < t.across(); ++j, ++tile) {
            float* to = results + ((2 * i - top) * t.out.width + 2 * j) * kPanel;
            const bool right = 2 * j + 1 < t.out.width, below = 2 * i + 1 < t.out.height;
            for (std::int64_t v = 0; v < width; v += kLanes) {
              V m[16], r[4];
#pragma GCC unroll 16
              for (int k = 0; k < 16; ++k) m[k] = load(sums + k * sums_apart + tile * kPanel + v, Full{});
              results_out(m, r);
              if (bias) {
                const V b = load(bias + n + v, Full{});
                for (V& one : r) one += b;
              }
              store(to + v, r[0], Full{});
              if (right) store(to + kPanel + v, r[1], Full{});
              if (below) store(to + t.out.width * kPanel + v, r[2], Full{});
              if (right && below) store(to + (t.out.width + 1) * kPanel + v, r[3], Full{});
            }
          }
        }
        for (std::int64_t v = 0; v < width; v += kLanes) {
          const std::int64_t at = (s.image * out + n + v) * t.out.pixels() + top * t.out.width;
          const std::int64_t count = (bottom - top) * t.out.width;
          if (y.type == kBfloat16) planes_out(results + v, count, static_cast<Bf16*>(y.raw) + at, t.out.pixels());
          else planes_out(results + v, count, static_cast<float*>(y.raw) + at, t.out.pixels());
        }
      });
    }
  });
}

// Rows of tiles that a round of dW transforms.
inline std::int64_t rows_of_round(const Tiling& t) {
  const std::int64_t floats = kPoints * t.across() * (t.in.channels + t.out.channels);
  return std::max<std::int64_t>(1, std::min(t.rows(), kRound / floats));
}

// dW [filters, channels, 3, 3].
inline void weight_gradient(const Context& context, const Tensor& dy, const Tensor& x, const Tiling& t, bool round,
                            float* dw) {
  const std::int64_t c = t.in.channels, f = t.out.channels, rows = rows_of_round(t), most = rows * t.across();
  const std::int64_t x_apart = most * c + kSkew, y_apart = most * f + kSkew, sums_apart = f * c + kSkew;
  float* const pixels = kept(Place::kSource, kPoints * x_apart);
  float* const results = kept(Place::kTurned, kPoints * y_apart);
  float* const sums = kept(Place::kSums, kPoints * sums_apart);
  const std::int64_t piece = rows_of_part(t);
  for (std::int64_t begin = 0; begin < t.rows(); begin += rows) {
    const std::int64_t end = std::min(t.rows(), begin + rows), pieces = (end - begin + piece - 1) / piece;
    context.parallel(static_cast<std::size_t>(2 * pieces), [&](std::size_t part) {
      const std::int64_t i = static_cast<std::int64_t>(part) / 2 * piece, tile = i * t.across();
      const std::int64_t from = begin + i, to = std::min(end, from + piece);
      float* const line = kept(Place::kLocal, line_size(t, piece));
      if (part % 2 == 0) transform_pixels(x, t, from, to, round, line, pixels + tile * c, x_apart);
      else transform_results(dy, t, from, to, round, line, results + tile * f, y_apart);
    });
    const std::int64_t tiles = (end - begin) * t.across();
    context.parallel(static_cast<std::size_t>(kPoints), [&](std::size_t point) {
      const std::int64_t k = static_cast<std::int64_t>(point);
      for (std::int64_t d = 0; d < tiles; d += kDeep) {
        const std::int64_t deep = std::min(kDeep, tiles - d);
        for (std::int64_t n = 0; n < c; n += kPanel) {
          const std::int64_t vectors = std::min(kPanel, c - n) / kLanes;
          for (std::int64_t m = 0; m < f; m += kRows) {
            tile_of(f - m, vectors)({results + k * y_apart + d * f + m, 1, f, pixels + k * x_apart + d * c + n, c, deep,
                                     sums + k * sums_apart + m * c + n, c, begin + d > 0});
          }
        }
      }
    });
  }
  context.rows(f, 9 * c, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t m = begin; m < end; ++m) {
      for (std::int64_t n = 0; n < c; n += kLanes) {
        V s[16], g[9], lines[kLanes] = {};
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) s[k] = load(sums + k * sums_apart + m * c + n, Full{});
        weights_out(s, g);
        std::copy(g, g + 9, lines);
        transpose(lines);
        for (int r = 0; r < kLanes; ++r) store(dw + (m * c + n + r) * 9, lines[r], Part{9});
      }
    }
  });
}

}  // namespace winograd
}  // namespace ortgraph
