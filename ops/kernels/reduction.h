// Column sums with a result that does not depend on the number of threads.
#pragma once

#include "kernel.h"
#include "vector.h"

namespace ortgraph {

// Sums over rows are made per fixed piece of rows and then added in order: `Partials` holds one row of `width` floats
// for each piece. Scratch: row_parts(rows, width) * width floats, at most 32 * width.
class Partials {
 public:
  Partials(std::int64_t rows, std::int64_t width, std::int64_t sums = 1)
      : size_(Context::row_piece(rows, width)),
        parts_(Context::row_parts(rows, width)),
        width_(width * sums),
        data_(static_cast<std::size_t>(parts_ * width_)) {}

  // The cleared row of sums of the piece that starts at row `begin`.
  float* clear(std::int64_t begin) const {
    float* row = data_.data() + begin / size_ * width_;
    std::fill(row, row + width_, 0.0f);
    return row;
  }

  // out[c] = sum over pieces of column `from + c`.
  void total(std::int64_t from, std::int64_t width, float* out) const {
    std::fill(out, out + width, 0.0f);
    for (std::int64_t p = 0; p < parts_; ++p) {
      const float* row = data_.data() + p * width_ + from;
      for (std::int64_t c = 0; c < width; ++c) out[c] += row[c];
    }
  }

 private:
  std::int64_t size_, parts_, width_;
  Scratch<float> data_;
};

// out[c] += sum of rows [begin, end) of x [., width]; four rows at a time.
inline void add_rows(const float* x, std::int64_t begin, std::int64_t end, std::int64_t width, float* out) {
  std::int64_t r = begin;
  for (; r + 4 <= end; r += 4) {
    const float *a = x + r * width, *b = a + width, *c = b + width, *d = c + width;
    vectors(width, [&](std::int64_t i, auto span) {
      const V four = (load(a + i, span) + load(b + i, span)) + (load(c + i, span) + load(d + i, span));
      store(out + i, load(out + i, span) + four, span);
    });
  }
  for (; r < end; ++r) {
    const float* a = x + r * width;
    vectors(width, [&](std::int64_t i, auto span) { store(out + i, load(out + i, span) + load(a + i, span), span); });
  }
}

void column_sum(const Context& context, const float* x, std::int64_t rows, std::int64_t width, float* out);

}  // namespace ortgraph
