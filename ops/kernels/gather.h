// Products whose right side is gathered from padded images while a panel of it is packed: what a convolution and its
// gradients are made of.
#pragma once

#include "gemm_tile.h"
#include "window.h"

namespace ortgraph {

constexpr std::int64_t kDepth = 192;    // rows of a panel: it stays in the first cache
constexpr std::int64_t kSlack = 16;     // whole vectors are copied: what is too much is overwritten or never read
constexpr std::int64_t kWidest = 80;    // columns of the widest tile
constexpr std::int64_t kChunk = 256;    // rows of a tile's results that are kept at once

// C[r][.] += sum over k of left(r, k) right(k)[.] for kRows rows and kVectors vectors of columns.
// Rows from `rows` on are not stored. Left and right operands are functors: left(r, k) is a number, right(k) an
// address.
template <int kRows, int kVectors, class Left, class Right>
inline __attribute__((always_inline)) void tile(std::int64_t depth, const Left& left, const Right& right_row,
                                                std::int64_t rows, float* c, std::int64_t ldc) {
  V sums[kRows][kVectors] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    const float* from = right_row(k);
    V right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) right[v] = load(from + v * kLanes, Full{});
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const V factor = splat(left(r, k));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * right[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + r * ldc + v * kLanes;
      store(to, load(to, Full{}) + sums[r][v], Full{});
    }
  }
}

// All rows of a panel's product, in tiles that fill the registers. Row r of the left side starts at a + r * lda; its
// elements lie side by side, or at the offsets `at`.
template <int kRows, int kVectors>
void band(std::int64_t depth, const float* a, std::int64_t lda, const std::int64_t* at, std::int64_t count,
          const float* b, float* c) {
  constexpr std::int64_t width = kVectors * kLanes;
  for (std::int64_t m = 0; m < count; m += kRows) {
    const std::int64_t rows = std::min<std::int64_t>(kRows, count - m);
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = a + (m + std::min<std::int64_t>(r, rows - 1)) * lda;
    const auto right = [&](std::int64_t k) { return b + k * width; };
    if (at) {
      tile<kRows, kVectors>(depth, [&](int r, std::int64_t k) { return row[r][at[k]]; }, right, rows, c + m * width,
          width);
    } else {
      tile<kRows, kVectors>(depth, [&](int r, std::int64_t k) { return row[r][k]; }, right, rows, c + m * width, width);
    }
  }
}

using Band = void (*)(std::int64_t, const float*, std::int64_t, const std::int64_t*, std::int64_t, const float*,
    float*);
constexpr Band kBands[] = {band<16, 1>, band<12, 2>, band<8, 3>, band<6, 4>, band<5, 5>};

// The same over pairs of bf16 numbers that lie side by side along k, as gemm::Pair multiplies them.
constexpr bool kPairs = gemm::Pair::kDepth == 2;

struct PairedRows {
  const gemm::Word* at = nullptr;  // null: float32 products
  std::int64_t row = 0, step = 0;  // from one row and from one pair to the next
};

template <int kRows, int kVectors>
void paired_band(std::int64_t steps, const PairedRows& a, std::int64_t count, const gemm::Word* b, float* c) {
  constexpr std::int64_t width = kVectors * kLanes;
  for (std::int64_t m = 0; m < count; m += kRows) {
    const std::int64_t rows = std::min<std::int64_t>(kRows, count - m);
    const gemm::Word* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = a.at + (m + std::min<std::int64_t>(r, rows - 1)) * a.row;
    V sums[kRows][kVectors] = {};
    for (std::int64_t s = 0; s < steps; ++s) {
      V right[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) std::memcpy(&right[v], b + s * width + v * kLanes, sizeof(V));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = gemm::Pair::multiply_add(sums[r][v], row[r] + s * a.step, right[v]);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        float* to = c + (m + r) * width + v * kLanes;
        store(to, load(to, Full{}) + sums[r][v], Full{});
      }
    }
  }
}

