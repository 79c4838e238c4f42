// Updates of parameters in one pass over weight, gradient and states: AdamW, SGD and LAMB with PyTorch's arithmetic, each
// for one tensor and for many. With Skip nothing changes: outputs are copies of their inputs, bit for bit.
#include <cmath>
#include <cstring>

#include "adamw.h"

namespace ortgraph {
namespace {

constexpr std::int64_t kSlice = 32768;
constexpr std::size_t kMaxStates = 2;

const Tensor& one(const Tensor& t, const char* what) {
  expect(t && t.shape.count() == 1, what);
  return t;
}

double rate_of(const Tensor& t) { return *one(t, "LearningRate must have one element").floats(); }
std::int64_t step_of(const Tensor& t) { return *one(t, "Step must have one element").ints(); }
float scale_of(const Tensor& t) { return t ? *one(t, "GradScale must have one element").floats() : 1.0f; }
bool skipped(const Tensor& t) { return t && *static_cast<const bool*>(one(t, "Skip must have one element").raw); }

void keep(float* to, const float* from, std::int64_t n) {
  if (to && to != from) std::memmove(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

// One parameter: weight, gradient and states, old and new, from an element on.
struct Item {
  std::int64_t n = 0;
  const float *w = nullptr, *g = nullptr, *s[kMaxStates] = {};
  float *w_new = nullptr, *s_new[kMaxStates] = {};

  Item part(std::int64_t begin, std::int64_t count) const {
    Item p = *this;
    p.n = count;
    p.w += begin, p.g += begin, p.w_new += begin;
    for (std::size_t i = 0; i < kMaxStates; ++i) {
      if (s[i]) p.s[i] += begin, p.s_new[i] += begin;
    }
    return p;
  }
};

// Parameters cut in slices that depend on shapes only.
class Items {
 public:
  explicit Items(std::size_t states) : states_(states) {}

  void add(const Context& context, std::size_t input, std::size_t output) {
    Item item;
    const Tensor w = context.input(input), g = context.input(input + 1);
    item.n = same_count(w, g);
    item.w = w.floats(), item.g = g.floats(), item.w_new = context.floats(output, w.shape);
    expect(item.w_new || !item.n, "the new weight cannot be left out");
    for (std::size_t i = 0; i < states_; ++i) {
      const Tensor s = context.input(input + 2 + i);
      same_count(w, s);
      item.s[i] = s.floats(), item.s_new[i] = context.floats(output + 1 + i, s.shape);
      expect(item.s_new[i] || !item.n, "a new state cannot be left out");
    }
    items.push_back(item);
    first_.push_back(slices);
    slices += static_cast<std::size_t>((item.n + kSlice - 1) / kSlice);
  }

  // body(slice, tensor, part) on the session's threads.
  template <class Body>
  void run(const Context& context, const Body& body) const {
    context.parallel(slices, [&](std::size_t i) {
      // The last tensor that starts at or before slice i; empty tensors have no slice.
      const auto after = std::upper_bound(first_.begin(), first_.end(), i);
      const std::size_t t = static_cast<std::size_t>(after - first_.begin()) - 1;
      const std::int64_t begin = static_cast<std::int64_t>(i - first_[t]) * kSlice;
      body(i, t, items[t].part(begin, std::min(kSlice, items[t].n - begin)));
    });
  }

  void keep_all() const {
    for (const Item& item : items) {
      keep(item.w_new, item.w, item.n);
      for (std::size_t i = 0; i < states_; ++i) keep(item.s_new[i], item.s[i], item.n);
    }
  }

  std::size_t first(std::size_t tensor) const { return first_[tensor]; }
  std::size_t end(std::size_t tensor) const { return tensor + 1 < items.size() ? first_[tensor + 1] : slices; }

  std::vector<Item> items;
  std::size_t slices = 0;

 private:
  std::size_t states_;
  std::vector<std::size_t> first_;
};

struct Adam {
  explicit Adam(const Attributes& a) : rule(a) {}
  std::size_t states() const { return 2; }

  void compute(const Context& context, const Items& items, const Tensor& rate, const Tensor& n,
               const Tensor& scale) const {
    const AdamStep step = rule.at(rate, n, scale);
    items.run(context, [&](std::size_t, std::size_t, const Item& p) {
      adam_update(step, p.n, p.w, p.g, p.s[0], p.s[1], p.w_new, p.s_new[0], p.s_new[1]);
    });
  }

  AdamRule rule;
};

struct Sgd {
  explicit Sgd(const Attributes& a)
      : momentum(a.decimal("momentum", 0)),
        dampening(a.decimal("dampening", 0)),
        weight_decay(a.decimal("weight_decay", 0)),
        nesterov(a.integer("nesterov", 0) != 0) {}
  std::size_t states() const { return momentum != 0 ? 1 : 0; }

  void compute(const Context& context, const Items& items, const Tensor& rate, const Tensor& n,
               const Tensor& scale) const {
    SgdStep step;
    step.rate = static_cast<float>(rate_of(rate));
    step.decay = static_cast<float>(weight_decay);
    step.momentum = static_cast<float>(momentum);
    step.rest = static_cast<float>(1.0 - dampening);
    step.scale = scale_of(scale);
    step.first = step_of(n) == 1;
    step.nesterov = nesterov;
    items.run(context, [&](std::size_t, std::size_t, const Item& p) {
      p.s[0] ? sgd_momentum_update(step, p.n, p.w, p.g, p.s[0], p.w_new, p.s_new[0])
             : sgd_update(step, p.n, p.w, p.g, p.w_new);
    });
  }

  double momentum, dampening, weight_decay;
  bool nesterov;
};

struct Lamb {
  explicit Lamb(const Attributes& a)
      : of{a.decimal("beta1", 0.9), a.decimal("beta2", 0.999), a.decimal("epsilon", 1e-6), 0.0,
           a.integer("bias_correction", 1) != 0},
        weight_decay(a.decimal("weight_decay", 0.01)),
        least(a.decimal("min_trust", 0)),
        most(a.decimal("max_trust", 0)),
        adapt(a.integer("adapt", 1) != 0) {}
  std::size_t states() const { return 2; }

  // Scratch: the squares of weight and direction of every slice, and a step size for every tensor.
  void compute(const Context& context, const Items& items, const Tensor& rate, const Tensor& n,
               const Tensor& scale) const {
    const double lr = rate_of(rate);
    const LambStep step{adam_step(of, 1.0, static_cast<double>(step_of(n)), scale_of(scale)),
                        static_cast<float>(weight_decay), static_cast<float>(lr)};
    const Scratch<Squares> sums(items.slices);
    items.run(context, [&](std::size_t slice, std::size_t, const Item& p) {
      sums[slice] = lamb_moments(step, p.n, p.w, p.g, p.s[0], p.s[1], p.s_new[0], p.s_new[1]);
    });
    const Scratch<float> sizes(items.items.size());
    for (std::size_t t = 0; t < items.items.size(); ++t) {
      Squares total;
      for (std::size_t i = items.first(t); i < items.end(t); ++i) {
        total.weight += sums[i].weight;
        total.direction += sums[i].direction;
      }
      sizes[t] = static_cast<float>(lr * trust(std::sqrt(total.weight), std::sqrt(total.direction)));
    }
    items.run(context, [&](std::size_t, std::size_t t, const Item& p) {
      lamb_weights(step, sizes[t], p.n, p.w, p.s_new[0], p.s_new[1], p.w_new);
    });
  }

  // Comparisons are written so that NaN passes.
  double trust(double weight, double direction) const {
    if (!adapt) return 1.0;
    double ratio = weight == 0 || direction == 0 ? 1.0 : weight / direction;
    ratio = ratio < least ? least : ratio;
    return most > 0 && ratio > most ? most : ratio;
  }

  AdamSettings of;
  double weight_decay, least, most;
  bool adapt;
};

// (LearningRate, Step, W, G, states.., GradScale?, Skip?) -> (W', states'..). Outputs may lie over their inputs.
template <class Rule, std::size_t kInputs>
class Single final : public Kernel {
 public:
  explicit Single(const Attributes& a) : rule_(a) {}

  void compute(const Context& context) const override {
    Items items(rule_.states());
    items.add(context, 2, 0);
    if (skipped(context.input(kInputs - 1))) return items.keep_all();
    rule_.compute(context, items, context.input(0), context.input(1), context.input(kInputs - 2));
  }

 private:
  Rule rule_;
};

// (LearningRate, Step, GradScale?, Skip?, then W, G and states of every tensor) -> (W' and states' of every tensor).
template <class Rule>
class Multi final : public Kernel {
 public:
  explicit Multi(const Attributes& a) : rule_(a) {}

  void compute(const Context& context) const override {
    const std::size_t first = 4, states = rule_.states(), width = 2 + states;
    const std::size_t count = (context.inputs() - first) / width;
    expect(context.inputs() == first + width * count, "expects W, G and states of every tensor");
    Items items(states);
    for (std::size_t t = 0; t < count; ++t) items.add(context, first + width * t, (1 + states) * t);
    if (skipped(context.input(3))) return items.keep_all();
    rule_.compute(context, items, context.input(0), context.input(1), context.input(2));
  }

 private:
  Rule rule_;
};

// (tensors) -> sum of the squares of all their elements, a scalar: infinite or NaN when any element is.
// Sums are made per slice in float32 lanes and added in double, in order. Scratch: 8 bytes per slice.
class SquaredNorm final : public Kernel {
 public:
  explicit SquaredNorm(const Attributes&) {}

  void compute(const Context& context) const override {
    std::vector<std::pair<const float*, std::int64_t>> slices;
    for (std::size_t t = 0, count = context.inputs(); t < count; ++t) {
      const Tensor g = context.input(t);
      for (std::int64_t i = 0, total = g.shape.count(); i < total; i += kSlice) {
        slices.emplace_back(g.floats() + i, std::min(kSlice, total - i));
      }
    }
    const Scratch<double> sums(slices.size());
    context.parallel(slices.size(), [&](std::size_t i) { sums[i] = squares(slices[i].first, slices[i].second); });
    double total = 0;
    for (std::size_t i = 0; i < slices.size(); ++i) total += sums[i];
    *context.floats(0, Shape{}) = static_cast<float>(total);
  }
};

constexpr Port kB_{kBool, kOptional};

}  // namespace

AdamStep AdamRule::at(const Tensor& rate, const Tensor& step, const Tensor& scale) const {
  return adam_step(of_, rate_of(rate), static_cast<double>(step_of(step)), scale_of(scale));
}

void add_optimizer(Definitions& to) {
  const std::vector<Port> adam{kF, kI, kF, kF, kF, kF, kF_, kB_}, many{kF, kI, kF_, kB_, kFs};
  static Definition adamw("AdamW", adam, {kF, kF, kF}, make<Single<Adam, 8>>);
  static Definition lamb("LAMB", adam, {kF, kF, kF}, make<Single<Lamb, 8>>);
  static Definition sgd("SGD", {kF, kI, kF, kF, kF_, kF_, kB_}, {kF, kF_}, make<Single<Sgd, 7>>);
  static Definition adamws("MultiAdamW", many, {kFs}, make<Multi<Adam>>);
  static Definition lambs("MultiLAMB", many, {kFs}, make<Multi<Lamb>>);
  static Definition sgds("MultiSGD", many, {kFs}, make<Multi<Sgd>>);
  static Definition norm("SquaredNorm", {kFs}, {kF}, make<SquaredNorm>);
  to.insert(to.end(), {&adamw, &lamb, &sgd, &adamws, &lambs, &sgds, &norm});
}

}  // namespace ortgraph
