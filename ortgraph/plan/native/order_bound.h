// Min-cut lower bound on the peak of every order.
//
// When v runs, the set X executed before it is closed under predecessors, holds every ancestor of v, and neither v nor a
// descendant. The step costs cut(X) + weight(v) - in place, so the least of this over all such X bounds every order from
// below. cut(X) is the capacity of an s-t cut (operation -> its value: size; value -> its readers, operation -> its
// predecessors: infinite; kept value -> sink: infinite), hence one max-flow per operation.
//
// In place: a value r written over s saves size(r), when s dies with v, that is when its other readers are all in X. Where v
// has one pair for r and s, and these in no other pair, size(r) [not all other readers of s in X] is one more hyperedge of the
// cut and size(r) comes off as a constant: exact. Else what the pairs save when every input dies that can comes off: the more
// inputs die, the more is saved, so that is the most, and the term still a bound.
#pragma once

#include <deque>

#include "order_graph.h"

namespace order {

// Dinic's algorithm.
class Flow {
   public:
    static constexpr int64_t kInfinite = INT64_MAX / 4;

    void reset(int nodes) {
        head_.assign(nodes, -1);
        arcs_.clear();
    }
    void arc(int from, int to, int64_t capacity) {
        arcs_.push_back({to, head_[from], capacity});
        head_[from] = static_cast<int>(arcs_.size()) - 1;
        arcs_.push_back({from, head_[to], 0});
        head_[to] = static_cast<int>(arcs_.size()) - 1;
    }
    // Largest flow, or a value of at least `enough` when that is passed; -1 when the deadline came first.
    int64_t run(int source, int sink, const Clock& clock) {
        int64_t total = 0;
        while (levels(source, sink)) {
            if (clock.over()) return -1;
            next_ = head_;
            total += push(source, sink);
        }
        return total;
    }
    // After run(): on the source side of the smallest least cut.
    bool on_source_side(int node) const { return level_[node] >= 0; }

   private:
    struct Arc {
        int to, next;
        int64_t left;
    };

    bool levels(int source, int sink) {
        level_.assign(head_.size(), -1);
        queue_.clear();
        queue_.push_back(source);
        level_[source] = 0;
        for (size_t k = 0; k < queue_.size(); ++k) {
            const int node = queue_[k];
            for (int a = head_[node]; a >= 0; a = arcs_[a].next) {
                if (arcs_[a].left <= 0 || level_[arcs_[a].to] >= 0) continue;
                level_[arcs_[a].to] = level_[node] + 1;
                queue_.push_back(arcs_[a].to);
            }
        }
        return level_[sink] >= 0;
    }

    // One blocking flow, without recursion: paths in graphs of thousands of operations are long.
    int64_t push(int source, int sink) {
        int64_t total = 0;
        path_.clear();
        int node = source;
        while (true) {
            if (node == sink) {
                int64_t amount = kInfinite;
                for (int a : path_) amount = std::min(amount, arcs_[a].left);
                size_t cut = path_.size();
                for (size_t k = path_.size(); k-- > 0;) {
                    arcs_[path_[k]].left -= amount;
                    arcs_[path_[k] ^ 1].left += amount;
                    if (arcs_[path_[k]].left == 0) cut = k;
                }
                total += amount;
                node = arcs_[path_[cut] ^ 1].to;
                path_.resize(cut);
                continue;
            }
            int& a = next_[node];
            while (a >= 0 && (arcs_[a].left <= 0 || level_[arcs_[a].to] != level_[node] + 1)) a = arcs_[a].next;
            if (a >= 0) {
                path_.push_back(a);
                node = arcs_[a].to;
                continue;
            }
            if (path_.empty()) return total;
            level_[node] = -2;  // Dead end.
            node = arcs_[path_.back() ^ 1].to;
            path_.pop_back();
        }
    }

    std::vector<int> head_, next_, level_, queue_, path_;
    std::vector<Arc> arcs_;
};

class Bound {
   public:
    explicit Bound(const Graph& graph) : g(graph), side_(graph.operations), node_(graph.operations) {
        for (int v = 0; v < g.values; ++v)
            if (g.kept[v]) bound_ += g.size[v];
        // What one operation touches: the weakest form of its term, and free.
        for (int i = 0; i < g.operations; ++i) {
            int64_t touched = g.weight[i] - g.in_place(i, [](int) { return true; });
            for (int v : row(g.inputs, i)) touched += g.size[v];
            bound_ = std::max(bound_, touched);
        }
    }

    // Steps of any order: no operation's term exceeds the bytes of its step in any of them.
    void know(const int* sequence) {
        Walk walk(g);
        if (above_.empty()) above_.assign(g.operations, INT64_MAX);
        for (int t = 0; t < g.operations; ++t) {
            const int i = sequence[t];
            above_[i] = std::min(above_[i], walk.step(i));
            walk.execute(i);
        }
        peak_ = std::min(peak_, walk.peak);
    }

