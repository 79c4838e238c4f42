// Simulated annealing over orders: one operation moves to another place between its predecessors and successors. What is
// annealed is not the peak but the bytes above a target, summed over steps, so that a plateau at the peak has a slope; the
// target follows the best order found. Steps shifted by a move are re-evaluated in place: windows are short, and plain
// loops over contiguous int64 beat a tree here.
#pragma once

#include <cmath>
#include <memory>

#include "order_windows.h"

namespace order {

class Annealer {
   public:
    Annealer(const Graph& graph, const int* sequence, uint64_t seed)
        : g(graph), at_(graph.operations), weight_(graph.weight), random_{seed} {
        restart({sequence, sequence + g.operations});
        overwriters_.resize(g.has_pairs ? g.values : 0);
        for (int i = 0; g.has_pairs && i < g.operations; ++i)
            for (const int* p = g.pairs.begin(i); p != g.pairs.end(i); p += 2) overwriters_[p[0]].push_back(i);
    }

    // Goes on from another order.
    void restart(const std::vector<int>& sequence) {
        order_ = best_ = sequence;
        reset();
        best_peak_ = peak();
    }

    const std::vector<int>& best() const { return best_; }
    int64_t best_peak() const { return best_peak_; }

    // From the best order, cooling over so many tries. False when the deadline or the bound came first.
    bool round(int64_t tries, double hot, double cold, double below, int64_t bound, const Clock& clock) {
        if (best_peak_ <= bound) return false;
        order_ = best_;
        reset();
        below_ = below;
        aim(bound);
        for (int64_t k = 0; k < tries; ++k) {
            if ((k & 255) == 0) {
                if (clock.over()) return false;
                temperature_ = hot * std::pow(cold / hot, static_cast<double>(k) / tries);
                focus();
            }
            if (attempt() && excess_ == 0) {
                best_ = order_;
                best_peak_ = peak();
                if (best_peak_ <= bound) return false;
                aim(bound);
            }
        }
        return true;
    }

   private:
    static constexpr int kNear = 20;  // Steps on either side of a hot one.

    // Bytes over the target of a step.
    int64_t over(int64_t bytes) const { return std::max<int64_t>(bytes - target_, 0); }
    int64_t peak() const { return *std::max_element(step_.begin(), step_.end()); }

    void aim(int64_t bound) {
        const auto lower = static_cast<int64_t>(best_peak_ * (1.0 - below_));
        target_ = std::max(std::min(lower, best_peak_ - 1), bound);
        excess_ = 0;
        for (int64_t bytes : step_) excess_ += over(bytes);
    }

    void reset() {
        const int n = g.operations;
        step_.resize(n);
        Walk walk(g);
        for (int t = 0; t < n; ++t) {
            const int i = order_[t];
            at_[i] = t;
            step_[t] = walk.step(i);
            weight_[i] = step_[t] - walk.live;
            walk.execute(i);
        }
    }

    // Position of the last reader of v besides i; what keeps v alive when i is gone.
    int last_other(int v, int i) const {
        int last = -1;
        for (int r : row(g.readers, v))
            if (r != i) last = std::max(last, at_[r]);
        return last;
    }

    bool attempt() {
        const int n = g.operations;
        int x;
        const int kind = random_.below(100);
        if (kind < 40 && hot_step_ >= 0)
            x = order_[std::min(std::max(hot_step_ + random_.below(2 * kNear + 1) - kNear, 0), n - 1)];
        else if (kind < 60 && !candidates_.empty())
            x = candidates_[random_.below(static_cast<int>(candidates_.size()))];
        else
            x = random_.below(n);
        const int from = at_[x];
        int lower = -1, upper = n;
        for (int p : row(g.before, x)) lower = std::max(lower, at_[p]);
        for (int s : row(g.behind, x)) upper = std::min(upper, at_[s]);
        const int room = upper - lower - 2;
        if (room <= 0) return false;
        int to = lower + 1 + random_.below(room);
        if (to >= from) ++to;
        return to > from ? try_later(x, from, to) : try_earlier(x, from, to);
    }

    // A step over the target, and the operations whose move could relieve it: makers and last readers of what lives there.
    void focus() {
        const int n = g.operations;
        hot_step_ = -1;
        int seen = 0;
        for (int t = 0; t < n; ++t)
            if (step_[t] > target_ && random_.below(++seen) == 0) hot_step_ = t;
        candidates_.clear();
        if (hot_step_ < 0) return;
        for (int v = 0; v < g.values; ++v) {
            const int made = at_[g.producer[v]];
            if (made > hot_step_) continue;
            const int last = last_other(v, -1);
            if (last < hot_step_ && !g.kept[v]) continue;
            candidates_.push_back(g.producer[v]);
            if (last >= 0 && !g.kept[v]) candidates_.push_back(order_[last]);
        }
    }

    struct Edge {
        int at;
        int64_t bytes;
    };
    struct Change {
        int operation;
        int64_t weight;
    };

