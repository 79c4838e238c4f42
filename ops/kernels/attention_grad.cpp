// Gradient of scaled dot-product attention: probabilities are made again from the scores, block by block.
#include "attention.h"

namespace ortgraph {
namespace {

constexpr std::int64_t kQueries = 128;  // queries of a block
constexpr float kEndless = std::numeric_limits<float>::infinity();
// A total this large may have lost the logarithm in it (masks of large finite numbers): the sum is made again.
constexpr float kLargeTotal = 1e4f;

struct Sides {
  Heads q, k, v, y;
  const void *dy_data, *q_data, *k_data, *v_data, *y_data;
  const float* total;
  void *dq, *dk, *dv;
  float scale;
  std::int64_t share;  // query heads per key head
};

template <class F, class T>
class Piece {
 public:
  Piece(Space& space, const Sides& sides, const AttentionOptions& options, const Mask& mask, const Drop& drop)
      : s_(sides), options_(options), drop_(drop), bias_(space, mask, options.causal, kQueries), keys_(sides.k.rows),
        d_(words_of<F>(sides.q.width)), e_(words_of<F>(sides.v.width)), d_row_(up(sides.q.width, kLanes)),
        e_row_(up(sides.v.width, kLanes)), k_left_(space.take(keys_ * up(d_, kLanes))),
        v_left_(space.take(keys_ * up(e_, kLanes))), k_down_(space.take(words_of<F>(keys_) * d_row_)),
        q_turned_(space.take(d_ * kQueries)), dy_turned_(space.take(e_ * kQueries)),
        q_down_(space.take(words_of<F>(kQueries) * d_row_)), dy_down_(space.take(words_of<F>(kQueries) * e_row_)),
        scores_(space.take(kKeys * kQueries)), slopes_(space.take(kKeys * kQueries)),
        along_(space.take(F::kPair == 2 ? kKeys * kQueries / 2 : 0)),
        kept_(space.take(drop.on() ? kKeys * kQueries : 0)),
        dq_(space.take(kQueries * d_row_)), dk_(space.take(keys_ * d_row_)), dv_(space.take(keys_ * e_row_)) {}

  void run(std::int64_t b, std::int64_t g) {
    met_ = 0;
    const Rows<T> k = s_.k.of<T>(s_.k_data, b, g), v = s_.v.of<T>(s_.v_data, b, g);
    left_k_ = left_rows<F>(k, 0, keys_, k_left_);
    left_v_ = left_rows<F>(v, 0, keys_, v_left_);
    right_k_ = right_rows<F>(k, 0, keys_, k_down_);
    for (std::int64_t h = g * s_.share; h < (g + 1) * s_.share; ++h) {
      for (std::int64_t first = 0; first < s_.q.rows; first += kQueries) queries(b, h, first);
    }
    for (std::int64_t key = 0; key < keys_; ++key) {
      const bool met = key < met_;
      if (s_.dk) put(s_.k.row<T>(s_.dk, b, g, key), met ? dk_ + key * d_row_ : nullptr, s_.k.width, s_.scale);
      if (s_.dv) put(s_.v.row<T>(s_.dv, b, g, key), met ? dv_ + key * e_row_ : nullptr, s_.v.width, 1.0f);
    }
  }

 private:
  static void put(T* to, const float* from, std::int64_t width, float scale) {
    vectors(width, [&](std::int64_t c, auto span) {
      store(to + c, from ? load(from + c, Full{}) * scale : V{}, span);
    });
  }

