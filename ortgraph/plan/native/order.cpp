// Ordering operations for peak memory: plain C entry points. Sequences are in/out arrays of operation indices; peaks and
// bounds are bytes.
#include "order_anneal.h"
#include "order_bound.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Min-cut bound; `sequences` are `count` valid orders that prune the candidates.
EXPORT int64_t order_bound(
    const order::Problem* problem, const int* sequences, int count, double seconds, int* complete) {
    const order::Clock clock(seconds);
    const order::Graph graph(*problem);
    order::Bound bound(graph);
    for (int k = 0; k < count; ++k) bound.know(sequences + static_cast<size_t>(k) * graph.operations);
    *complete = bound.solve(clock);
    return bound.bound();
}

// Improves a valid order; returns its peak.
EXPORT int64_t order_anneal(
    const order::Problem* problem, int* sequence, double seconds, int64_t bound, int rounds, uint64_t seed) {
    const order::Clock clock(seconds);
    const order::Graph graph(*problem);
    return order::anneal(graph, sequence, clock, bound, rounds, seed);
}
