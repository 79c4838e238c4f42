// Offset placement: buffers with half-open lifetimes, brought to the smallest equivalent time line.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace layout {

using Clock = std::chrono::steady_clock;

// A point in time after which a search stops. Reading the clock is cheap beside a search node, but not free.
struct Deadline {
    Clock::time_point end;
    explicit Deadline(double seconds)
        : end(Clock::now() + std::chrono::microseconds(static_cast<int64_t>(std::min(seconds, 1e7) * 1e6))) {}
    bool passed() const { return Clock::now() >= end; }
};

struct Rng {  // xorshift64*; the same sequence on every machine
    uint64_t state;
    explicit Rng(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 0xD1B54A32D192ED03ull) {}
    uint64_t next() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 0x2545F4914F6CDD1Dull;
    }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
    int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
};

// Two intervals overlap exactly if a maximal set of intervals that are live together holds both, so the time line
// shrinks to one section per maximal set.
struct Problem {
    int n = 0;
    int sections = 0;
    std::vector<int> lo, hi;  // sections lo <= s < hi
    std::vector<int64_t> size;
    std::vector<int64_t> load;  // per section

    Problem(int count, const int64_t* lower, const int64_t* upper, const int64_t* sizes)
        : n(count), lo(count), hi(count), size(sizes, sizes + count) {
        std::vector<int> starts(n), ends(n);
        std::iota(starts.begin(), starts.end(), 0);
        ends = starts;
        std::sort(starts.begin(), starts.end(), [&](int a, int b) { return lower[a] < lower[b]; });
        std::sort(ends.begin(), ends.end(), [&](int a, int b) { return upper[a] < upper[b]; });
        int section = 0;
        size_t begun = 0;
        bool fresh = false;
        for (int e : ends) {
            while (begun < starts.size() && lower[starts[begun]] < upper[e]) {
                if (!fresh && begun > 0) ++section;
                fresh = true;
                lo[starts[begun++]] = section;
            }
            hi[e] = section + 1;
            fresh = false;
        }
        sections = n ? section + 1 : 0;
        load.assign(sections + 1, 0);
        for (int i = 0; i < n; ++i) {
            load[lo[i]] += size[i];
            load[hi[i]] -= size[i];
        }
        for (int s = 1; s <= sections; ++s) load[s] += load[s - 1];
        load.resize(sections);
    }

    int64_t max_load() const { return load.empty() ? 0 : *std::max_element(load.begin(), load.end()); }
};

}  // namespace layout