using PairedBand = void (*)(std::int64_t, const PairedRows&, std::int64_t, const gemm::Word*, float*);
constexpr PairedBand kPairedBands[] = {paired_band<16, 1>, paired_band<12, 2>, paired_band<8, 3>, paired_band<6, 4>,
                                       paired_band<5, 5>};

// Two floats that bf16 holds exactly, as one word.
inline Vu paired(V low, V high) {
  return (reinterpret_cast<Vu>(low) >> 16) | (reinterpret_cast<Vu>(high) & 0xffff0000u);
}

// Vectors per tile with the least columns beyond `pixels`; the wider one of equals is slower, three are best.
inline int best_width(std::int64_t pixels) {
  int best = 3;
  std::int64_t least = INT64_MAX;
  for (const int v : {3, 4, 2, 5, 1}) {
    const std::int64_t width = v * kLanes, padded = (pixels + width - 1) / width * width;
    const std::int64_t price = padded * (v == 1 ? 3 : 2);
    if (price < least) least = price, best = v;
  }
  return best;
}

// Images in memory, each channel a plane of rows with their padding; columns are split by their rest modulo the stride,
// so that neighbouring windows read neighbouring elements.
struct Planes {
  std::int64_t rows, phase, pitch, plane, image;

  Planes(std::int64_t channels, std::int64_t rows_, std::int64_t columns, std::int64_t step)
      : rows(rows_), phase((columns + step - 1) / step), pitch(phase * step), plane(rows * pitch),
        image(channels * plane) {}
};

// One tile's pixels as copies of sixteen columns.
struct Piece {
  std::int64_t from;
  std::int64_t to;
};

// What one product reads: pixels (image, i, j) at image * planes.image + i * row + j, moved by an offset for each k.
struct Job {
  std::int64_t images, rows, columns;  // results
  std::int64_t image, row;             // source distances
  const std::int64_t* offsets;         // of each k
  std::int64_t depth;
  const float* source;
  const float* left;                   // row m at left + m * left_row
  std::int64_t left_row;
  const std::int64_t* left_offsets;    // of each k; null: side by side
  std::int64_t m;
  PairedRows pairs{};                  // the left side again, where products are of pairs

  std::int64_t pixels() const { return images * rows * columns; }
};

