// Moves on a sequence: greedy relief of the peak, and annealing with a price per byte over the budget.
#pragma once

#include <cmath>

#include "recompute_clock.h"
#include "recompute_sequence.h"

namespace recompute {

struct Options {
  double budget, iterations, hot, cold, seconds;  // temperatures in mean costs of an operation
  int64_t seed;
  bool reorder;
  int stages;  // of the greedy
};

class Search {
 public:
  Search(const Graph& graph, const Options& options)
      : graph_(graph), options_(options), sequence_(graph), random_(options.seed), deadline_(options.seconds) {
    double once = 0.0, bytes = 0.0;
    int costly = 0;
    for (int i = 0; i < graph.operations; ++i) once += graph.cost[i], costly += graph.cost[i] > 0.0;
    for (int v = 0; v < graph.values; ++v) bytes += graph.size[v];
    unit_cost_ = once > 0.0 ? once / costly : 1.0;
    unit_bytes_ = bytes > 0.0 ? bytes / graph.values : 1.0;
  }

  void start(const std::vector<int32_t>& steps) { sequence_.build(steps, options_.budget); }
  std::vector<int32_t> steps() const { return sequence_.steps(); }
  Sequence& sequence() { return sequence_; }

  // Relieves the peak until the budget is met, in stages of lower and lower budgets: what is over a budget far below
  // the peak says little about the peak. False where nothing helps any more or time is up.
  bool greedy(int stages) {
    const double peak = sequence_.load().peak();
    bool met = true;
    for (int stage = 1; stage <= stages && peak > options_.budget; ++stage) {
      sequence_.set_budget(stage == stages ? options_.budget
                                           : peak * std::pow(options_.budget / peak, double(stage) / stages));
      met = true;
      while (met && sequence_.load().excess() > 0.0)
        met = !deadline_.passed() && relieve(sequence_.load().peak_slot(), 24);
    }
    return met;
  }

  // Annealing; the best sequence within the budget is kept in `best`.
  void anneal() {
    price_ = 4.0;
    current_ = objective();
    remember();
    const double total = options_.iterations;
    for (double done = 0; done < total; ++done) {
      if (std::fmod(done, kPeriod) == 0.0) {
        if (deadline_.passed()) break;
        temperature_ = options_.hot * std::pow(options_.cold / options_.hot, done / total);
        adjust_price(done / total);
        if (crowded_ > 32 + sequence_.length() / 16) respace();
      }
      step();
    }
  }

  bool found() const { return found_; }
  const std::vector<int32_t>& best() const { return best_; }
  double best_cost() const { return best_cost_; }
  int64_t accepted() const { return accepted_; }

 private:
  static constexpr double kPeriod = 256;
  static constexpr double kLate = 0.6;  // share of the moves
  static constexpr int kLongest = 64;  // operations evaluated again together

  double objective() {
    return sequence_.cost() / unit_cost_ + price_ * sequence_.load().excess() / unit_bytes_;
  }

  void remember() {
    if (sequence_.load().excess() > 0.0) return;
    if (found_ && sequence_.cost() >= best_cost_ - 1e-9 * unit_cost_) return;
    found_ = true;
    best_cost_ = sequence_.cost();
    best_ = sequence_.steps();
  }

  // Keeps the sequence near the budget; where nothing within it was found late, it only rises.
  void adjust_price(double progress) {
    if (sequence_.load().excess() > 0.0) price_ *= 1.05;
    else if (found_ || progress < kLate) price_ /= 1.03;
    price_ = std::min(std::max(price_, 0.05), found_ || progress < kLate ? 1000.0 : 1e6);
    current_ = objective();
  }

  void respace() {
    crowded_ = 0;
    sequence_.build(sequence_.steps(), options_.budget);
    current_ = objective();
  }

  void step() {
    const double allowed = -temperature_ * std::log(random_.unit());
    const double excess = price_ * sequence_.load().excess() / unit_bytes_;
    if (!propose(allowed + excess)) {
      if (sequence_.edits()) sequence_.undo();
      sequence_.commit();
      return;
    }
    const double changed = objective();
    if (changed > current_ + allowed) {
      sequence_.undo();
      return;
    }
    ++accepted_;
    sequence_.commit();
    current_ = changed;
    remember();
  }

  // One random edit; false where it is impossible. `worth`: cost that cannot be regained above it.
  bool propose(double worth) {
    const double kind = random_.unit();
    if (kind < 0.35) return drop_somewhere(worth);
    if (kind < 0.55) return forget_somewhere();
    if (kind < 0.75) return exchange();
    return shift();
  }

  int random_step() {
    while (true) {
      const int slot = random_.below(sequence_.end());
      if (sequence_.operation(slot) >= 0) return slot;
    }
  }

