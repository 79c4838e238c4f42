// The ordering problem in flat arrays, and the cost of an order. Every operation appears once.
//
// A set X of executed operations (closed under predecessors) costs cut(X): the sizes of the values made in X that are kept
// or have a reader outside. Executing u after X costs cut(X) + weight(u), where weight is its outputs and scratch, less what
// it writes in place. cut is submodular, which the bound and the closure of the beam rest on.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

namespace order {

// Rows of different lengths in one array.
struct Rows {
    const int* start;
    const int* item;
    const int* begin(int row) const { return item + start[row]; }
    const int* end(int row) const { return item + start[row + 1]; }
    int size(int row) const { return start[row + 1] - start[row]; }
};

struct Span {
    const int *first, *last;
    const int* begin() const { return first; }
    const int* end() const { return last; }
};

inline Span row(const Rows& rows, int i) { return {rows.begin(i), rows.end(i)}; }

// As the caller passes it; plain C.
struct Problem {
    int operations, values;
    const int64_t* size;      // [values]
    const uint8_t* kept;      // [values]
    const int* producer;      // [values]
    const int64_t* scratch;   // [operations]
    Rows inputs, outputs;     // Values by operation.
    Rows readers;             // Operations by value.
    Rows before, behind;      // Direct predecessors and successors by operation, `after` included.
    Rows pairs;               // In place, by operation: value read, value made, value read, ...; no kept value is read.
};

struct Graph : Problem {
    explicit Graph(const Problem& p) : Problem(p), made(operations), weight(operations) {
        for (int i = 0; i < operations; ++i) {
            weight[i] = scratch[i];
            for (int v : row(outputs, i)) {
                weight[i] += size[v];
                if (lives(v)) made[i] += size[v];
            }
        }
        has_pairs = pairs.start[operations] > 0;
    }

    // Outlives the step that makes it.
    bool lives(int v) const { return kept[v] || readers.size(v) > 0; }

    // What operation i writes over its inputs; dies(v) says whether input v dies with the step.
    template <class Dies>
    int64_t in_place(int i, Dies dies) const {
        int64_t saved = 0;
        static thread_local std::vector<int> taken;
        taken.clear();
        for (const int* p = pairs.begin(i); p != pairs.end(i); p += 2) {
            if (std::find(taken.begin(), taken.end(), p[0]) != taken.end()) continue;
            if (std::find(taken.begin(), taken.end(), p[1]) != taken.end() || !dies(p[0])) continue;
            taken.push_back(p[0]), taken.push_back(p[1]);
            saved += size[p[1]];
        }
        return saved;
    }

    std::vector<int64_t> made, weight;
    bool has_pairs = false;
};

// Executes operations one after the other.
class Walk {
   public:
    explicit Walk(const Graph& graph) : g(graph), left(graph.values) {
        for (int v = 0; v < g.values; ++v) left[v] = g.readers.size(v);
    }

    int64_t step(int i) const {
        int64_t bytes = live + g.weight[i];
        if (g.has_pairs) bytes -= g.in_place(i, [&](int v) { return left[v] == 1; });
        return bytes;
    }
    // What executing i adds to the cut.
    int64_t change(int i) const {
        int64_t bytes = g.made[i];
        for (int v : row(g.inputs, i))
            if (left[v] == 1 && !g.kept[v]) bytes -= g.size[v];
        return bytes;
    }
    void execute(int i) {
        peak = std::max(peak, step(i));
        live += change(i);
        for (int v : row(g.inputs, i)) --left[v];
    }

    const Graph& g;
    std::vector<int> left;  // Readers still to come, by value.
    int64_t live = 0, peak = 0;
};

inline int64_t peak_of(const Graph& g, const int* sequence) {
    Walk walk(g);
    for (int t = 0; t < g.operations; ++t) walk.execute(sequence[t]);
    return walk.peak;
}

class Clock {
   public:
    explicit Clock(double seconds) : end_(now() + seconds) {}
    bool over() const { return now() >= end_; }
    double left() const { return end_ - now(); }
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

   private:
    double end_;
};

// Small and reproducible everywhere (splitmix64).
struct Random {
    uint64_t state;
    uint64_t next() {
        uint64_t z = (state += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    int below(int n) { return static_cast<int>((next() >> 32) * static_cast<uint64_t>(n) >> 32); }
    double unit() { return (next() >> 11) * 0x1.0p-53; }
};

}  // namespace order