  void queries(std::int64_t b, std::int64_t h, std::int64_t first) {
    const std::int64_t n = std::min(kQueries, s_.q.rows - first), lanes = up(n, kLanes * F::kPair);
    const Rows<T> q = s_.q.of<T>(s_.q_data, b, h), dy = s_.y.of<T>(s_.dy_data, b, h);
    pack_turned<F>(q, first, n, q_turned_, lanes);
    pack_turned<F>(dy, first, n, dy_turned_, lanes);
    right_q_ = right_rows<F>(q, first, n, q_down_);
    right_dy_ = right_rows<F>(dy, first, n, dy_down_);
    const std::int64_t end = options_.causal ? std::min(keys_, first + n) : keys_;
    statistics(b, h, first, n, lanes, end);
    for (std::int64_t key = 0; key < end; key += kKeys) {
      block({b, h, key, std::min(kKeys, keys_ - key), first, n, lanes});
    }
    if (!s_.dq) return;
    for (std::int64_t i = 0; i < n; ++i) {
      put(s_.q.row<T>(s_.dq, b, h, first + i), end > 0 ? dq_ + i * d_row_ : nullptr, s_.q.width, s_.scale);
    }
  }

  // What turns scores into probabilities, and sum(dY Y) of every query. Lanes without a query have probability 0.
  void statistics(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t n, std::int64_t lanes,
                  std::int64_t end) {
    const Rows<T> dy = s_.y.of<T>(s_.dy_data, b, h), y = s_.y.of<T>(s_.y_data, b, h);
    const float* total = s_.total + (b * s_.q.heads + h) * s_.q.rows + first;
    along_outputs(dy, y, first, n, lanes);
    bool large = false;
    for (std::int64_t i = 0; i < lanes; ++i) {
      shift_[i] = i < n ? total[i] : kEndless;
      large |= std::abs(shift_[i]) > kLargeTotal && shift_[i] != kEndless;
    }
    scaled_ = large;
    if (!large) return;
    alignas(64) float top[kQueries], sums[kQueries];
    std::fill_n(top, lanes, kLowest);
    std::fill_n(sums, lanes, 0.0f);
    for (std::int64_t key = 0; key < end; key += kKeys) {
      const Block at{b, h, key, std::min(kKeys, keys_ - key), first, n, lanes};
      score(at);
      bias_.apply([&](auto add) {
        for (std::int64_t lane = 0; lane < lanes; lane += kLanes) sum_again(at, lane, add, top, sums);
      });
    }
    for (std::int64_t i = 0; i < lanes; ++i) {
      const bool again = std::abs(shift_[i]) > kLargeTotal && shift_[i] != kEndless;
      if (again) shift_[i] = top[i];
      factor_[i] = again ? 1.0f / sums[i] : 1.0f;
    }
  }

  // sum(dY Y) in the order in which products sum dY V: where one key has all the weight they are equal, and scores that
  // large numbers made leave no rounding error that is multiplied with those numbers.
  void along_outputs(const Rows<T>& dy, const Rows<T>& y, std::int64_t first, std::int64_t n, std::int64_t lanes) {
    if (F::kPair == 1 && e_ <= kKeys) {
      pack_turned<F>(y, first, n, scores_, lanes);
      for (std::int64_t lane = 0; lane < lanes; lane += kLanes) {
        V sum{};
        for (std::int64_t c = 0; c < e_; ++c) {
          sum += load(scores_ + c * lanes + lane, Full{}) * load(dy_turned_ + c * lanes + lane, Full{});
        }
        store(along_y_ + lane, sum, Full{});
      }
      return;
    }
    for (std::int64_t i = 0; i < lanes; ++i) {
      V sum{};
      if (i < n) {
        const T *left = dy.row(first + i), *right = y.row(first + i);
        vectors(y.width, [&](std::int64_t c, auto span) {
          sum += F::round(load(left + c, span)) * load(right + c, span);
        });
      }
      along_y_[i] = ortgraph::sum(sum);
    }
  }

  template <class Add>
  void sum_again(const Block& at, std::int64_t lane, const Add& add, float* top, float* sums) const {
    const float* z = scores_ + lane;
    const auto score = [&](std::int64_t t) { return add(load(z + t * at.lanes, Full{}) * s_.scale, t, lane); };
    const V before = load(top + lane, Full{});
    V best = before;
    for (std::int64_t t = 0; t < at.keys; ++t) best = larger(score(t), best);
    const V shift = best == kLowest ? V{} : best;
    V sum = load(sums + lane, Full{}) * exp(before - shift);
    for (std::int64_t t = 0; t < at.keys; ++t) sum += exp(score(t) - shift);
    store(sums + lane, sum, Full{});
    store(top + lane, best, Full{});
  }

