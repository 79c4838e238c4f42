// Scaled dot-product attention: blocks of keys, probabilities never in memory.
#include "attention.h"

namespace ortgraph {
namespace {

constexpr std::int64_t kLanesOfBlock = 64;
constexpr std::int64_t kQueries = 256;  // queries of a piece: they share the packed keys and values

// log of positive numbers, by two steps of Halley's method.
V logarithm(V x) {
  V y = (__builtin_convertvector(reinterpret_cast<Vi>(x), V) - 1064866805.0f) * 8.2629582881927490e-8f;
  for (int i = 0; i < 2; ++i) {
    const V e = exp(y);
    y += 2.0f * (x - e) / (x + e);
  }
  return y;
}

struct Sides {
  Heads q, k, v, y;
  const void *q_data, *k_data, *v_data;
  void* y_data;
  float* total;
  float scale;
  std::int64_t share;  // query heads per key head
};

// The running softmax of a block of queries.
struct Running {
  alignas(64) float top[kQueries], sum[kQueries], factor[kQueries];
};

template <class F, class T>
class Piece {
 public:
  Piece(Space& space, const Sides& sides, const AttentionOptions& options, const Mask& mask, const Drop& drop)
      : s_(sides), options_(options), mask_(mask), drop_(drop), bias_(space, mask, options.causal, kLanesOfBlock),
        d_(words_of<F>(sides.q.width)), e_(up(sides.v.width, kLanes)), d_row_(up(d_, kLanes)),
        queries_(space.take(d_ * kQueries)), keys_(space.take(kKeys * d_row_)),
        values_(space.take(words_of<F>(kKeys) * e_)), scores_(space.take(kKeys * kLanesOfBlock)),
        kept_(space.take(drop.on() ? kKeys * kLanesOfBlock : 0)), sums_(space.take(kQueries * e_)) {}

  void run(std::int64_t b, std::int64_t h, std::int64_t first) {
    const std::int64_t count = std::min(kQueries, s_.q.rows - first), keys = s_.k.rows;
    const Rows<T> q = s_.q.of<T>(s_.q_data, b, h), k = s_.k.of<T>(s_.k_data, b, h / s_.share),
                  v = s_.v.of<T>(s_.v_data, b, h / s_.share);
    for (std::int64_t i = 0; i < count; i += kLanesOfBlock) {
      const std::int64_t n = std::min(kLanesOfBlock, count - i);
      pack_turned<F>(q, first + i, n, queries_ + i * d_, up(n, kLanes));
    }
    const std::int64_t end = options_.causal ? std::min(keys, first + count) : keys;
    for (std::int64_t key = 0; key < end; key += kKeys) {
      const std::int64_t n = std::min(kKeys, keys - key);
      const Operand left = left_rows<F>(k, key, n, keys_);
      const Right right = right_rows<F>(v, key, n, values_);
      for (std::int64_t i = 0; i < count; i += kLanesOfBlock) {
        const std::int64_t m = std::min(kLanesOfBlock, count - i);
        if (options_.causal && key >= first + i + m) continue;
        block({b, h, key, n, first + i, m, up(m, kLanes)}, i, left, right, key == 0);
      }
    }
    if (end == 0) reset(count);
    for (std::int64_t i = 0; i < count; ++i) finish(b, h, first + i, i);
    if (s_.total) totals(b, h, first, count);
  }

 private:
  void block(const Block& at, std::int64_t i, const Operand& left, const Right& right, bool fresh) {
    product<F>(at.keys, at.vectors(), d_, left, queries_ + i * d_, at.lanes, scores_, at.lanes, false);
    bias_.fill(at);
    if (drop_.on()) drop_.fill(at, s_.q.heads, s_.q.rows, s_.k.rows, kept_);
    bias_.apply([&](auto add) {
      for (std::int64_t lane = 0; lane < at.lanes; lane += kLanes) softmax(at, i, lane, fresh, add);
    });
    if (!fresh) rescale(i, at.queries);
    const Operand p{scores_, 1, at.lanes};
    float* sums = sums_ + i * e_;
    product<F>(at.queries, e_ / kLanes, words_of<F>(at.keys), p, right.data, right.row, sums, e_, !fresh);
  }

  template <class Add>
  void softmax(const Block& at, std::int64_t i, std::int64_t lane, bool fresh, const Add& add) {
    float *z = scores_ + lane, *kept = kept_ + lane;
    const std::int64_t n = at.keys, row = at.lanes;
    const V before = fresh ? splat(kLowest) : load(state_.top + i + lane, Full{});
    V best = before;
    for (std::int64_t t = 0; t < n; ++t) {
      const V score = add(load(z + t * row, Full{}) * s_.scale, t, lane);
      store(z + t * row, score, Full{});
      best = larger(score, best);
    }
    // A row that sees nothing yet: its scores are minus infinity, and so their differences shall be.
    const V shift = best == kLowest ? V{} : best;
    V sum{};
    const auto weight = [&](std::int64_t t) {
      const V p = exp(load(z + t * row, Full{}) - shift);
      sum += p;
      return drop_.on() ? p * load(kept + t * row, Full{}) : p;
    };
    if constexpr (F::kPair == 2) {
      for (std::int64_t t = 0; t < n; t += 2) {
        const V upper = weight(t), lower = t + 1 < n ? weight(t + 1) : V{};
        store(z + t / 2 * row, pair_across(upper, lower), Full{});
      }
    } else {
      for (std::int64_t t = 0; t < n; ++t) store(z + t * row, F::round(weight(t)), Full{});
    }
    const V factor = fresh ? V{} : exp(before - shift);
    store(state_.factor + i + lane, factor, Full{});
    store(state_.sum + i + lane, fresh ? sum : load(state_.sum + i + lane, Full{}) * factor + sum, Full{});
    store(state_.top + i + lane, best, Full{});
  }

