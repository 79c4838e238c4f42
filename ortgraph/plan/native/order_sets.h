// Search over sets of executed operations, by number of operations executed: a beam, and with unlimited width dynamic
// programming that proves optimality.
//
// Closure: an operation that is ready, adds nothing to the cut and whose step stays within the level that is allowed anyway
// is executed at once. Moving it to the front of any continuation raises no other step, since the cut is submodular and what
// can be written in place only grows, so no order is lost. Two ways to one set merge.
#pragma once

#include <unordered_map>

#include "order_graph.h"

namespace order {

class SetSearch {
   public:
    // Orders with a peak of `above` or more are of no use; steps of at most `level` (< above) cost nothing.
    // width: states kept per number of operations executed, 0 for all; bytes: memory that the states may take.
    SetSearch(const Graph& graph, int width, int64_t level, int64_t above, int64_t bytes)
        : g(graph), words_((g.operations + 63) / 64), width_(width), level_(level), above_(above), most_(bytes) {
        Random random{12345};
        for (int i = 0; i < g.operations; ++i) code_.push_back(random.next());
        allowed_.assign(words_, ~0ull);
        end_ = g.operations;
    }

    // Only the steps lower .. upper - 1 of an order are arranged anew; peaks are those of these steps.
    void window(const int* sequence, int lower, int upper) {
        prefix_.assign(sequence, sequence + lower);
        allowed_.assign(words_, 0);
        for (int t = lower; t < upper; ++t) set(allowed_, sequence[t]);
        begin_ = lower;
        end_ = upper;
    }

    // Whether an order below `above` was found.
    bool run(const Clock& clock) {
        State start;
        start.done.assign(words_, 0);
        start.ready.assign(words_, 0);
        for (int i = 0; i < g.operations; ++i)
            if (g.before.size(i) == 0 && has(allowed_, i)) set(start.ready, i);
        for (int i : prefix_) execute(start, i, change(start, i), 0);
        layers_.resize(end_ - begin_ + 1);
        close(start);
        enter(std::move(start));
        int64_t expanded = 0;
        for (int k = begin_; k < end_; ++k) {
            if (clock.over()) return give_up();
            Layer& layer = layers_[k - begin_];
            waiting_ -= static_cast<int64_t>(layer.states.size());
            std::vector<State> states = pick(layer);
            layer = Layer();
            if (level_ + 1 == above_ && !layers_.back().states.empty()) return true;  // None is better.
            for (State& state : states) {
                if ((++expanded & 31) == 0 && clock.over()) return give_up();
                if (used() > most_) return give_up();
                expand(state);
            }
        }
        return !layers_.back().states.empty();
    }

    // After a failed run: no order has a smaller peak; 0 when states were left out.
    int64_t proved() const { return complete_ ? next_ : 0; }
    int64_t peak() const { return layers_.back().states[0].peak; }
    // The first `upper` operations of it.
    void write(int* sequence) const {
        int node = layers_.back().states[0].last;
        for (int t = end_ - 1; t >= 0; --t, node = steps_[node].parent) sequence[t] = steps_[node].operation;
    }

   private:
    using Bits = std::vector<uint64_t>;
    struct State {
        Bits done, ready;
        int64_t live = 0, peak = 0, places = 0;  // places: sum of operation indices; ties follow the given order.
        uint64_t code = 0;
        int count = 0, last = -1;  // Operations executed; index in steps_.
    };
    struct Step {
        int parent, operation;
    };
    struct Layer {
        std::vector<State> states;
        std::unordered_multimap<uint64_t, int> found;
    };

    static void set(Bits& bits, int i) { bits[i >> 6] |= 1ull << (i & 63); }
    static void clear(Bits& bits, int i) { bits[i >> 6] &= ~(1ull << (i & 63)); }
    static bool has(const Bits& bits, int i) { return bits[i >> 6] >> (i & 63) & 1; }

    template <class Visit>
    void each(const Bits& bits, Visit visit) const {
        for (int w = 0; w < words_; ++w)
            for (uint64_t rest = bits[w]; rest; rest &= rest - 1) visit(64 * w + __builtin_ctzll(rest));
    }