  void score(const Block& at) {
    const Operand k{left_k_.data + at.key * left_k_.row, left_k_.row, 1};
    product<F>(at.keys, at.vectors(), d_, k, q_turned_, at.lanes, scores_, at.lanes, false);
    bias_.fill(at);
  }

  void block(const Block& at) {
    score(at);
    const Operand v{left_v_.data + at.key * left_v_.row, left_v_.row, 1};
    product<F>(at.keys, at.vectors(), e_, v, dy_turned_, at.lanes, slopes_, at.lanes, false);
    if (drop_.on()) drop_.fill(at, s_.q.heads, s_.q.rows, keys_, kept_);
    bias_.apply([&](auto add) {
      if (scaled_ || drop_.on()) return slopes<true>(at, add);
      slopes<false>(at, add);
    });
    const std::int64_t queries = words_of<F>(at.queries), lanes = at.lanes;
    const bool met = at.key < met_;
    if (s_.dv) {
      const Operand p{scores_, lanes, 1};
      float* to = dv_ + at.key * e_row_;
      product<F>(at.keys, e_row_ / kLanes, queries, p, right_dy_.data, right_dy_.row, to, e_row_, met);
    }
    if (s_.dk) {
      const Operand ds = F::kPair == 2 ? Operand{along_, lanes / 2, 1} : Operand{slopes_, lanes, 1};
      float* to = dk_ + at.key * d_row_;
      product<F>(at.keys, d_row_ / kLanes, queries, ds, right_q_.data, right_q_.row, to, d_row_, met);
    }
    met_ = std::max(met_, at.key + at.keys);
    if (!s_.dq) return;
    const Operand ds{slopes_, 1, F::kPair * lanes};
    const float* k = right_k_.data + at.key / F::kPair * right_k_.row;
    product<F>(at.queries, d_row_ / kLanes, words_of<F>(at.keys), ds, k, right_k_.row, dq_, d_row_, at.key > 0);
  }

  // Scores become probabilities (dropped ones, what the values met), slopes of probabilities become slopes of scores.
  template <bool kScaled, class Add>
  void slopes(const Block& at, const Add& add) {
    const std::int64_t row = at.lanes;
    for (std::int64_t lane = 0; lane < row; lane += kLanes * F::kPair) {
      V shift[F::kPair], sum[F::kPair], factor[F::kPair];
      for (int n = 0; n < F::kPair; ++n) {
        shift[n] = load(shift_ + lane + n * kLanes, Full{});
        sum[n] = load(along_y_ + lane + n * kLanes, Full{});
        factor[n] = kScaled && scaled_ ? load(factor_ + lane + n * kLanes, Full{}) : splat(1.0f);
      }
      float *z = scores_ + lane, *g = slopes_ + lane, *kept = kept_ + lane;
      const auto one = [&](std::int64_t t, int n, V& p, V& ds) {
        const std::int64_t i = t * row + n * kLanes;
        p = exp(add(load(z + i, Full{}) * s_.scale, t, lane + n * kLanes) - shift[n]);
        V slope = load(g + i, Full{});
        if constexpr (kScaled) {
          p *= factor[n];
          const V keep = drop_.on() ? load(kept + i, Full{}) : splat(1.0f);
          slope *= keep;
          ds = p * (slope - sum[n]);
          p *= keep;
        } else {
          ds = p * (slope - sum[n]);
        }
      };
      if constexpr (F::kPair == 2) {
        for (std::int64_t t = 0; t < at.keys; t += 2) {
          V p[2][2]{}, ds[2][2]{};
          const int rows = t + 1 < at.keys ? 2 : 1;
          for (int r = 0; r < rows; ++r) {
            for (int n = 0; n < 2; ++n) one(t + r, n, p[r][n], ds[r][n]);
          }
          for (int r = 0; r < rows; ++r) {
            store(scores_ + (t + r) * row + lane / 2, pair_along(p[r][0], p[r][1]), Full{});
            store(along_ + (t + r) * row / 2 + lane / 2, pair_along(ds[r][0], ds[r][1]), Full{});
          }
          for (int n = 0; n < 2; ++n) store(g + t * row + n * kLanes, pair_across(ds[0][n], ds[1][n]), Full{});
        }
      } else {
        for (std::int64_t t = 0; t < at.keys; ++t) {
          V p, ds;
          one(t, 0, p, ds);
          store(z + t * row, F::round(p), Full{});
          store(g + t * row, F::round(ds), Full{});
        }
      }
    }
  }