  void rescale(std::int64_t first, std::int64_t count) {
    for (std::int64_t i = first; i < first + count; ++i) {
      const float factor = state_.factor[i];
      if (factor == 1.0f) continue;
      float* sums = sums_ + i * e_;
      for (std::int64_t c = 0; c < e_; c += kLanes) store(sums + c, load(sums + c, Full{}) * factor, Full{});
    }
  }

  void reset(std::int64_t count) {
    std::fill_n(state_.sum, count, 0.0f);
    std::fill_n(state_.top, count, kLowest);
    std::fill_n(sums_, count * e_, 0.0f);
  }

  void finish(std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t i) {
    float inverse = 1.0f / state_.sum[i];
    if (state_.sum[i] == 0.0f && (s_.k.rows == 0 || blind(mask_, options_.causal, b, h, query, s_.k.rows))) {
      // The sums are zeros, or NaN where a value is not finite: 0 times infinity, as in the product.
      inverse = 1.0f;
      state_.sum[i] = std::numeric_limits<float>::infinity();
    }
    if (!s_.y_data) return;
    T* to = s_.y.row<T>(s_.y_data, b, h, query);
    const float* sums = sums_ + i * e_;
    vectors(s_.v.width, [&](std::int64_t c, auto span) { store(to + c, load(sums + c, Full{}) * inverse, span); });
  }

  void totals(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) {
    float* to = s_.total + (b * s_.q.heads + h) * s_.q.rows + first;
    vectors(count, [&](std::int64_t i, auto span) {
      const V sum = load(state_.sum + i, Full{}), top = load(state_.top + i, Full{});
      constexpr float kEndless = std::numeric_limits<float>::infinity();
      // A row that sees nothing has the total that makes its probabilities zero in the backward half.
      store(to + i, sum == kEndless ? (top == kLowest ? sum : top + sum) : top + logarithm(sum), span);
    });
  }

  const Sides& s_;
  const AttentionOptions& options_;
  const Mask& mask_;
  const Drop& drop_;
  Bias bias_;
  std::int64_t d_, e_, d_row_;
  float *queries_, *keys_, *values_, *scores_, *kept_, *sums_;
  Running state_;
};

// (Q, K, V, Mask?, Key?, Step?) -> (Y?, LogSumExp?)
class Attention final : public Kernel {
 public:
  explicit Attention(const Attributes& a) : options_(a) {}

  void compute(const Context& context) const override {
    const Tensor q = context.input(0), k = context.input(1), v = context.input(2);
    const auto& rows_first = options_.rows_first;
    const Heads hq(q.shape, rows_first[0]), hk(k.shape, rows_first[1]), hv(v.shape, rows_first[2]);
    Shape shape{hq.batch, hq.heads, hq.rows, hv.width};
    if (rows_first[3]) std::swap(shape.dim[1], shape.dim[2]);
    const Heads hy(shape, rows_first[3]);
    expect(hq.width == hk.width && hk.rows == hv.rows && hk.heads == hv.heads, "Q, K and V do not fit");
    expect(hq.batch == hk.batch && hq.batch == hv.batch, "Q, K and V differ in their batch");
    expect(hk.heads > 0 ? hq.heads % hk.heads == 0 : hq.heads == 0, "key heads do not divide query heads");
    const Mask mask(context.input(3), {hq.batch, hq.heads, hq.rows, hk.rows});
    const Drop drop(options_, context.input(4), context.input(5));
    const Output y = context.typed_output(0, shape);
    float* total = context.floats(1, {hq.batch, hq.heads, hq.rows});
    const std::int64_t share = hk.heads ? hq.heads / hk.heads : 1;
    const Sides sides{hq, hk, hv, hy, q.raw, k.raw, v.raw, y.raw, total, options_.scale_for(hq.width), share};
    const std::int64_t parts = (hq.rows + kQueries - 1) / kQueries;
    const auto run = [&](auto format, auto element) {
      context.parallel(static_cast<std::size_t>(hq.batch * hq.heads * parts), [&](std::size_t i) {
        const auto part = static_cast<std::int64_t>(i), head = part / parts;
        auto piece = Space::make<Piece<decltype(format), decltype(element)>>(sides, options_, mask, drop);
        piece.run(head / hq.heads, head % hq.heads, part % parts * kQueries);
      });
    };
    const bool low = options_.brain(q.type);
    if (q.type == kBfloat16) return low ? run(Brain{}, Bf16{}) : run(Single{}, Bf16{});
    return low ? run(Brain{}, float{}) : run(Single{}, float{});
  }

 private:
  AttentionOptions options_;
};

}  // namespace

void add_attention(Definitions& to) {
  constexpr Port kI_{kInt64, kOptional}, kL = low(0), kM = low(1, kOptional);
  add_variants(to, "Attention", {kL, kL, kL, kM, kI_, kI_}, {low(0, kOptional), kF_}, make<Attention>);
}

}  // namespace ortgraph
