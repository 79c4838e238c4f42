// What the forward and the backward kernel of attention share: where heads lie, what is added to scores, dropout.
//
// Scores are kept turned, keys by queries: a query is a lane, so that its maximum and its sum over keys need no sums
// across lanes, and the turned probabilities are the left operands of the products that follow.
#pragma once

#include <limits>
#include <optional>

#include "generator.h"
#include "kernel.h"
#include "tiles.h"
#include "vector.h"

namespace ortgraph {

constexpr std::int64_t kKeys = 128;  // keys of a block: its scores and the rows of K and V stay in the nearest caches
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// [batch, heads, rows, width], or [batch, rows, heads, width] in memory.
struct Heads {
  Heads(const Shape& shape, bool rows_first) {
    expect(shape.rank == 4, "heads must have four dimensions");
    batch = shape.dim[0];
    heads = shape.dim[rows_first ? 2 : 1];
    rows = shape.dim[rows_first ? 1 : 2];
    width = shape.dim[3];
    stride = rows_first ? heads * width : width;
    next_head = rows_first ? width : rows * width;
  }
  std::int64_t at(std::int64_t b, std::int64_t h) const { return b * heads * rows * width + h * next_head; }
  template <class T>
  Rows<T> of(const void* data, std::int64_t b, std::int64_t h) const {
    return {static_cast<const T*>(data) + at(b, h), width, stride};
  }
  template <class T>
  T* row(void* data, std::int64_t b, std::int64_t h, std::int64_t r) const {
    return static_cast<T*>(data) + at(b, h) + r * stride;
  }

  std::int64_t batch, heads, rows, width, stride, next_head;
};

struct AttentionOptions {
  explicit AttentionOptions(const Attributes& a)
      : causal(a.integer("is_causal", 0) != 0),
        scale(a.decimal("scale", std::numeric_limits<double>::quiet_NaN())),
        ratio(a.decimal("ratio", 0.0)),
        node(a.integer("node", 0)) {
    const std::string precision = a.text("precision", "");
    expect(ratio >= 0.0 && ratio <= 1.0, "ratio must be within 0 and 1");
    expect(precision.empty() || precision == "fp32" || precision == "bf16", "precision must be fp32 or bf16");
    set_layout(a.text("layout", "bhsd"));
    low = precision == "bf16";
    given = !precision.empty();
  }
  bool brain(ElementType type) const { return given ? low : type == kBfloat16; }
  float scale_for(std::int64_t width) const {
    // The attribute is a float: 1 / sqrt(width) exactly where it stands for that.
    const double usual = 1.0 / std::sqrt(static_cast<double>(width));
    return static_cast<float>(std::isnan(scale) || std::abs(scale / usual - 1.0) < 1e-6 ? usual : scale);
  }

  // One word for all tensors, or one each for Q, K, V and Y, with commas between them.
  void set_layout(const std::string& words) {
    const std::size_t count = words.size() > 4 ? 4 : 1;
    expect(words.size() == 5 * count - 1, "layout must be one word or four");
    for (std::size_t i = 0; i < 4; ++i) {
      const std::string word = words.substr(count == 1 ? 0 : 5 * i, 4);
      expect(word == "bhsd" || word == "bshd", "layout must be bhsd or bshd");
      rows_first[i] = word == "bshd";
    }
  }

  bool causal, rows_first[4], low, given;
  double scale, ratio;
  std::int64_t node;
};

// The additive mask [B, H, S, T], broadcast from the right.
class Mask {
 public:
  Mask(const Tensor& mask, const Shape& scores) : mask_(mask) {
    if (!mask) return;
    expect(mask.shape.rank <= 4, "Mask has more than four dimensions");
    const std::size_t lead = 4 - mask.shape.rank;
    std::int64_t stride = 1;
    for (std::size_t i = 4; i-- > lead;) {
      const std::int64_t d = mask.shape.dim[i - lead];
      expect(d == 1 || d == scores.dim[i], "Mask does not broadcast to the scores");
      stride_[i] = d == 1 ? 0 : stride;
      stride *= d;
    }
  }
  bool given() const { return static_cast<bool>(mask_); }
  // The same for all queries of a head.
  bool by_key() const { return stride_[2] == 0; }
  float at(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t t) const {
    const std::int64_t i = offset(b, h, s, t);
    if (mask_.type == kFloat) return mask_.floats()[i];
    std::uint32_t bits = static_cast<std::uint32_t>(static_cast<const Bf16*>(mask_.raw)[i].bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  // Sixteen keys of a query from t on; zeros after `left`.
  V row(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t t, std::int64_t left) const {
    if (stride_[3] == 0) return splat(at(b, h, s, t));
    const std::int64_t i = offset(b, h, s, t);
    return mask_.type == kFloat ? load_up_to(mask_.floats() + i, left)
                                : load_up_to(static_cast<const Bf16*>(mask_.raw) + i, left);
  }

 private:
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t t) const {
    return b * stride_[0] + h * stride_[1] + s * stride_[2] + t * stride_[3];
  }

  Tensor mask_;
  std::int64_t stride_[4] = {};
};

// Keys [key, key + keys) by queries [query, query + queries); lanes is queries rounded up to whole vectors.
struct Block {
  std::int64_t b, h, key, keys, query, queries, lanes;
  std::int64_t vectors() const { return lanes / kLanes; }
};

// to[key, lane] from numbers by query: row(query, key, left) gives sixteen keys.
template <class Row>
void turn_rows(const Block& at, float* to, const Row& row) {
  for (std::int64_t r = 0; r < at.lanes; r += kLanes) {
    for (std::int64_t k = 0; k < at.keys; k += kLanes) {
      V v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = r + i < at.queries ? row(r + i, k, at.keys - k) : V{};
      turn(v);
      for (std::int64_t i = 0; i < std::min<std::int64_t>(kLanes, at.keys - k); ++i) {
        store(to + (k + i) * at.lanes + r, v[i], Full{});
      }
    }
  }
}

// What is added to the scores of a block: nothing, a number for each key, or a number for each score.
class Bias {
 public:
  Bias(Space& space, const Mask& mask, bool causal, std::int64_t lanes)
      : mask_(mask), causal_(causal), numbers_(space.take(!mask.given() ? 0 : mask.by_key() ? kKeys : kKeys * lanes)) {}