  const Sides& s_;
  const AttentionOptions& options_;
  const Drop& drop_;
  Bias bias_;
  std::int64_t keys_, d_, e_, d_row_, e_row_;
  float *k_left_, *v_left_, *k_down_, *q_turned_, *dy_turned_, *q_down_, *dy_down_, *scores_, *slopes_, *along_, *kept_,
      *dq_, *dk_, *dv_;
  Operand left_k_{}, left_v_{};
  Right right_k_{}, right_q_{}, right_dy_{};
  std::int64_t met_ = 0;  // keys whose gradients have a value: blocks of keys are met in order
  bool scaled_ = false;
  alignas(64) float shift_[kQueries], factor_[kQueries], along_y_[kQueries];
};

// (dY, Q, K, V, Y, LogSumExp, Mask?, Key?, Step?) -> (dQ?, dK?, dV?)
class AttentionGrad final : public Kernel {
 public:
  explicit AttentionGrad(const Attributes& a) : options_(a) {}

  void compute(const Context& context) const override {
    const Tensor dy = context.input(0), q = context.input(1), k = context.input(2), v = context.input(3);
    const Tensor y = context.input(4), total = context.input(5);
    const auto& rows_first = options_.rows_first;
    const Heads hq(q.shape, rows_first[0]), hk(k.shape, rows_first[1]), hv(v.shape, rows_first[2]);
    const Heads hy(y.shape, rows_first[3]);
    expect(dy.shape == y.shape && hy.width == hv.width && hy.rows == hq.rows && hy.heads == hq.heads,
           "dY, Y, Q and V do not fit");
    expect(hq.width == hk.width && hk.rows == hv.rows && hk.heads == hv.heads, "Q, K and V do not fit");
    expect(hq.batch == hk.batch && hq.batch == hv.batch, "Q, K and V differ in their batch");
    expect(hk.heads > 0 ? hq.heads % hk.heads == 0 : hq.heads == 0, "key heads do not divide query heads");
    expect(total.shape.count() == hq.batch * hq.heads * hq.rows, "LogSumExp does not fit");
    const Mask mask(context.input(6), {hq.batch, hq.heads, hq.rows, hk.rows});
    const Drop drop(options_, context.input(7), context.input(8));
    const Sides sides{hq, hk, hv, hy, dy.raw, q.raw, k.raw, v.raw, y.raw, total.floats(), context.output(0, q.shape),
                      context.output(1, k.shape), context.output(2, v.shape), options_.scale_for(hq.width),
                      hk.heads ? hq.heads / hk.heads : 1};
    const auto run = [&](auto format, auto element) {
      context.parallel(static_cast<std::size_t>(hk.batch * hk.heads), [&](std::size_t i) {
        const auto part = static_cast<std::int64_t>(i);
        auto piece = Space::make<Piece<decltype(format), decltype(element)>>(sides, options_, mask, drop);
        piece.run(part / hk.heads, part % hk.heads);
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

void add_attention_grad(Definitions& to) {
  constexpr Port kI_{kInt64, kOptional}, kL = low(0), kL_ = low(0, kOptional), kM = low(1, kOptional);
  add_variants(to, "AttentionGrad", {kL, kL, kL, kL, kL, kF, kM, kI_, kI_}, {kL_, kL_, kL_}, make<AttentionGrad>);
}

}  // namespace ortgraph