// C[m][pixel] = sum over k of left(m, k) source[pixel + offset[k]]; sink(m, pixel, count, values) takes the results.
template <class Sink>
void multiply(const Context& context, const Job& job, const Sink& sink) {
  if (job.pixels() == 0 || job.m == 0) return;
  const int vectors_per_tile = best_width(job.pixels());
  const std::int64_t width = vectors_per_tile * kLanes, tiles = (job.pixels() + width - 1) / width;
  std::int64_t chunk = std::min(kChunk, (job.m + 7) / 8 * 8);
  while (chunk > 32 && tiles * ((job.m + chunk - 1) / chunk) < 8) chunk = (chunk / 2 + 7) / 8 * 8;
  const std::int64_t chunks = (job.m + chunk - 1) / chunk;
  context.parallel(static_cast<std::size_t>(tiles * chunks), [&](std::size_t part) {
    const std::int64_t t = static_cast<std::int64_t>(part) / chunks,
        first = static_cast<std::int64_t>(part) % chunks * chunk;
    const std::int64_t begin = t * width, end = std::min(job.pixels(), begin + width);
    const std::int64_t count = std::min(chunk, job.m - first);
    alignas(64) float panel[kDepth * kWidest + kSlack];
    alignas(64) float sums[kChunk * kWidest];
    Piece pieces[2 * kWidest];
    int n = 0;
    for (std::int64_t p = begin; p < end;) {
      const std::int64_t line = p / job.columns, j = p % job.columns, run = std::min(end - p, job.columns - j);
      const std::int64_t from = line / job.rows * job.image + line % job.rows * job.row + j;
      for (std::int64_t i = 0; i < run; i += kLanes) pieces[n++] = {from + i, p - begin + i};
      p += run;
    }
    std::fill(sums, sums + count * width, 0.0f);
    if (end - begin < width) std::fill(panel, panel + kDepth * width, 0.0f);
    const std::int64_t pairs = job.pairs.at ? (job.depth + 1) / 2 : 0;
    for (std::int64_t k = 0; k < pairs; k += kDepth) {
      const std::int64_t steps = std::min(kDepth, pairs - k);
      gemm::Word* const words = reinterpret_cast<gemm::Word*>(panel);
      for (std::int64_t i = 0; i < steps; ++i) {
        const std::int64_t at = 2 * (k + i);
        const float* low = job.source + job.offsets[at];
        const float* high = at + 1 < job.depth ? job.source + job.offsets[at + 1] : nullptr;
        for (int s = 0; s < n; ++s) {
          const V upper = high ? load(high + pieces[s].from, Full{}) : V{};
          const Vu both = paired(load(low + pieces[s].from, Full{}), upper);
          std::memcpy(words + i * width + pieces[s].to, &both, sizeof both);
        }
      }
      const PairedRows rows{job.pairs.at + first * job.pairs.row + k * job.pairs.step, job.pairs.row, job.pairs.step};
      kPairedBands[vectors_per_tile - 1](steps, rows, count, words, sums);
    }
    for (std::int64_t k = 0; k < job.depth && !job.pairs.at; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, job.depth - k);
      for (std::int64_t i = 0; i < depth; ++i) {
        const float* from = job.source + job.offsets[k + i];
        float* to = panel + i * width;
        for (int s = 0; s < n; ++s) store(to + pieces[s].to, load(from + pieces[s].from, Full{}), Full{});
      }
      const std::int64_t* at = job.left_offsets ? job.left_offsets + k : nullptr;
      kBands[vectors_per_tile - 1](depth, job.left + first * job.left_row + (at ? 0 : k), job.left_row, at, count,
          panel,
                                   sums);
    }
    for (std::int64_t m = 0; m < count; ++m) sink(first + m, begin, end - begin, sums + m * width);
  });
}

// Copies images [first, first + count) of a group of channels into padded planes; rows and columns before the image and
// behind it are zero.
inline void pad(const Context& context, const Tensor& x, std::int64_t first, std::int64_t count,
    std::int64_t all_channels,
         std::int64_t channel, std::int64_t channels, std::int64_t height, std::int64_t width, std::int64_t top,
         std::int64_t left, std::int64_t step, const Planes& planes, bool round, float* to) {
  context.rows(count * channels, planes.plane, [&](std::int64_t begin, std::int64_t end) {
    const Scratch<float> line(static_cast<std::size_t>(step == 1 ? 0 : planes.pitch + width));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t image = i / channels, c = i % channels;
      const std::int64_t from = ((first + image) * all_channels + channel + c) * height * width;
      float* plane = to + image * planes.image + c * planes.plane;
      for (std::int64_t r = 0; r < planes.rows; ++r) {
        float* row = plane + r * planes.pitch;
        const std::int64_t y = r - top;
        std::fill(row, row + planes.pitch, 0.0f);
        if (y < 0 || y >= height) continue;
        const std::int64_t lead = std::max<std::int64_t>(left, 0), skip = std::max<std::int64_t>(-left, 0);
        const std::int64_t n = std::min(width - skip, planes.pitch - lead);
        if (n <= 0) continue;
        float* straight = step == 1 ? row : line.data();
        if (step > 1) std::fill(straight, straight + planes.pitch, 0.0f);
        read(x, from + y * width + skip, n, round, straight + lead);
        if (step == 2) {
          for (std::int64_t q = 0; q < planes.phase; ++q) row[q] = straight[2 * q],
              row[planes.phase + q] = straight[2 * q + 1];
        } else if (step > 2) {
          for (std::int64_t q = 0; q < planes.pitch; ++q) row[q % step * planes.phase + q / step] = straight[q];
        }
      }
    }
  });
}

