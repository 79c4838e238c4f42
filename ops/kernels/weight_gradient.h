// The gradient of a convolution's weights: pixels are the length of its products, so X and dY are turned to have
// channels last, as floats or as pairs of bf16 numbers, of two images at the same pixel.
#pragma once

#include <vector>

#include "turn.h"
#include "window.h"

namespace ortgraph {

// dW of one group. A run is a row of the window where its columns lie side by side, else one position.
template <class Arithmetic>
class WeightGradient {
 public:
  using Word = gemm::Word;
  static constexpr std::int64_t kDepth = Arithmetic::kDepth;  // images of a word

  explicit WeightGradient(const Window& g)
      : g_(g), side_by_side_(g.spread_x == 1), runs_(side_by_side_ ? g.rows : g.taps()),
        run_((side_by_side_ ? g.columns : 1) * g.group_channels()),
        padded_run_((run_ + kLanes - 1) / kLanes * kLanes) {
    const std::int64_t size = 4 * (picture() + g.pixels() * filters());
    at_once_ = std::max<std::int64_t>(1, std::min(words(g.batch), kBytes / std::max<std::int64_t>(size, 1)));
  }

  void run(const Context& context, const Tensor& dy, const Tensor& x, bool round, std::int64_t part, float* dw) const {
    const std::int64_t all = words(g_.batch), pixels = g_.pixels();
    dw += part * filters() * g_.depth();
    if (all * pixels == 0) {
      std::fill_n(dw, filters() * g_.depth(), 0.0f);
      return;
    }
    Word* source = reinterpret_cast<Word*>(kept(Place::kSource, at_once_ * picture() + kSlack));
    Word* gradient = reinterpret_cast<Word*>(kept(Place::kTurned, at_once_ * pixels * filters() + kSlack));
    std::fill_n(source + at_once_ * picture(), kSlack, Word{0});
    std::vector<std::int32_t> at(static_cast<std::size_t>(at_once_ * pixels));
    for (std::size_t p = 0; p < at.size(); ++p) {
      const std::int64_t image = static_cast<std::int64_t>(p) / pixels, i = static_cast<std::int64_t>(p) % pixels;
      const std::int64_t row = i / g_.out_columns * g_.step_y, column = i % g_.out_columns * g_.step_x;
      at[p] = static_cast<std::int32_t>(image * picture() + (row * g_.padded_columns() + column) * channels());
    }
    if (all <= at_once_ && filters() * pitch() > kShared) {
      turn_all(context, dy, x, round, part, 0, all, source, gradient);
      return whole(context, all * pixels, source, gradient, at.data(), dw);
    }
    float* sums = kept(Place::kSums, filters() * pitch());
    for (std::int64_t first = 0; first < all; first += at_once_) {
      const std::int64_t count = std::min(at_once_, all - first);
      turn_all(context, dy, x, round, part, first, count, source, gradient);
      add(context, count * pixels, source, gradient, at.data(), sums, first > 0);
    }
    const std::vector<std::int64_t> from = places();
    context.rows(filters(), g_.depth(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t f = begin; f < end; ++f) order(sums + f * pitch(), from, dw + f * g_.depth());
    });
  }

 private:
  static constexpr std::int64_t kBytes = 2 << 20;    // of turned images at once
  static constexpr std::int64_t kShared = 256 << 10; // floats of sums from which on they stay with the thread
  static constexpr std::int64_t kSlack = 4 * kLanes;
#ifdef __AVX512F__
  static constexpr int kVectors = 4;
#else
  static constexpr int kVectors = 1;
#endif
  static constexpr std::int64_t kWidth = kVectors * kLanes;  // columns of the widest tile
  static constexpr std::int64_t kPixels = 96;                // that are added up at once

  static std::int64_t words(std::int64_t images) { return (images + kDepth - 1) / kDepth; }
  std::int64_t filters() const { return g_.group_filters(); }
  std::int64_t channels() const { return g_.group_channels(); }
  std::int64_t picture() const { return g_.padded_rows() * g_.padded_columns() * channels(); }
  std::int64_t pitch() const { return runs_ * padded_run_; }
  std::int64_t pieces() const { return (run_ + kWidth - 1) / kWidth; }

