// Cross-entropy over the last dimension of [N, C] and its gradient, with PyTorch's weights and ignore_index.
#include <algorithm>
#include <type_traits>

#include "gemm_tile.h"
#include "kernel.h"

namespace ortgraph {
namespace {

enum class Reduction { kNone, kMean, kSum };

struct Options {
  Reduction reduction;
  std::int64_t ignore;

  explicit Options(const Attributes& a) : reduction(read(a)), ignore(a.integer("ignore_index", -100)) {}
  static Reduction read(const Attributes& a) {
    const std::string name = a.text("reduction", "mean");
    expect(name == "none" || name == "mean" || name == "sum", "reduction must be 'none', 'mean' or 'sum'");
    return name == "none" ? Reduction::kNone : name == "mean" ? Reduction::kMean : Reduction::kSum;
  }
};

// Class indices and weights of the rows.
struct Labels {
  const std::int64_t* target;
  const float* weight;
  std::int64_t ignore;

  Labels(const Tensor& scores, const Tensor& target_, const Tensor& weight_, std::int64_t ignore_)
      : target(target_.ints()), weight(weight_.floats()), ignore(ignore_) {
    expect(scores.shape.rank == 2, "scores must be [N, C]");
    const std::int64_t n = scores.shape.dim[0], c = scores.shape.dim[1];
    expect(target_.shape.count() == n, "one Target per row");
    expect(!weight_ || weight_.shape.count() == c, "one Weight per class");
    for (std::int64_t r = 0; r < n; ++r) {
      if (kept(r) && (target[r] < 0 || target[r] >= c)) {
        refuse("Target " + std::to_string(target[r]) + " is outside " + std::to_string(c) + " classes");
      }
    }
  }
  bool kept(std::int64_t r) const { return target[r] != ignore; }
  float factor(std::int64_t r) const { return !kept(r) ? 0.0f : weight ? weight[target[r]] : 1.0f; }
};

// log(sum(exp(x))) less the maximum, and the maximum, of one row. It is read once, in blocks, so that reading overlaps with
// exponentials; where a block raises the maximum, the sum so far is scaled.
template <class T>
void log_sum_exp(const T* x, std::int64_t n, float* top, float* log_sum) {
  constexpr std::int64_t kBlock = 512;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  float best = kLeast;
  V total{};
  for (std::int64_t at = 0; at < n; at += kBlock) {
    const T* block = x + at;
    const std::int64_t count = std::min(kBlock, n - at);
    V high = splat(kLeast);
    vectors(count, [&](std::int64_t i, auto span) { high = larger(load(block + i, span, kLeast), high); });
    const float now = largest(high);
    if (now > best) {
      total *= exp(splat(best - now));
      best = now;
    }
    const float shift = best == kLeast ? 0.0f : best;
    vectors(count, [&](std::int64_t i, auto span) { total += keep(exp(load(block + i, span) - shift), span); });
  }
  *top = best;
  *log_sum = std::log(sum(total));
}

// (Logits [N, C], Target [N], Weight? [C]) -> (Loss, LogProb, TotalWeight). Scratch: 4 bytes per row.
class CrossEntropy final : public Kernel {
 public:
  explicit CrossEntropy(const Attributes& a) : options_(a) {}