    bool last_reader(const State& s, int v, int i) const {
        for (int r : row(g.readers, v))
            if (r != i && !has(s.done, r)) return false;
        return true;
    }
    int64_t change(const State& s, int i) const {
        int64_t bytes = g.made[i];
        for (int v : row(g.inputs, i))
            if (!g.kept[v] && last_reader(s, v, i)) bytes -= g.size[v];
        return bytes;
    }
    int64_t step(const State& s, int i) const {
        int64_t bytes = s.live + g.weight[i];
        if (g.has_pairs) bytes -= g.in_place(i, [&](int v) { return last_reader(s, v, i); });
        return bytes;
    }

    void execute(State& s, int i, int64_t change, int64_t bytes) {
        s.live += change;
        s.peak = std::max(s.peak, bytes);
        s.code ^= code_[i];
        s.places += i;
        ++s.count;
        set(s.done, i);
        clear(s.ready, i);
        for (int j : row(g.behind, i)) {
            bool ready = true;
            for (int p : row(g.before, j)) ready = ready && has(s.done, p);
            if (ready && has(allowed_, j)) set(s.ready, j);
        }
        steps_.push_back({s.last, i});
        s.last = static_cast<int>(steps_.size()) - 1;
    }

    void close(State& s) {
        const int64_t allowed = std::max(level_, s.peak);
        for (bool again = true; again;) {
            again = false;
            ready_.clear();
            each(s.ready, [&](int i) { ready_.push_back(i); });
            for (int i : ready_) {
                const int64_t bytes = step(s, i);
                if (bytes > allowed) continue;
                const int64_t more = change(s, i);
                if (more > 0) continue;
                execute(s, i, more, bytes);
                again = true;
            }
        }
    }

    void expand(const State& s) {
        std::vector<int> choices;
        each(s.ready, [&](int i) { choices.push_back(i); });
        for (int i : choices) {
            const int64_t bytes = step(s, i);
            if (bytes >= above_) {
                next_ = std::min(next_, bytes);
                continue;
            }
            const size_t mark = steps_.size();
            State next = s;
            execute(next, i, change(s, i), bytes);
            close(next);
            if (!enter(std::move(next))) steps_.resize(mark);
        }
    }

    // False when the set is known with as low a peak.
    bool enter(State&& s) {
        Layer& layer = layers_[s.count - begin_];
        const auto [first, last] = layer.found.equal_range(s.code);
        for (auto it = first; it != last; ++it) {
            State& other = layer.states[it->second];
            if (other.done != s.done) continue;
            if (other.peak <= s.peak) return false;
            other = std::move(s);
            return true;
        }
        layer.found.emplace(s.code, static_cast<int>(layer.states.size()));
        layer.states.push_back(std::move(s));
        ++waiting_;
        return true;
    }

    int64_t rank(const State& s) const { return s.live + std::max(level_, s.peak); }

    std::vector<State> pick(Layer& layer) {
        std::vector<State>& states = layer.states;
        if (width_ <= 0 || static_cast<int>(states.size()) <= width_) return std::move(states);
        complete_ = false;
        const auto better = [&](const State& a, const State& b) {
            const int64_t x = rank(a), y = rank(b);
            if (x != y) return x < y;
            return a.places != b.places ? a.places < b.places : a.code < b.code;
        };
        std::nth_element(states.begin(), states.begin() + width_, states.end(), better);
        states.erase(states.begin() + width_, states.end());
        return std::move(states);
    }

    int64_t used() const { return waiting_ * (16 * words_ + 200) + static_cast<int64_t>(steps_.size() * sizeof(Step)); }

    bool give_up() {
        complete_ = false;
        return false;
    }

    const Graph& g;
    int words_, width_, begin_ = 0, end_ = 0;
    std::vector<int> prefix_;
    Bits allowed_;
    int64_t level_, above_, most_;
    int64_t next_ = INT64_MAX;  // Least step that was refused.
    int64_t waiting_ = 0;       // States in layers_.
    bool complete_ = true;
    std::vector<uint64_t> code_;
    std::vector<Step> steps_;
    std::vector<Layer> layers_;
    std::vector<int> ready_;
};

}  // namespace order