  // One filter's sums, position by position, to the order of W. `places` has each position's.
  void order(const float* sums, const std::vector<std::int64_t>& places, float* dw) const {
    const std::int64_t taps = g_.taps();
    if (taps == 1) {
      std::memcpy(dw, sums, static_cast<std::size_t>(channels()) * sizeof *dw);
      return;
    }
    for (std::int64_t c = 0; c < channels(); c += kLanes) {
      const std::int64_t count = std::min<std::int64_t>(kLanes, channels() - c);
      for (std::int64_t t = 0; t < taps; t += kLanes) {
        const std::int64_t n = std::min<std::int64_t>(kLanes, taps - t);
        V rows[kLanes] = {};
        for (std::int64_t i = 0; i < n; ++i) {
          const float* from = sums + places[static_cast<std::size_t>(t + i)] + c;
          rows[i] = count == kLanes ? load(from, Full{}) : load(from, Part{static_cast<int>(count)});
        }
        turned(rows);
        float* const to = dw + c * taps + t;
        // Whole vectors are faster; the next row puts right what one writes too much.
        const std::int64_t spare = count * taps - kLanes;  // behind the first row's vector
        const std::int64_t whole = taps < kLanes && spare >= 0 ? spare / taps + 1 : 0;
        for (std::int64_t r = 0; r < std::min(whole, count); ++r) store(to + r * taps, rows[r], Full{});
        for (std::int64_t r = whole; r < count; ++r) store(to + r * taps, rows[r], Part{static_cast<int>(n)});
      }
    }
  }

  std::vector<std::int64_t> places() const {
    std::vector<std::int64_t> all;
    for (std::int64_t t = 0; t < g_.taps(); ++t) {
      all.push_back(side_by_side_ ? t / g_.columns * padded_run_ + t % g_.columns * channels() : t * padded_run_);
    }
    return all;
  }