    bool accept(int64_t gain) {
        if (gain <= 0) return true;
        return random_.unit() < std::exp(-static_cast<double>(gain) / temperature_);
    }

    // Operations at from + 1 .. to come one step earlier, then x.
    bool try_later(int x, int from, int to) {
        edges_.clear();
        for (int v : row(g.inputs, x)) {
            if (g.kept[v]) continue;
            const int last = std::max(last_other(v, x), from);
            if (last <= to) edges_.push_back({last, g.size[v]});
        }
        sort_edges();
        int64_t shift = -g.made[x], gain = 0;
        const int64_t* s = step_.data();
        size_t e = 0;
        // Operation at p loses x's outputs, and carries inputs whose other readers are all before it.
        for (int p = from + 1; p <= to;) {
            while (e < edges_.size() && edges_[e].at < p) shift += edges_[e++].bytes;
            const int end = e < edges_.size() ? std::min(edges_[e].at, to) : to;
            int64_t sum = 0;
            const int64_t level = target_ - shift;
            for (int q = p; q <= end; ++q)
                sum += std::max<int64_t>(s[q] - level, 0) - std::max<int64_t>(s[q] - target_, 0);
            gain += sum;
            p = end + 1;
        }
        while (e < edges_.size()) shift += edges_[e++].bytes;  // Last reader at `to`: kept alive for x.
        // Bytes live after operation `to` without x, then x.
        const int64_t weight = g.has_pairs ? weigh(x, [&](int r) { return at_[r] <= to; }) : weight_[x];
        const int64_t mine = after(to) + shift + weight;
        gain += over(mine) - over(s[from]);
        if (g.has_pairs) gain += overwrite(x, from + 1, to, -g.made[x], 1);
        if (!accept(gain)) return false;
        shift = -g.made[x];
        e = 0;
        for (int q = from + 1; q <= to; ++q) {
            while (e < edges_.size() && edges_[e].at < q) shift += edges_[e++].bytes;
            step_[q - 1] = step_[q] + shift;
            order_[q - 1] = order_[q];
            at_[order_[q]] = q - 1;
        }
        settle(x, to, mine, weight, gain);
        return true;
    }

    bool try_earlier(int x, int from, int to) {
        edges_.clear();
        int64_t shift = g.made[x], gain = 0;
        for (int v : row(g.inputs, x)) {
            if (g.kept[v]) continue;
            const int last = last_other(v, x);
            if (last < to)
                shift -= g.size[v];
            else if (last < from)
                edges_.push_back({last, g.size[v]});
        }
        const int64_t weight = g.has_pairs ? weigh(x, [&](int r) { return at_[r] < to; }) : weight_[x];
        const int64_t mine = before(to) + weight;
        sort_edges();
        const int64_t* s = step_.data();
        const int64_t first = shift;
        size_t e = 0;
        for (int p = to; p < from;) {
            while (e < edges_.size() && edges_[e].at < p) shift -= edges_[e++].bytes;
            const int end = e < edges_.size() ? std::min(edges_[e].at, from - 1) : from - 1;
            int64_t sum = 0;
            const int64_t level = target_ - shift;
            for (int q = p; q <= end; ++q)
                sum += std::max<int64_t>(s[q] - level, 0) - std::max<int64_t>(s[q] - target_, 0);
            gain += sum;
            p = end + 1;
        }
        gain += over(mine) - over(s[from]);
        if (g.has_pairs) gain += overwrite(x, to, from - 1, first, -1);
        if (!accept(gain)) return false;
        shift = first;
        // Backwards, since steps move up.
        for (const Edge& edge : edges_) shift -= edge.bytes;
        e = edges_.size();
        for (int q = from - 1; q >= to; --q) {
            while (e > 0 && edges_[e - 1].at >= q) shift += edges_[--e].bytes;
            step_[q + 1] = step_[q] + shift;
            order_[q + 1] = order_[q];
            at_[order_[q]] = q + 1;
        }
        settle(x, to, mine, weight, gain);
        return true;
    }

    void settle(int x, int to, int64_t bytes, int64_t weight, int64_t gain) {
        step_[to] = bytes;
        order_[to] = x;
        at_[x] = to;
        excess_ += gain;
        if (!g.has_pairs) return;
        weight_[x] = weight;
        for (const Change& c : changes_) {
            step_[at_[c.operation]] += c.weight - weight_[c.operation];
            weight_[c.operation] = c.weight;
        }
    }

    // Weight of operation i when earlier(r) says which of the other operations run before it.
    template <class Earlier>
    int64_t weigh(int i, Earlier earlier) const {
        return g.weight[i] - g.in_place(i, [&](int v) {
            for (int r : row(g.readers, v))
                if (r != i && !earlier(r)) return false;
            return true;
        });
    }

