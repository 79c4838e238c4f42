// A sequence of evaluations with repeats that can be edited in place, its live bytes and its cost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "recompute_load.h"

namespace recompute {

// Lists of lists in one array.
struct Lists {
  const int32_t* start;
  const int32_t* items;
  const int32_t* begin(int i) const { return items + start[i]; }
  const int32_t* end(int i) const { return items + start[i + 1]; }
  int size(int i) const { return start[i + 1] - start[i]; }
};

struct Span {
  const int32_t *first, *last;
  const int32_t* begin() const { return first; }
  const int32_t* end() const { return last; }
};

struct Graph {
  int operations, values;
  const double *cost, *scratch;  // by operation
  const uint8_t* repeatable;
  Lists inputs, outputs;
  Lists after, followers;  // operations that must all come before / after
  Lists inplace;           // pairs (value read, value made), flattened
  const double* size;      // by value
  const uint8_t* kept;
  const int32_t* producer;

  Span in(int i) const { return {inputs.begin(i), inputs.end(i)}; }
  Span out(int i) const { return {outputs.begin(i), outputs.end(i)}; }
};

class Sequence {
 public:
  using Slots = std::vector<int32_t>;

  explicit Sequence(const Graph& graph) : graph_(graph) {}

  // Lays a sequence out with empty slots between its steps.
  void build(const std::vector<int32_t>& steps, double budget) {
    const int capacity = static_cast<int>(steps.size() + 1) * kSpacing;
    load_.reset(capacity, budget);
    operation_.assign(load_.slots(), -1);
    saved_.assign(load_.slots(), 0.0);
    places_.assign(graph_.operations, {});
    uses_.assign(graph_.values, {});
    for (int v = 0; v < graph_.values; ++v)
      if (graph_.kept[v]) uses_[v].push_back(end());
    cost_ = 0.0;
    steps_ = 0;
    repeats_.clear();
    repeat_at_.assign(graph_.operations, -1);
    log_.clear();
    for (size_t t = 0; t < steps.size(); ++t) place(steps[t], static_cast<int>(t + 1) * kSpacing - 1);
    log_.clear();
  }

  std::vector<int32_t> steps() const {
    std::vector<int32_t> found;
    found.reserve(steps_);
    for (int32_t o : operation_)
      if (o >= 0) found.push_back(o);
    return found;
  }

  const Graph& graph() const { return graph_; }
  Load& load() { return load_; }
  double cost() const { return cost_; }
  int length() const { return steps_; }
  int end() const { return load_.slots(); }
  int operation(int slot) const { return operation_[slot]; }
  const Slots& places(int o) const { return places_[o]; }
  const Slots& uses(int v) const { return uses_[v]; }
  // Operations evaluated more than once.
  const std::vector<int32_t>& repeated() const { return repeats_; }
  void set_budget(double budget) { load_.set_budget(budget); }

  // Last evaluation of an operation before a slot, -1 without one.
  int before(int o, int slot) const {
    const Slots& p = places_[o];
    const auto it = std::lower_bound(p.begin(), p.end(), slot);
    return it == p.begin() ? -1 : *(it - 1);
  }

  // First evaluation of an operation after a slot, the end without one (past it, so that kept values are used).
  int next(int o, int slot) const {
    const Slots& p = places_[o];
    const auto it = std::upper_bound(p.begin(), p.end(), slot);
    return it == p.end() ? end() + 1 : *it;
  }

  // Last use of a value after an evaluation and before a slot; the evaluation where there is none.
  int last_use(int v, int evaluation, int slot) const {
    const Slots& u = uses_[v];
    const auto it = std::lower_bound(u.begin(), u.end(), slot);
    return it == u.begin() || *(it - 1) < evaluation ? evaluation : *(it - 1);
  }

  // First use of a value after a slot, past the end without one.
  int next_use(int v, int slot) const {
    const Slots& u = uses_[v];
    const auto it = std::upper_bound(u.begin(), u.end(), slot);
    return it == u.end() ? end() + 1 : *it;
  }

  // Nothing reads what the evaluation in a slot makes.
  bool useless(int slot) const {
    const int o = operation_[slot], stop = next(o, slot);
    for (int v : graph_.out(o))
      if (last_use(v, slot, stop) != slot) return false;
    return true;
  }

  // An empty slot before a filled one (or before the end) with no step between them; -1 without one.
  int room_before(int slot) const {
    int low = slot - 1;
    while (low >= 0 && operation_[low] < 0) --low;
    return slot - low > 1 ? low + (slot - low) / 2 : -1;
  }

