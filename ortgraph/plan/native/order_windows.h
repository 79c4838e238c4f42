// Rearranges some consecutive steps around the peak by a narrow beam over executed sets, again and again: the steps before and
// after a window stay as they are, so a window whose peak falls makes the order better or leaves fewer steps at the peak.
#pragma once

#include "order_sets.h"

namespace order {

struct Windows {
    int width = 10, least = 30, most = 100;  // Of the beam; steps in a window.
    int64_t memory = 50 << 20;
};

// Tries so many windows, fewer when the bound is met or time is over; returns the peak.
inline int64_t rearrange(
    const Graph& g, std::vector<int>& sequence, int tries, int64_t bound, const Clock& clock, Random& random,
    const Windows& with = {}) {
    const int n = g.operations;
    std::vector<int64_t> step(n);
    const auto measure = [&] {
        Walk walk(g);
        for (int t = 0; t < n; ++t) {
            step[t] = walk.step(sequence[t]);
            walk.execute(sequence[t]);
        }
        return walk.peak;
    };
    int64_t peak = measure();
    for (int k = 0; k < tries && peak > bound && !clock.over(); ++k) {
        int hot = 0, seen = 0;
        for (int t = 0; t < n; ++t)
            if (step[t] == peak && random.below(++seen) == 0) hot = t;
        const int length = with.least + random.below(with.most - with.least + 1);
        const int lower = std::max(0, hot - random.below(length)), upper = std::min(n, lower + length);
        SetSearch search(g, with.width, bound, peak, with.memory);
        search.window(sequence.data(), lower, upper);
        if (!search.run(clock)) continue;
        search.write(sequence.data());
        peak = measure();
    }
    return peak;
}

}  // namespace order