// W as floats, or as bf16 numbers for products of pairs: the tensor itself where nothing has to be converted, else a
// copy.
class Weights {
 public:
  Weights(const Context& context, const Tensor& w, bool round, bool pairs) {
    if (pairs && w.type == kBfloat16) low_ = static_cast<const std::uint16_t*>(w.raw);
    else if (pairs) low_ = narrowed(context, w);
    else if (w.type == kFloat && !round) data_ = w.floats();
    else data_ = widened(context, w, round);
  }
  const float* data() const { return data_; }
  const std::uint16_t* low() const { return low_; }

 private:
  static const float* widened(const Context& context, const Tensor& w, bool round) {
    float* const copy = kept(Place::kTurned, w.shape.count());
    context.elements(w.shape.count(), [&](std::int64_t begin, std::int64_t end) {
      read(w, begin, end - begin, round, copy + begin);
    });
    return copy;
  }
  static const std::uint16_t* narrowed(const Context& context, const Tensor& w) {
    Bf16* const copy = reinterpret_cast<Bf16*>(kept(Place::kTurned, (w.shape.count() + 1) / 2));
    context.elements(w.shape.count(), [&](std::int64_t begin, std::int64_t end) {
      vectors(end - begin, [&](std::int64_t i, auto span) {
        store(copy + begin + i, load(w.floats() + begin + i, span), span);
      });
    });
    return reinterpret_cast<const std::uint16_t*>(copy);
  }
  const float* data_ = nullptr;
  const std::uint16_t* low_ = nullptr;
};

// The left side of a job as pairs, from the bf16 numbers `low` in place of job.left: these themselves where rows have
// an even length, else in `to` (job.m times half its depth, rounded up).
inline PairedRows paired_rows(const Context& context, const Job& job, const std::uint16_t* low, gemm::Word* to) {
  const std::int64_t pairs = (job.depth + 1) / 2;
  if (!job.left_offsets) {
    if (job.depth % 2 == 0) return {reinterpret_cast<const gemm::Word*>(low), pairs, 1};
    context.rows(job.m, job.depth, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t m = begin; m < end; ++m) {
        to[(m + 1) * pairs - 1] = 0;
        std::memcpy(to + m * pairs, low + m * job.left_row, static_cast<std::size_t>(job.depth) * sizeof *low);
      }
    });
    return {to, pairs, 1};
  }
  // Rows lie close together here, and steps do not.
  context.rows(pairs, 2 * job.m, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint16_t* even = low + job.left_offsets[2 * i];
      const bool both = 2 * i + 1 < job.depth;
      const std::uint16_t* odd = both ? low + job.left_offsets[2 * i + 1] : even;
      const gemm::Word mask = both ? 0xffff0000u : 0u;
      gemm::Word* words = to + i * job.m;
      for (std::int64_t m = 0; m < job.m; ++m) {
        words[m] = even[m * job.left_row] | (gemm::Word{odd[m * job.left_row]} << 16 & mask);
      }
    }
  });
  return {to, 1, job.m};
}

inline gemm::Word* words_for(const Job& job) {
  return reinterpret_cast<gemm::Word*>(kept(Place::kFilters, job.m * ((job.depth + 1) / 2)));
}

// Whether all operands are bf16 numbers, so that products of pairs are exact.
inline bool pairs_for(const Tensor& a, const Tensor& b, bool round) {
  return kPairs && (round || (a.type == kBfloat16 && b.type == kBfloat16));
}

inline bool rounds(const Attributes& a) {
  const std::string precision = a.text("precision", "fp32");
  expect(precision == "fp32" || precision == "bf16", "precision must be 'fp32' or 'bf16'");
  return precision == "bf16";
}

}  // namespace ortgraph