  // Evaluates an operation in an empty slot.
  void place(int o, int slot) {
    touched_.clear();
    for (int v : graph_.in(o)) {
      const int made = before(graph_.producer[v], slot);
      if (made >= 0) {
        const int dies = last_use(v, made, next(graph_.producer[v], slot));
        if (dies < slot) {
          load_.add(dies + 1, slot, graph_.size[v]);
          touched_.push_back(dies);
        }
      }
      insert(uses_[v], slot);
    }
    const int previous = before(o, slot), following = next(o, slot);
    for (int v : graph_.out(o)) {
      const int dies = last_use(v, slot, following);
      if (previous < 0 || dies == slot) {
        load_.add(slot, std::min(dies, end() - 1), graph_.size[v]);
        touched_.push_back(dies);
        continue;
      }
      const int used = last_use(v, previous, slot);
      load_.add(used + 1, slot - 1, -graph_.size[v]);
      touched_.push_back(used);
      touched_.push_back(dies);
    }
    insert(places_[o], slot);
    operation_[slot] = o;
    ++steps_;
    cost_ += graph_.cost[o];
    load_.add(slot, slot, Load::kAbsent + graph_.scratch[o]);
    touched_.push_back(slot);
    refresh_touched();
    if (places_[o].size() == 2) note_repeated(o);
    log_.push_back({o, slot, true});
  }

  // Takes the evaluation in a slot out.
  void erase(int slot) {
    touched_.clear();
    const int o = operation_[slot];
    load_.add(slot, slot, saved_[slot] - Load::kAbsent - graph_.scratch[o]);
    saved_[slot] = 0.0;
    operation_[slot] = -1;
    --steps_;
    cost_ -= graph_.cost[o];
    remove(places_[o], slot);
    const int previous = before(o, slot), following = next(o, slot);
    for (int v : graph_.out(o)) {
      const int dies = last_use(v, slot, following);
      touched_.push_back(dies);
      if (previous < 0 || dies == slot) {
        load_.add(slot, std::min(dies, end() - 1), -graph_.size[v]);
        continue;
      }
      const int used = last_use(v, previous, slot);
      load_.add(used + 1, slot - 1, graph_.size[v]);
      touched_.push_back(used);
    }
    for (int v : graph_.in(o)) {
      remove(uses_[v], slot);
      const int made = before(graph_.producer[v], slot);
      if (made < 0) continue;
      const int dies = last_use(v, made, next(graph_.producer[v], slot));
      if (dies < slot) {
        load_.add(dies + 1, slot, -graph_.size[v]);
        touched_.push_back(dies);
      }
    }
    refresh_touched();
    if (places_[o].size() == 1) forget_repeated(o);
    log_.push_back({o, slot, false});
  }

  // Edits since the last commit can be taken back.
  void commit() { log_.clear(); }
  size_t edits() const { return log_.size(); }
  void undo(size_t keep = 0) {
    while (log_.size() > keep) {
      const Edit edit = log_.back();
      log_.pop_back();
      if (edit.placed) erase(edit.slot);
      else place(edit.operation, edit.slot);
      log_.pop_back();
    }
  }

 private:
  static constexpr int kSpacing = 3;

  struct Edit {
    int operation, slot;
    bool placed;
  };

  static void insert(Slots& list, int slot) { list.insert(std::lower_bound(list.begin(), list.end(), slot), slot); }
  static void remove(Slots& list, int slot) { list.erase(std::lower_bound(list.begin(), list.end(), slot)); }

  // In-place results count once: bytes saved at a step depend on which of its inputs die there.
  void refresh_touched() {
    for (int slot : touched_)
      if (slot < end() && operation_[slot] >= 0 && graph_.inplace.size(operation_[slot])) refresh(slot);
  }

  void refresh(int slot) {
    const int o = operation_[slot];
    const int32_t *pair = graph_.inplace.begin(o), *stop = graph_.inplace.end(o);
    double saved = 0.0;
    for (const int32_t* p = pair; p != stop; p += 2) {
      bool taken = false;
      for (const int32_t* q = pair; q != p; q += 2) taken |= (q[0] == p[0] || q[1] == p[1]) && counted(slot, q);
      if (!taken && dies_at(p[0], slot)) saved += graph_.size[p[1]];
    }
    load_.add(slot, slot, saved_[slot] - saved);
    saved_[slot] = saved;
  }

  // Pairs are few; those before one in the list that count are found anew.
  bool counted(int slot, const int32_t* pair) const {
    const int32_t* first = graph_.inplace.begin(operation_[slot]);
    for (const int32_t* q = first; q != pair; q += 2)
      if ((q[0] == pair[0] || q[1] == pair[1]) && counted(slot, q)) return false;
    return dies_at(pair[0], slot);
  }

  bool dies_at(int v, int slot) const {
    const int made = before(graph_.producer[v], slot);
    return made >= 0 && last_use(v, made, next(graph_.producer[v], slot)) == slot;
  }

  void note_repeated(int o) {
    repeat_at_[o] = static_cast<int32_t>(repeats_.size());
    repeats_.push_back(o);
  }

  void forget_repeated(int o) {
    const int32_t at = repeat_at_[o], moved = repeats_.back();
    repeats_[at] = moved;
    repeat_at_[moved] = at;
    repeats_.pop_back();
    repeat_at_[o] = -1;
  }

  const Graph& graph_;
  Load load_;
  double cost_ = 0.0;
  int steps_ = 0;
  std::vector<int32_t> operation_;  // by slot, -1 where empty
  std::vector<double> saved_;       // in-place bytes by slot
  std::vector<Slots> places_;       // slots of the evaluations of each operation, ascending
  std::vector<Slots> uses_;         // slots of the readers of each value, ascending
  std::vector<int32_t> repeats_, repeat_at_, touched_;
  std::vector<Edit> log_;
};

}  // namespace recompute