  void compute(const Context& context) const override {
    const Tensor logits = context.input(0), target = context.input(1);
    const Labels labels(logits, target, context.input(2), options_.ignore);
    const std::int64_t rows = logits.shape.dim[0], n = logits.shape.dim[1];
    const bool none = options_.reduction == Reduction::kNone;
    float* loss = context.floats(0, none ? target.shape : Shape{});
    float* second = context.floats(1, logits.shape);
    float* total_weight = context.floats(2, Shape{});
    const Scratch<float> own(none ? 0 : static_cast<std::size_t>(rows));
    float* losses = none && loss ? loss : own.data();
    const Scratch<float> unread(none && !loss ? static_cast<std::size_t>(rows) : 0);
    if (none && !loss) losses = unread.data();
    context.rows(rows, n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const float* x = logits.floats() + r * n;
        float top, log_sum;
        log_sum_exp(x, n, &top, &log_sum);
        losses[r] = labels.kept(r) ? -(x[labels.target[r]] - top - log_sum) * labels.factor(r) : 0.0f;
        if (!second) continue;
        float* y = second + r * n;
        vectors(n, [&](std::int64_t i, auto span) { store(y + i, load(x + i, span) - top - log_sum, span); });
      }
    });
    double all = 0, weights = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      all += losses[r];
      weights += labels.factor(r);
    }
    if (loss && !none) *loss = static_cast<float>(options_.reduction == Reduction::kMean ? all / weights : all);
    if (total_weight) *total_weight = static_cast<float>(weights);
  }

 private:
  Options options_;
};

template <class T>
void put(T* p, V x, Full) {
  gemm::store_rounded(p, x);
}
template <class T>
void put(T* p, V x, Part span) {
  store(p, x, span);
}

// (dLoss, LogProb [N, C], Target, Weight?, TotalWeight?) -> dLogits, in float32 or bfloat16.
// With kStatistics: (dLoss, Logits, Target, Weight?, TotalWeight?, LogSumExp), Logits in either type.
template <bool kStatistics>
class CrossEntropyGrad final : public Kernel {
 public:
  explicit CrossEntropyGrad(const Attributes& a) : options_(a) {}

  void compute(const Context& context) const override {
    const Tensor dloss = context.input(0), scores = context.input(1), total = context.input(4),
                 log_sums = kStatistics ? context.input(5) : Tensor{};
    const Labels labels(scores, context.input(2), context.input(3), options_.ignore);
    const std::int64_t rows = scores.shape.dim[0], n = scores.shape.dim[1];
    const bool none = options_.reduction == Reduction::kNone, mean = options_.reduction == Reduction::kMean;
    expect(dloss.shape.count() == (none ? rows : 1), "dLoss must be shaped like Loss");
    expect(!mean || (total && total.shape.count() == 1), "reduction 'mean' needs TotalWeight");
    if (kStatistics) expect(log_sums.shape.count() == rows, "one LogSumExp per row");
    const Output out = context.typed_output(0, scores.shape);
    const auto fill = [&](const auto* all, auto* gradients) {
      using T = std::remove_pointer_t<decltype(gradients)>;
      context.rows(rows, n, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          T* dx = gradients + r * n;
          if (!labels.kept(r)) {
            std::memset(dx, 0, static_cast<std::size_t>(n) * sizeof(T));
            continue;
          }
          const float d = dloss.floats()[none ? r : 0];
          const float factor = labels.factor(r) * (mean ? d / *total.floats() : d);
          const float shift = kStatistics ? log_sums.floats()[r] : 0.0f;
          const auto* x = all + r * n;
          // Subtract before scaling: p - 1 is exact where p is near 1.
          const V score = load(x + labels.target[r], Part{1});
          const float hit = exp(score - shift)[0] - 1.0f;
          vectors(n, [&](std::int64_t i, auto span) { put(dx + i, exp(load(x + i, span) - shift) * factor, span); });
          store(dx + labels.target[r], splat(hit * factor), Part{1});
        }
      });
    };
    const auto from = [&](const auto* all) {
      if (out.type == kBfloat16) return fill(all, static_cast<Bf16*>(out.raw));
      fill(all, static_cast<float*>(out.raw));
    };
    if (scores.type == kBfloat16) return from(static_cast<const Bf16*>(scores.raw));
    from(scores.floats());
  }

 private:
  Options options_;
};

// (X [..., C]) -> (log(sum(exp(X))) over the last dimension, [..., 1]), X in float32 or bfloat16.
class LogSumExp final : public Kernel {
 public:
  explicit LogSumExp(const Attributes&) {}