  void fill(const Block& at) {
    block_ = at;
    diagonal_ = causal_ && at.key + at.keys > at.query + 1;
    if (!mask_.given()) return;
    if (mask_.by_key()) {
      for (std::int64_t t = 0; t < at.keys; t += kLanes) {
        store(numbers_ + t, mask_.row(at.b, at.h, 0, at.key + t, at.keys - t), Full{});
      }
      return;
    }
    turn_rows(at, numbers_, [&](std::int64_t q, std::int64_t k, std::int64_t left) {
      return mask_.row(at.b, at.h, at.query + q, at.key + k, left);
    });
  }

  // body(add), where add(score, key, lane of the first of sixteen queries) gives score and bias.
  template <class Body>
  void apply(const Body& body) const {
    const float* add = numbers_;
    const std::int64_t lanes = block_.lanes, ahead = block_.key - block_.query;
    if (!mask_.given()) {
      if (!diagonal_) return body([](V z, std::int64_t, std::int64_t) { return z; });
      return body([=](V z, std::int64_t k, std::int64_t lane) { return hidden(z, k + ahead - lane); });
    }
    if (mask_.by_key()) {
      if (!diagonal_) return body([=](V z, std::int64_t k, std::int64_t) { return z + splat(add[k]); });
      return body([=](V z, std::int64_t k, std::int64_t lane) { return hidden(z + splat(add[k]), k + ahead - lane); });
    }
    if (!diagonal_) {
      return body([=](V z, std::int64_t k, std::int64_t lane) { return z + load(add + k * lanes + lane, Full{}); });
    }
    return body([=](V z, std::int64_t k, std::int64_t lane) {
      return hidden(z + load(add + k * lanes + lane, Full{}), k + ahead - lane);
    });
  }

 private:
  // Queries before the key do not see it. NaN stays, as in a sum with minus infinity.
  static V hidden(V z, std::int64_t key) {
    constexpr Vi lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return lane < static_cast<std::int32_t>(key) ? z + kLowest : z;
  }

  const Mask& mask_;
  bool causal_, diagonal_ = false;
  Block block_{};
  float* numbers_;
};

// Whether a query sees no key, by its mask: such rows are zero. Without a mask every row sees the first key.
inline bool blind(const Mask& mask, bool causal, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t keys) {
  if (!mask.given()) return false;
  const std::int64_t seen = causal ? std::min(keys, s + 1) : keys;
  for (std::int64_t t = 0; t < seen; ++t) {
    if (mask.at(b, h, s, t) != kLowest) return false;
  }
  return true;
}

// Factors of the probabilities of a block: 0, or 1 / (1 - ratio).
class Drop {
 public:
  Drop(const AttentionOptions& options, const Tensor& key, const Tensor& step)
      : on_(static_cast<bool>(key)), threshold_(options.ratio), scale_(keep_scale(options.ratio)) {
    if (on_) generator_.emplace(key, step, options.node);
  }
  bool on() const { return on_; }

  // to[key, lane]; the mask is drawn for [B, H, S, T] in row-major order.
  void fill(const Block& at, std::int64_t heads, std::int64_t rows, std::int64_t keys, float* to) const {
    turn_rows(at, to, [&](std::int64_t q, std::int64_t k, std::int64_t left) {
      const std::int64_t from = ((at.b * heads + at.h) * rows + at.query + q) * keys + at.key + k;
      alignas(64) float kept[kLanes] = {};
      const std::int64_t count = std::min<std::int64_t>(left, kLanes), column = from % kDraws;
      const std::int64_t whole = std::min(count, kDraws - column);
      draw(from / kDraws, column, whole, kept);
      if (whole < count) draw(from / kDraws + 1, 0, count - whole, kept + whole);
      return load(kept, Full{});
    });
  }

 private:
  void draw(std::int64_t row, std::int64_t column, std::int64_t count, float* kept) const {
    std::int32_t words[kDraws];
    generator_->part(row, column, column + count, words);
    for (std::int64_t j = 0; j < count; ++j) {
      kept[j] = !threshold_.none && words[column + j] >= threshold_.word ? scale_ : 0.0f;
    }
  }

  bool on_;
  Threshold threshold_;
  float scale_;
  std::optional<Generator> generator_;
};

}  // namespace ortgraph
