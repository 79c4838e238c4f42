// Ordering operations for peak memory: plain C entry points. Sequences are in/out arrays of operation indices; peaks and
// bounds are bytes.
#include "order_anneal.h"
#include "order_bound.h"
#include "order_sets.h"

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

// Improves `count` valid orders; the best replaces the first, and its peak is returned.
EXPORT int64_t order_anneal(
    const order::Problem* problem, int* sequences, int count, double seconds, int64_t bound, int patience, uint64_t seed) {
    const order::Clock clock(seconds);
    const order::Graph graph(*problem);
    return order::anneal(graph, sequences, count, clock, bound, patience, seed);
}

// An order with a peak below `above`; returns its peak, -1 without one, and then `proved` is a bound (0: states left out).
EXPORT int64_t order_sets(
    const order::Problem* problem, int* sequence, double seconds, int width, int64_t level, int64_t above, int64_t bytes,
    int64_t* proved) {
    const order::Clock clock(seconds);
    const order::Graph graph(*problem);
    order::SetSearch search(graph, width, level, above, bytes);
    const bool found = search.run(clock);
    *proved = search.proved();
    if (!found) return -1;
    search.write(sequence);
    return search.peak();
}