    // Raises the bound until it meets the best peak known, no term can raise it, or time is over (false).
    bool solve(const Clock& clock) {
        std::vector<int> rank(g.operations);
        for (int i = 0; i < g.operations; ++i) rank[i] = i;
        // Terms shrink as cuts become known, so the next candidate is looked for each time.
        std::vector<char> done(g.operations, 0);
        while (bound_ < peak_) {
            int v = -1;
            for (int i = 0; i < g.operations; ++i)
                if (!done[i] && above_[i] > bound_ && (v < 0 || above_[i] > above_[v])) v = i;
            if (v < 0) return true;
            if (clock.over()) return false;
            done[v] = 1;
            const int64_t found = term(v, clock);
            if (found < 0) return false;
            bound_ = std::max(bound_, found);
            ++flows_;
        }
        return true;
    }

    int64_t bound() const { return bound_; }
    int flows() const { return flows_; }

   private:
    enum Side : char { kFree, kBefore, kAfter };

    void spread(int v, const Rows& edges, Side side) {
        stack_.assign(1, v);
        while (!stack_.empty()) {
            const int i = stack_.back();
            stack_.pop_back();
            for (int j : row(edges, i)) {
                if (side_[j] != kFree) continue;
                side_[j] = side;
                stack_.push_back(j);
            }
        }
    }

    int64_t term(int v, const Clock& clock) {
        std::fill(side_.begin(), side_.end(), kFree);
        side_[v] = kAfter;
        spread(v, g.behind, kAfter);
        spread(v, g.before, kBefore);
        // Nodes: source 0, sink 1, free operations, values.
        int nodes = 2;
        free_.clear();
        for (int i = 0; i < g.operations; ++i) {
            if (side_[i] == kFree) free_.push_back(i);
            node_[i] = side_[i] == kBefore ? 0 : side_[i] == kAfter ? 1 : nodes++;
        }
        flow_.reset(nodes + g.values + g.pairs.start[g.operations]);
        for (int i : free_)
            for (int p : row(g.before, i))
                if (node_[p] != 0) flow_.arc(node_[i], node_[p], Flow::kInfinite);
        int64_t fixed = g.weight[v];
        for (int u = 0; u < g.values; ++u) {
            const int from = node_[g.producer[u]];
            if (from == 1 || !g.lives(u)) continue;
            fixed += edge(nodes, from, g.size[u], g.kept[u], row(g.readers, u), -1);
        }
        if (g.has_pairs) fixed -= in_place(v, nodes, fixed);
        const int64_t cut = flow_.run(0, 1, clock);
        if (cut < 0) return -1;
        lower(v, fixed + cut);
        return fixed + cut;
    }

    // Size is paid when `from` is in X and a reader is not. Returns what is paid for certain.
    int64_t edge(int& nodes, int from, int64_t size, bool kept, Span readers, int except) {
        bool certain = kept;
        int loose = 0;
        for (int r : readers) {
            if (r == except) continue;
            certain |= node_[r] == 1;
            loose += node_[r] > 1;
        }
        if (certain && from == 0) return size;
        if (!certain && loose == 0) return 0;
        if (certain) {
            flow_.arc(from, 1, size);
            return 0;
        }
        const int value = nodes++;
        flow_.arc(from, value, size);
        for (int r : readers)
            if (r != except && node_[r] > 1) flow_.arc(value, node_[r], Flow::kInfinite);
        return 0;
    }

    // Constant to take off for what v may write in place; adds the matching edges. An input with a reader behind v lives on.
    int64_t in_place(int v, int& nodes, int64_t& fixed) {
        const auto can_die = [&](int s) {
            for (int r : row(g.readers, s))
                if (r != v && side_[r] == kAfter) return false;
            return true;
        };
        const int *first = g.pairs.begin(v), *last = g.pairs.end(v);
        for (const int* p = first; p != last; p += 2) {
            if (!can_die(p[0])) continue;
            int sharing = 0;
            for (const int* q = first; q != last; q += 2) sharing += q[0] == p[0] || q[1] == p[1];
            if (sharing == 1) fixed += edge(nodes, 0, g.size[p[1]], false, row(g.readers, p[0]), v);
        }
        return g.in_place(v, can_die);
    }

    // The cut found is an executed set for other operations too: bounds their terms from above.
    void lower(int v, int64_t found) {
        above_[v] = std::min(above_[v], found);
        std::vector<int>& left = left_;
        left.assign(g.values, 0);
        int64_t bytes = 0;
        const auto inside = [&](int i) {
            return side_[i] == kBefore || (side_[i] == kFree && flow_.on_source_side(node_[i]));
        };
        for (int u = 0; u < g.values; ++u) {
            for (int r : row(g.readers, u)) left[u] += !inside(r);
            if (inside(g.producer[u]) && (g.kept[u] || left[u] > 0)) bytes += g.size[u];
        }
        for (int i = 0; i < g.operations; ++i) {
            if (inside(i)) continue;
            bool ready = true;
            for (int p : row(g.before, i)) ready &= inside(p);
            if (!ready) continue;
            int64_t step = bytes + g.weight[i];
            if (g.has_pairs) step -= g.in_place(i, [&](int u) { return left[u] == 1; });
            above_[i] = std::min(above_[i], step);
        }
    }

    const Graph& g;
    Flow flow_;
    std::vector<char> side_;
    std::vector<int> node_, free_, stack_, left_;
    std::vector<int64_t> above_;
    int64_t bound_ = 0, peak_ = INT64_MAX;
    int flows_ = 0;
};

}  // namespace order