  // Words of images [first, first + count).
  void turn_all(const Context& context, const Tensor& dy, const Tensor& x, bool round, std::int64_t part,
                std::int64_t first, std::int64_t count, Word* source, Word* gradient) const {
    const std::int64_t rows = g_.padded_rows(), columns = g_.padded_columns(), lead = g_.left;
    const std::int64_t seen = std::max<std::int64_t>(0, std::min(g_.width, columns - lead));
    const std::int64_t x_step = g_.channels * g_.inputs(), y_step = g_.filters * g_.pixels();
    context.rows(count * rows, kDepth * columns * channels(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t image = (first + i / rows) * kDepth, y = i % rows - g_.top;
        Word* const row = source + i * columns * channels();
        if (y < 0 || y >= g_.height) {
          std::fill_n(row, columns * channels(), Word{0});
          continue;
        }
        std::fill_n(row, std::min(lead, columns) * channels(), Word{0});
        std::fill(row + std::min(lead + seen, columns) * channels(), row + columns * channels(), Word{0});
        turn_in_pairs<kDepth>(x, image * x_step + part * channels() * g_.inputs() + y * g_.width, x_step,
                              image + 1 < g_.batch, g_.inputs(), channels(), seen, round, row + lead * channels(),
                              channels());
      }
    });
    constexpr std::int64_t kPiece = 128;
    const std::int64_t parts = (g_.pixels() + kPiece - 1) / kPiece;
    const std::int64_t width = kDepth * std::min(kPiece, g_.pixels()) * filters();
    context.rows(count * parts, width, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t image = (first + i / parts) * kDepth, p = i % parts * kPiece;
        turn_in_pairs<kDepth>(dy, image * y_step + part * filters() * g_.pixels() + p, y_step, image + 1 < g_.batch,
                              g_.pixels(), filters(), std::min(kPiece, g_.pixels() - p), round,
                              gradient + (i / parts * g_.pixels() + p) * filters(), filters());
      }
    });
  }

  // c[r][.] (+)= sum over pixels of gradient[pixel][r] source[at[pixel]][.].
  template <int kRows, int kVectors>
  static void panel(std::int64_t depth, const Word* gradient, std::int64_t step, std::int64_t count,
                    const Word* source, const std::int32_t* at, float* c, std::int64_t ldc, bool more) {
    for (std::int64_t m = 0; m < count; m += kRows) {
      const std::int64_t rows = std::min<std::int64_t>(kRows, count - m);
      const Word* left = gradient + m;
      V sums[kRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = more && r < rows ? load(c + (m + r) * ldc + v * kLanes, Full{}) : V{};
        }
      }
      for (std::int64_t k = 0; k < depth; ++k, left += step) {
        const Word* from = source + at[k];
        V right[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) std::memcpy(&right[v], from + v * kLanes, sizeof(V));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[r][v] = Arithmetic::multiply_add(sums[r][v], left + r, right[v]);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(c + (m + r) * ldc + v * kLanes, sums[r][v], Full{});
      }
    }
  }

  // sums[f][run, piece] (+)= over all pixels, for `count` filters from `first` on.
  void piece(std::int64_t i, std::int64_t first, std::int64_t count, std::int64_t pixels, const Word* source,
             const Word* gradient, const std::int32_t* at, float* sums, bool more) const {
    using Panel = void (*)(std::int64_t, const Word*, std::int64_t, std::int64_t, const Word*, const std::int32_t*,
                           float*, std::int64_t, bool);
#ifdef __AVX512F__
    static constexpr Panel kPanels[] = {panel<16, 1>, panel<12, 2>, panel<8, 3>, panel<6, 4>};
#else
    static constexpr Panel kPanels[] = {panel<6, 1>};
#endif
    const std::int64_t run = i / pieces(), begin = i % pieces() * kWidth, width = std::min(kWidth, padded_run_ - begin);
    const std::int64_t row = side_by_side_ ? run : run / g_.columns, column = side_by_side_ ? 0 : run % g_.columns;
    const std::int64_t moved = (row * g_.spread_y * g_.padded_columns() + column * g_.spread_x) * channels() + begin;
    for (std::int64_t k = 0; k < pixels; k += kPixels) {
      kPanels[width / kLanes - 1](std::min(kPixels, pixels - k), gradient + k * filters() + first, filters(), count,
                                  source + moved, at + k, sums + run * padded_run_ + begin, pitch(), more || k > 0);
    }
  }

  void add(const Context& context, std::int64_t pixels, const Word* source, const Word* gradient,
           const std::int32_t* at, float* sums, bool more) const {
    std::int64_t chunk = filters();
    while (chunk > 48 && runs_ * pieces() * ((filters() + chunk - 1) / chunk) < 16) chunk = (chunk / 2 + 47) / 48 * 48;
    const std::int64_t chunks = (filters() + chunk - 1) / chunk;
    context.parallel(static_cast<std::size_t>(runs_ * pieces() * chunks), [&](std::size_t part) {
      const std::int64_t i = static_cast<std::int64_t>(part) / chunks,
                         first = static_cast<std::int64_t>(part) % chunks * chunk;
      piece(i, first, std::min(chunk, filters() - first), pixels, source, gradient, at, sums + first * pitch(), more);
    });
  }

  // All images in one go: a part makes all of its filters' rows and need not keep them.
  void whole(const Context& context, std::int64_t pixels, const Word* source, const Word* gradient,
             const std::int32_t* at, float* dw) const {
    constexpr std::int64_t kChunk = 24;
    const std::vector<std::int64_t> from = places();
    context.parallel(static_cast<std::size_t>((filters() + kChunk - 1) / kChunk), [&](std::size_t part) {
      const std::int64_t first = static_cast<std::int64_t>(part) * kChunk, count = std::min(kChunk, filters() - first);
      float* sums = kept(Place::kLocal, count * pitch());
      for (std::int64_t i = 0; i < runs_ * pieces(); ++i) {
        piece(i, first, count, pixels, source, gradient, at, sums, false);
      }
      for (std::int64_t f = 0; f < count; ++f) order(sums + f * pitch(), from, dw + (first + f) * g_.depth());
    });
  }

  const Window& g_;
  bool side_by_side_;
  std::int64_t runs_, run_, padded_run_, at_once_ = 1;
};

}  // namespace ortgraph