  // A slot over the budget, -1 without one.
  int random_overload() {
    Load& load = sequence_.load();
    if (load.excess() <= 0.0) return -1;
    const int start = random_.below(load.blocks());
    for (int k = 0; k < load.blocks(); ++k) {
      const int b = (start + k) % load.blocks();
      if (load.block_excess(b) > 0.0) return load.over_in_block(b, random_.below(Load::kBlock));
    }
    return -1;
  }

  // Next use of a value that lives through a slot without being used there; -1 where it does not.
  int spans(int v, int slot) const {
    const int producer = graph_.producer[v];
    if (!graph_.repeatable[producer]) return -1;
    const int made = sequence_.before(producer, slot);
    if (made < 0 || sequence_.operation(slot) == producer) return -1;
    const Sequence::Slots& uses = sequence_.uses(v);
    const auto it = std::lower_bound(uses.begin(), uses.end(), slot);
    if (it == uses.end() || *it == slot || *it > sequence_.next(producer, slot)) return -1;
    return *it;
  }

  bool drop_somewhere(double worth) {
    const int over = random_overload();
    if (over >= 0 && random_.chance(0.8)) {
      for (int k = 0; k < 24; ++k) {
        const int v = random_.below(graph_.values);
        const int use = spans(v, over);
        if (use >= 0) return graph_.cost[graph_.producer[v]] / unit_cost_ <= worth && again(graph_.producer[v], use);
      }
      return false;
    }
    const int slot = random_step(), o = sequence_.operation(slot);
    if (!graph_.inputs.size(o)) return false;
    const int v = graph_.in(o).begin()[random_.below(graph_.inputs.size(o))], made = graph_.producer[v];
    if (!graph_.repeatable[made] || graph_.cost[made] / unit_cost_ > worth) return false;
    return again(made, slot);
  }

  bool again(int o, int use) {
    chain_ = 0;
    return evaluate_before(o, use, Deep::kRandom) && drop_unused_before(o);
  }

  enum class Deep { kWhenOver, kAlways, kRandom };

  bool may_place(int o, int slot) const {
    for (const int32_t* f = graph_.followers.begin(o); f != graph_.followers.end(o); ++f)
      if (!sequence_.places(*f).empty() && sequence_.places(*f).front() < slot) return false;
    for (const int32_t* a = graph_.after.begin(o); a != graph_.after.end(o); ++a)
      if (sequence_.places(*a).empty() || sequence_.places(*a).back() > slot) return false;
    return true;
  }

  // Evaluates an operation right before a slot, and what it needs and is dead before that where `deep` says so.
  bool evaluate_before(int o, int use, Deep deep) {
    const int slot = sequence_.room_before(use);
    if (slot < 0) {
      ++crowded_;
      return false;
    }
    if (++chain_ > kLongest || !may_place(o, slot)) return false;
    sequence_.place(o, slot);
    for (int v : graph_.in(o)) {
      const int producer = graph_.producer[v], made = sequence_.before(producer, slot);
      if (made < 0) return false;
      const int used = sequence_.last_use(v, made, slot);
      const bool extended = sequence_.last_use(v, made, sequence_.next(producer, slot)) == slot;
      if (!extended || !graph_.repeatable[producer] || used >= slot - 1) continue;
      const bool over = sequence_.load().over(used + 1, slot - 1, 0.0);
      bool deeper = deep == Deep::kAlways || (deep == Deep::kWhenOver && over);
      if (deep == Deep::kRandom) deeper = random_.chance(over ? 0.7 : 0.1);
      if (deeper && !evaluate_before(producer, slot, deep)) {
        if (deep == Deep::kRandom) return false;
        continue;
      }
    }
    return true;
  }

  // Evaluations of an operation that nothing uses any more are taken out.
  bool drop_unused_before(int o) {
    for (size_t k = 0; k + 1 < sequence_.places(o).size(); ++k) {
      const int slot = sequence_.places(o)[k];
      if (k == 0 && !options_.reorder) continue;
      if (sequence_.useless(slot)) {
        forget(slot);
        return true;
      }
    }
    return true;
  }

  // Takes an evaluation out, and repeated evaluations that only it used.
  void forget(int slot) {
    const int o = sequence_.operation(slot);
    sequence_.erase(slot);
    for (int v : graph_.in(o)) {
      const int producer = graph_.producer[v], made = sequence_.before(producer, slot);
      if (made < 0 || sequence_.places(producer).size() < 2) continue;
      if (!options_.reorder && made == sequence_.places(producer).front()) continue;
      if (sequence_.useless(made)) forget(made);
    }
  }

  bool forget_somewhere() {
    if (sequence_.repeated().empty()) return false;
    const int o = sequence_.repeated()[random_.below(static_cast<int>(sequence_.repeated().size()))];
    const Sequence::Slots& places = sequence_.places(o);
    const int k = random_.below(static_cast<int>(places.size()));
    if (k == 0) {
      if (!options_.reorder) return false;
      for (int v : graph_.out(o))
        if (sequence_.last_use(v, places[0], places[1]) != places[0]) return false;
    }
    forget(places[k]);
    return true;
  }