  void compute(const Context& context) const override {
    const Tensor x = context.input(0);
    expect(x.shape.rank >= 1, "X must have a dimension");
    const std::int64_t n = x.shape.back();
    Shape shape = x.shape;
    shape.dim[shape.rank - 1] = 1;
    float* y = context.floats(0, shape);
    const auto each = [&](const auto* rows) {
      context.rows(x.shape.rows(), n, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          float top, log_sum;
          log_sum_exp(rows + r * n, n, &top, &log_sum);
          y[r] = top + log_sum;
        }
      });
    };
    if (x.type == kBfloat16) return each(static_cast<const Bf16*>(x.raw));
    each(x.floats());
  }
};

// (Factor, Logits [N, C], Target [N], Weight? [C]) -> (Loss?, dLogits): the sum of the losses, and the gradient, with one
// visit of each row. Scratch: 4 bytes per row.
class CrossEntropyAndGrad final : public Kernel {
 public:
  explicit CrossEntropyAndGrad(const Attributes& a) : ignore_(a.integer("ignore_index", -100)) {}

  void compute(const Context& context) const override {
    const Tensor seed = context.input(0), logits = context.input(1);
    const Labels labels(logits, context.input(2), context.input(3), ignore_);
    expect(seed.shape.count() == 1, "Factor must have one element");
    const std::int64_t rows = logits.shape.dim[0], n = logits.shape.dim[1];
    float* loss = context.floats(0, Shape{});
    float* out = context.floats(1, logits.shape);
    const Scratch<float> losses(static_cast<std::size_t>(rows));
    context.rows(rows, n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const float* x = logits.floats() + r * n;
        float* dx = out + r * n;
        losses[r] = 0.0f;
        if (!labels.kept(r)) {
          std::fill(dx, dx + n, 0.0f);
          continue;
        }
        V best = splat(-std::numeric_limits<float>::infinity());
        vectors(n, [&](std::int64_t i, auto span) {
          best = larger(load(x + i, span, -std::numeric_limits<float>::infinity()), best);
        });
        const float top = largest(best), score = x[labels.target[r]] - top;
        V total{};
        vectors(n, [&](std::int64_t i, auto span) {
          const V e = exp(load(x + i, span) - top);
          total += keep(e, span);
          store(dx + i, e, span);
        });
        const float all = sum(total), log_prob = score - std::log(all);
        losses[r] = -log_prob * labels.factor(r);
        const float factor = labels.factor(r) * *seed.floats(), share = factor / all;
        vectors(n, [&](std::int64_t i, auto span) { store(dx + i, load(dx + i, span) * share, span); });
        // Subtract before scaling: p - 1 is exact where p is near 1.
        const float hit = sum(exp(splat(log_prob))) / kLanes - 1.0f;
        dx[labels.target[r]] = hit * factor;
      }
    });
    double all = 0;
    for (std::int64_t r = 0; r < rows; ++r) all += losses[r];
    if (loss) *loss = static_cast<float>(all);
  }

 private:
  std::int64_t ignore_;
};

}  // namespace

void add_loss(Definitions& to) {
  static Definition all[] = {
      {"CrossEntropy", {kF, kI, kF_}, {kF_, kF_, kF_}, make<CrossEntropy>},
      {"CrossEntropyAndGrad", {kF, kF, kI, kF_}, {kF_, kF}, make<CrossEntropyAndGrad>},
  };
  for (Definition& definition : all) to.push_back(&definition);
  add_variants(to, "LogSumExp", {low(0)}, {kF}, make<LogSumExp>);
  add_variants(to, "CrossEntropyGrad", {kF, kF, kI, kF_, kF_}, {low(0)}, make<CrossEntropyGrad<false>>);
  add_variants(to, "CrossEntropyStatisticsGrad", {kF, low(0), kI, kF_, kF_, kF}, {low(1)}, make<CrossEntropyGrad<true>>);
}

}  // namespace ortgraph
