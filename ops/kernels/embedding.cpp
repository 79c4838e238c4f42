// Gradient of an embedding lookup, alone and inside the AdamW update of its table.
#include "adamw.h"
#include "vector.h"

namespace ortgraph {
namespace {

// For every table row the positions that looked it up, in ascending order, as linked lists.
// Scratch: 4 bytes per table row and per position.
class Positions {
 public:
  Positions(const Tensor& indices, std::int64_t rows, std::int64_t padding)
      : head_(static_cast<std::size_t>(rows)), next_(static_cast<std::size_t>(indices.shape.count())) {
    std::fill(head_.data(), head_.data() + rows, -1);
    for (std::int64_t i = indices.shape.count() - 1; i >= 0; --i) {
      std::int64_t row = indices.ints()[i];
      if (row < 0) row += rows;
      if (row < 0 || row >= rows) {
        refuse("index " + std::to_string(indices.ints()[i]) + " is outside a table of " + std::to_string(rows) +
               " rows");
      }
      if (row == padding) continue;
      next_[static_cast<std::size_t>(i)] = head_[static_cast<std::size_t>(row)];
      head_[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(i);
    }
  }
  std::int32_t first(std::int64_t row) const { return head_[static_cast<std::size_t>(row)]; }
  std::int32_t next(std::int32_t position) const { return next_[static_cast<std::size_t>(position)]; }

 private:
  Scratch<std::int32_t> head_, next_;
};

struct Lookup {
  Tensor dy, indices;
  std::int64_t width;

  Lookup(const Tensor& dy_, const Tensor& indices_) : dy(dy_), indices(indices_), width(dy_.shape.back()) {
    expect(dy.shape.rank >= 1 && dy.shape.rows() == indices.shape.count(), "dY must be [indices..., D]");
    expect(indices.shape.count() < std::numeric_limits<std::int32_t>::max(), "too many indices");
  }

  // out = the gradient of one table row that is looked up at least once.
  void row(const Positions& positions, std::int32_t first, float* out) const {
    const float* source = dy.floats() + first * width;
    std::copy(source, source + width, out);
    for (std::int32_t p = positions.next(first); p >= 0; p = positions.next(p)) {
      const float* more = dy.floats() + p * width;
      vectors(width, [&](std::int64_t i, auto span) { store(out + i, load(out + i, span) + load(more + i, span), span); });
    }
  }
};

// (dY [..., D], Indices) -> dTable [rows, D].
class EmbeddingGrad final : public Kernel {
 public:
  explicit EmbeddingGrad(const Attributes& a) : rows_(a.integer("rows", -1)), padding_(a.integer("padding_idx", -1)) {
    expect(rows_ >= 0, "the attribute 'rows' is missing");
  }

  void compute(const Context& context) const override {
    const Lookup lookup(context.input(0), context.input(1));
    const Positions positions(lookup.indices, rows_, padding_);
    const std::int64_t width = lookup.width;
    float* table = context.floats(0, Shape{rows_, width});
    context.rows(rows_, width, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        float* out = table + r * width;
        const std::int32_t first = positions.first(r);
        first < 0 ? std::fill(out, out + width, 0.0f) : lookup.row(positions, first, out);
      }
    });
  }

 private:
  std::int64_t rows_, padding_;
};

// (dY [..., D], Indices, Addend [rows, D]) -> Sum = Addend + EmbeddingGrad(dY, Indices), without the gradient's table.
class EmbeddingGradAdd final : public Kernel {
 public:
  explicit EmbeddingGradAdd(const Attributes& a) : padding_(a.integer("padding_idx", -1)) {}

  void compute(const Context& context) const override {
    const Lookup lookup(context.input(0), context.input(1));
    const Tensor addend = context.input(2);
    const std::int64_t width = lookup.width;
    expect(addend.shape.rank == 2 && addend.shape.dim[1] == width, "Addend must be [rows, D]");
    const std::int64_t rows = addend.shape.dim[0];
    const Positions positions(lookup.indices, rows, padding_);
    float* sum = context.floats(0, addend.shape);
    const Scratch<float> gradients(static_cast<std::size_t>(Context::row_parts(rows, width) * width));
    context.rows(rows, width, [&](std::int64_t begin, std::int64_t end) {
      float* gradient = gradients.data() + begin / Context::row_piece(rows, width) * width;
      for (std::int64_t r = begin; r < end; ++r) {
        const float* from = addend.floats() + r * width;
        float* out = sum + r * width;
        const std::int32_t first = positions.first(r);
        if (first < 0) {
          if (out != from) std::copy(from, from + width, out);
          continue;
        }
        lookup.row(positions, first, gradient);
        vectors(width, [&](std::int64_t i, auto span) { store(out + i, load(from + i, span) + load(gradient + i, span), span); });
      }
    });
  }

 private:
  std::int64_t padding_;
};

// (LearningRate, Step, W [rows, D], dY [..., D], Indices, M, V, GradScale?) -> (W', M', V').
// Equal to AdamW on EmbeddingGrad's result, which is never stored: rows that were not looked up have gradient zero.
class EmbeddingAdamW final : public Kernel {
 public:
  explicit EmbeddingAdamW(const Attributes& a) : rule_(a), padding_(a.integer("padding_idx", -1)) {}

  void compute(const Context& context) const override {
    const Tensor w = context.input(2), m = context.input(5), v = context.input(6);
    const Lookup lookup(context.input(3), context.input(4));
    const std::int64_t width = lookup.width;
    expect(w.shape.rank == 2 && w.shape.dim[1] == width, "W must be [rows, D]");
    same_count(w, m);
    same_count(w, v);
    const AdamStep step = rule_.at(context.input(0), context.input(1), context.input(7));
    const std::int64_t rows = w.shape.dim[0];
    const Positions positions(lookup.indices, rows, padding_);
    float* w_new = context.floats(0, w.shape);
    float* m_new = context.floats(1, m.shape);
    float* v_new = context.floats(2, v.shape);
    const Scratch<float> gradients(static_cast<std::size_t>(Context::row_parts(rows, width) * width));
    context.rows(rows, width, [&](std::int64_t begin, std::int64_t end) {
      float* gradient = gradients.data() + begin / Context::row_piece(rows, width) * width;
      std::int64_t r = begin;
      while (r < end) {
        const std::int32_t first = positions.first(r);
        std::int64_t stop = r + 1;
        if (first >= 0) {
          lookup.row(positions, first, gradient);
          const std::int64_t at = r * width;
          adam_update(step, width, w.floats() + at, gradient, m.floats() + at, v.floats() + at, w_new + at,
                      m_new + at, v_new + at);
        } else {
          while (stop < end && positions.first(stop) < 0) ++stop;
          const std::int64_t at = r * width;
          adam_decay(step, (stop - r) * width, w.floats() + at, m.floats() + at, v.floats() + at, w_new + at,
                     m_new + at, v_new + at);
        }
        r = stop;
      }
    });
  }

 private:
  AdamRule rule_;
  std::int64_t padding_;
};

}  // namespace

void add_embedding(Definitions& to) {
  static Definition grad("EmbeddingGrad", {kF, kI}, {kF}, make<EmbeddingGrad>);
  static Definition adamw("EmbeddingAdamW", {kF, kI, kF, kF, kI, kF, kF, kF_}, {kF, kF, kF}, make<EmbeddingAdamW>);
  static Definition add("EmbeddingGradAdd", {kF, kI, kF}, {kF}, make<EmbeddingGradAdd>);
  to.insert(to.end(), {&grad, &adamw, &add});
}

}  // namespace ortgraph