  // Another value is dropped in place of one that is kept from now on.
  bool exchange() {
    if (!forget_somewhere()) return false;
    const int over = random_overload();
    if (over < 0) return true;
    for (int k = 0; k < 24; ++k) {
      const int v = random_.below(graph_.values), use = spans(v, over);
      if (use >= 0) return again(graph_.producer[v], use);
    }
    return true;
  }

  // Moves an evaluation to another place where it may stand.
  bool shift() {
    int slot = random_step();
    if (!sequence_.repeated().empty() && (!options_.reorder || random_.chance(0.5))) {
      const int o = sequence_.repeated()[random_.below(static_cast<int>(sequence_.repeated().size()))];
      slot = sequence_.places(o)[random_.below(static_cast<int>(sequence_.places(o).size()))];
    }
    const int o = sequence_.operation(slot);
    const Sequence::Slots& places = sequence_.places(o);
    const bool first = slot == places.front();
    if (first && !options_.reorder) return false;
    int low = sequence_.before(o, slot), high = std::min(sequence_.next(o, slot), sequence_.end());
    for (int v : graph_.in(o)) low = std::max(low, sequence_.places(graph_.producer[v]).front());
    for (const int32_t* a = graph_.after.begin(o); a != graph_.after.end(o); ++a)
      low = std::max(low, sequence_.places(*a).back());
    for (const int32_t* f = graph_.followers.begin(o); f != graph_.followers.end(o); ++f)
      high = std::min(high, sequence_.places(*f).front());
    int use = sequence_.end();
    for (int v : graph_.out(o)) use = std::min(use, sequence_.next_use(v, slot));
    if (first) high = std::min(high, use);
    const int target = destination(slot, low, high, use);
    if (target < 0) return false;
    sequence_.erase(slot);
    sequence_.place(o, target);
    return true;
  }

  // An empty slot in low < slot < high; -1 without one.
  int destination(int slot, int low, int high, int use) {
    if (high - low < 3) return -1;
    const double kind = random_.unit();
    int target;
    if (kind < 0.4) {
      target = low + 1 + random_.below(high - low - 1);
    } else if (kind < 0.6) {
      target = sequence_.room_before(std::min(use, high));
    } else {
      const int reach = 1 << random_.below(8);
      target = slot + (random_.chance(0.5) ? 1 : -1) * (1 + random_.below(reach));
    }
    if (target <= low || target >= high) return -1;
    while (target < high && sequence_.operation(target) >= 0) ++target;
    return target < high ? target : -1;
  }

  struct Drop {
    double rate;
    int operation, use;
    bool deep;
  };

  // The best drop of a value that lives through a slot: bytes over the budget taken away per cost.
  bool relieve(int slot, int tried) {
    candidates_.clear();
    for (int v = 0; v < graph_.values; ++v) {
      const int use = spans(v, slot);
      if (use < 0 || graph_.size[v] <= 0.0) continue;
      const int o = graph_.producer[v];
      candidates_.push_back({graph_.size[v] / (graph_.cost[o] + 1e-6 * unit_cost_), o, use, false});
    }
    const auto better = [](const Drop& a, const Drop& b) { return a.rate != b.rate ? a.rate > b.rate : a.use < b.use; };
    std::sort(candidates_.begin(), candidates_.end(), better);
    Drop best{0.0, -1, -1, false};
    int measured = 0;
    for (size_t k = 0; k < candidates_.size() && (measured < tried || best.operation < 0); ++k, ++measured) {
      for (bool deep : {false, true}) {
        Drop drop = candidates_[k];
        drop.deep = deep;
        drop.rate = measure(drop);
        if (drop.rate > best.rate) best = drop;
      }
    }
    if (best.operation < 0) return false;
    apply(best);
    sequence_.commit();
    return true;
  }

  bool apply(const Drop& drop) {
    chain_ = 0;
    const bool done = evaluate_before(drop.operation, drop.use, drop.deep ? Deep::kAlways : Deep::kWhenOver);
    if (done) drop_unused_before(drop.operation);
    return done;
  }

  double measure(const Drop& drop) {
    const double cost = sequence_.cost(), excess = sequence_.load().excess();
    sequence_.commit();
    const bool done = apply(drop);
    const double gained = excess - sequence_.load().excess(), paid = sequence_.cost() - cost;
    sequence_.undo();
    return done && gained > 0.0 ? gained / (std::max(paid, 0.0) + 1e-6 * unit_cost_) : 0.0;
  }

  const Graph& graph_;
  Options options_;
  Sequence sequence_;
  Random random_;
  Deadline deadline_;
  double unit_cost_ = 1.0, unit_bytes_ = 1.0, price_ = 1.0, temperature_ = 1.0, current_ = 0.0;
  int chain_ = 0, crowded_ = 0;
  int64_t accepted_ = 0;
  bool found_ = false;
  double best_cost_ = 0.0;
  std::vector<int32_t> best_;
  std::vector<Drop> candidates_;
};

}  // namespace recompute
