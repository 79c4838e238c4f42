// One pass over an order under a hard budget: when bytes are short, values are dropped and evaluated again on demand.
#pragma once

#include <cmath>
#include <limits>

#include "recompute_clock.h"
#include "recompute_sequence.h"

namespace recompute {

// In the spirit of dynamic tensor rematerialization (Kirisame et al., 2021), but with the uses to come known: the value
// dropped is the one whose evaluation, with whatever it needs that is gone, costs least per byte and step until its next use.
class Eviction {
 public:
  Eviction(const Graph& graph, double budget, double patience, double seconds)
      : graph_(graph), deadline_(seconds), budget_(budget), patience_(patience), live_(graph.values, 0), locked_(graph.values, 0),
        closed_(graph.operations, 0), done_(graph.operations, 0), seen_(graph.operations, 0), cursor_(graph.values, 0), wanted_(graph.values, 0),
        uses_(graph.values), readers_(graph.values) {
    for (int i = 0; i < graph.operations; ++i)
      for (int v : graph.in(i)) readers_[v].push_back(i);
  }

  std::vector<int32_t> run(const std::vector<int32_t>& order, size_t longest) {
    const int count = static_cast<int>(order.size());
    for (int t = 0; t < count; ++t)
      for (int v : graph_.in(order[t])) uses_[v].push_back(t);
    for (int v = 0; v < graph_.values; ++v)
      if (graph_.kept[v]) uses_[v].push_back(count);
    longest_ = longest;
    for (now_ = 0; now_ < count && !failed_; ++now_) {
      const int o = order[now_];
      keep_closing(o);
      evaluate(o, 0);
      for (int v : kept_back_) --locked_[v];
    }
    now_ = count;
    for (int v = 0; v < graph_.values; ++v)
      if (graph_.kept[v] && !live_[v] && !failed_) evaluate(graph_.producer[v], 0);
    return steps_;
  }

  // Something had to be evaluated again that must not be, or the sequence grew too long, or time was up.
  bool failed() const { return failed_; }

 private:
  static constexpr int kDeepest = 2000;
  static constexpr int kCounted = 256;  // operations looked at for the price of one value

  bool may_repeat(int o) const { return graph_.repeatable[o] && !closed_[o]; }

  // Values that are gone, wanted later, and cannot be evaluated once operation o has run come back before it.
  void keep_closing(int o) {
    kept_back_.clear();
    if (!graph_.after.size(o)) return;
    look_ahead();
    for (const int32_t* a = graph_.after.begin(o); a != graph_.after.end(o); ++a) {
      for (int v : graph_.out(*a)) {
        if (wanted_[v] == kNever) continue;
        if (!live_[v]) evaluate(*a, 0);
        ++locked_[v];
        kept_back_.push_back(v);
      }
    }
  }

  void evaluate(int o, int depth) {
    failed_ |= steps_.size() >= longest_ || depth >= kDeepest || (done_[o] && !may_repeat(o));
    if (failed_) return;
    done_[o] = 1;
    for (int v : graph_.in(o)) {
      ++locked_[v];
      if (!live_[v]) evaluate(graph_.producer[v], depth + 1);
    }
    double needed = graph_.scratch[o];
    for (int v : graph_.out(o))
      if (!live_[v]) needed += graph_.size[v];
    while (bytes_ + needed > budget_ && evict()) {
    }
    for (int v : graph_.out(o)) {
      if (!live_[v]) bytes_ += graph_.size[v];
      live_[v] = 1;
    }
    steps_.push_back(o);
    for (int v : graph_.in(o)) --locked_[v];
    for (const int32_t* a = graph_.after.begin(o); a != graph_.after.end(o); ++a) closed_[*a] = 1;
  }

  static constexpr int kNever = std::numeric_limits<int>::max();

  // When each value is wanted next: by an operation to come, or to evaluate a dropped value that is wanted.
  void look_ahead() {
    for (int i = graph_.operations - 1; i >= 0; --i) {
      for (int v : graph_.out(i)) {
        const std::vector<int32_t>& uses = uses_[v];
        while (cursor_[v] < uses.size() && uses[cursor_[v]] < now_) ++cursor_[v];
        int next = cursor_[v] < uses.size() ? uses[cursor_[v]] : kNever;
        for (int r : readers_[v])
          for (int w : graph_.out(r))
            if (!live_[w]) next = std::min(next, wanted_[w]);
        wanted_[v] = next;
      }
    }
  }

  bool evict() {
    failed_ |= deadline_.passed();
    look_ahead();
    int chosen = -1;
    double lowest = std::numeric_limits<double>::infinity();
    for (int v = 0; v < graph_.values; ++v) {
      if (!live_[v] || locked_[v] || graph_.size[v] <= 0.0) continue;
      double cost = 0.0;
      if (wanted_[v] == kNever) {
        chosen = v;
        break;
      }
      if (!price(graph_.producer[v], cost)) continue;
      const double score = (cost + 1e-9) / (graph_.size[v] * std::pow(wanted_[v] - now_ + 1.0, patience_));
      if (score < lowest) lowest = score, chosen = v;
    }
    if (chosen < 0) return false;
    live_[chosen] = 0;
    bytes_ -= graph_.size[chosen];
    return true;
  }

  // Cost of an operation and of what it needs that is gone; false where that cannot be evaluated again.
  bool price(int o, double& cost) {
    ++stamp_;
    stack_.assign(1, o);
    seen_[o] = stamp_;
    int counted = 0;
    while (!stack_.empty()) {
      const int i = stack_.back();
      stack_.pop_back();
      if (!may_repeat(i)) return false;
      cost += graph_.cost[i];
      if (++counted > kCounted) return true;
      for (int v : graph_.in(i)) {
        const int made = graph_.producer[v];
        if (live_[v] || seen_[made] == stamp_) continue;
        seen_[made] = stamp_;
        stack_.push_back(made);
      }
    }
    return true;
  }

  const Graph& graph_;
  Deadline deadline_;
  double budget_, patience_, bytes_ = 0.0;
  int now_ = 0, stamp_ = 0;
  size_t longest_ = 0;
  std::vector<uint8_t> live_;
  std::vector<int32_t> locked_;
  std::vector<uint8_t> closed_, done_;
  bool failed_ = false;
  std::vector<int32_t> seen_, stack_, steps_, kept_back_;
  std::vector<size_t> cursor_;
  std::vector<int> wanted_;  // kNever: neither used again nor needed for anything dropped
  std::vector<std::vector<int32_t>> uses_, readers_;
};

}  // namespace recompute