    // Operations at lower .. upper that x passes may gain or lose an overwrite of what x reads: notes their new weights,
    // returns what that adds to the excess. shift and edges_ are those of the move, edges_ counting in direction sign.
    int64_t overwrite(int x, int lower, int upper, int64_t shift, int sign) {
        changes_.clear();
        int64_t gain = 0;
        for (int v : row(g.inputs, x)) {
            for (int y : overwriters_[v]) {
                if (y == x || at_[y] < lower || at_[y] > upper) continue;
                const auto same = [&](const Change& c) { return c.operation == y; };
                if (std::any_of(changes_.begin(), changes_.end(), same)) continue;
                const bool later = sign > 0;
                const int64_t weight = weigh(y, [&](int r) { return r == x ? !later : at_[r] < at_[y]; });
                if (weight == weight_[y]) continue;
                int64_t bytes = step_[at_[y]] + shift;
                for (const Edge& edge : edges_)
                    if (edge.at < at_[y]) bytes += sign * edge.bytes;
                changes_.push_back({y, weight});
                gain += over(bytes + weight - weight_[y]) - over(bytes);
            }
        }
        return gain;
    }

    // Cut before the step at position t.
    int64_t before(int t) const { return step_[t] - weight_[order_[t]]; }
    // Cut after it.
    int64_t after(int t) const {
        if (t + 1 < g.operations) return before(t + 1);
        int64_t bytes = 0;
        for (int v = 0; v < g.values; ++v)
            if (g.kept[v]) bytes += g.size[v];
        return bytes;
    }

    void sort_edges() {
        for (size_t a = 1; a < edges_.size(); ++a)
            for (size_t b = a; b > 0 && edges_[b].at < edges_[b - 1].at; --b) std::swap(edges_[b], edges_[b - 1]);
    }

    const Graph& g;
    std::vector<int> order_, at_, best_;
    std::vector<int64_t> step_, weight_;
    std::vector<Edge> edges_;
    std::vector<Change> changes_;
    std::vector<std::vector<int>> overwriters_;  // By value: operations that may write over it.
    Random random_;
    std::vector<int> candidates_;
    int hot_step_ = -1;
    int64_t target_ = 0, excess_ = 0, best_peak_ = 0;
    double temperature_ = 1.0, below_ = 0.0;
};

// Several starts, halved after every two rounds by what they reached; the last one goes on until it is idle for some rounds,
// then all start again from other random numbers, until `patience` such epochs gave nothing better. Between rounds, windows
// around the peak are rearranged. The best order replaces the first; returns its peak.
inline int64_t anneal(
    const Graph& g, int* sequences, int count, const Clock& clock, int64_t bound, int patience, uint64_t seed) {
    struct Setting {
        double hot, below;  // Temperature as a share of the mean size; target below the best peak.
    };
    static constexpr Setting kSettings[] = {{3, 0.01}, {0.3, 0.003}, {1, 0.003}, {3, 0.003}, {1, 0.01}, {0.3, 0.01}};
    static constexpr int kIdle = 6, kWindows = 25;
    const int n = g.operations;
    double mean = 1.0;
    for (int v = 0; v < g.values; ++v) mean += static_cast<double>(g.size[v]) / g.values;
    const int64_t most = std::min<int64_t>(500000, 500000000 / (n + 1));
    std::vector<int> best;
    int64_t best_peak = INT64_MAX;
    using Start = std::unique_ptr<Annealer>;
    const auto better = [](const Start& a, const Start& b) { return a->best_peak() < b->best_peak(); };
    for (int epoch = 0, in_vain = 0; in_vain < patience; ++epoch) {
        Random random{seed + epoch};
        std::vector<Start> pool;
        for (int k = 0; k < count; ++k)
            pool.push_back(std::make_unique<Annealer>(g, sequences + static_cast<size_t>(k) * n, random.next()));
        bool more = true;
        for (int k = 0, idle = 0; more && idle < kIdle; ++k) {
            const int64_t before = pool[0]->best_peak(), tries = most / static_cast<int64_t>(pool.size());
            const Setting& s = kSettings[(k + epoch) % 6];
            for (Start& a : pool) {
                more = more && a->round(tries, s.hot * mean, 0.03 * mean, s.below, bound, clock);
                if (!more || k % 2 == 0) continue;
                std::vector<int> sequence = a->best();
                rearrange(g, sequence, kWindows, bound, clock, random);
                a->restart(sequence);
            }
            if (k % 2 == 1) {
                std::stable_sort(pool.begin(), pool.end(), better);
                pool.erase(pool.begin() + (pool.size() + 1) / 2, pool.end());
            }
            idle = pool.size() == 1 && pool[0]->best_peak() == before ? idle + 1 : 0;
        }
        const Annealer& winner = **std::min_element(pool.begin(), pool.end(), better);
        ++in_vain;
        if (winner.best_peak() < best_peak) {
            best = winner.best();
            best_peak = winner.best_peak();
            in_vain = 0;
        }
        if (!more || best_peak <= bound) break;
    }
    std::copy(best.begin(), best.end(), sequences);
    return best_peak;
}

}  // namespace order
