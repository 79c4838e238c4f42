#include <pthread.h>

#include <functional>

#include "layout_greedy.h"
#include "layout_problem.h"
#include "layout_search.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Which rule wins differs from problem to problem, and the time to a solution is heavy-tailed: many short runs that
// differ by noise find one sooner than one long run.
layout::Strategy strategy_of(int run) {
    layout::Strategy s;
    s.key = run % 3;
    s.lowest = run % 8 == 7;
    s.noise = run < 3 ? 0.0 : run / 3 % 2 == 0 ? 0.1 : 0.3;
    s.seed = static_cast<uint64_t>(run);
    return s;
}

// 1 1 2 1 1 2 4 1 1 2 ...: no more than a logarithmic factor over the best fixed limit (Luby, Sinclair, Zuckerman 1993),
// and long runs, which prove, keep coming.
int64_t luby(int64_t i) {
    int64_t power = 1;
    while (2 * power - 1 < i) power *= 2;
    return 2 * power - 1 == i ? power : luby(i - power + 1);
}

template <typename T>
layout::Outcome search(const layout::Problem& problem, int64_t capacity, int first, int runs, int64_t run_nodes,
                       int64_t max_nodes, double seconds, int64_t* offsets, int64_t* nodes) {
    const layout::Deadline deadline(seconds);
    int bits = 10;
    while (bits < 20 && (int64_t{1} << bits) < std::min(max_nodes, run_nodes * runs * 4)) ++bits;
    layout::Memo memo(bits);  // failed states are facts, whatever rule found them
    for (int run = first; run < first + runs && *nodes < max_nodes && !deadline.passed(); ++run) {
        const int64_t limit = std::min(run_nodes * luby(run + 1), max_nodes - *nodes);
        layout::Search<T> one(problem, static_cast<T>(capacity), strategy_of(run), limit, deadline, memo);
        const layout::Outcome outcome = one.run();
        *nodes += one.nodes();
        if (outcome == layout::Outcome::found) std::copy(one.offsets().begin(), one.offsets().end(), offsets);
        if (outcome != layout::Outcome::limit) return outcome;
    }
    return layout::Outcome::limit;
}

void* call(void* task) {
    (*static_cast<const std::function<void()>*>(task))();
    return nullptr;
}

// Runs a deep recursion on a stack of its own: that of a thread made elsewhere may be small. Pages that are not touched
// cost nothing. False: there is no such thread.
bool run_on_stack(size_t bytes, const std::function<void()>& task) {
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes) != 0) return false;
    const bool started = pthread_attr_setstacksize(&attributes, bytes) == 0 &&
                         pthread_create(&thread, &attributes, call, const_cast<std::function<void()>*>(&task)) == 0;
    pthread_attr_destroy(&attributes);
    return started && pthread_join(thread, nullptr) == 0;
}

}  // namespace

// Searches for a placement within the capacity, `runs` times with small multiples of `run_nodes` nodes each, and
// `max_nodes` altogether. 1: found (offsets are written), 0: there is none, 2: stopped by a limit. Counts `nodes`.
EXPORT int layout_search(int n, const int64_t* lower, const int64_t* upper, const int64_t* size, int64_t capacity,
                         int first, int runs, int64_t run_nodes, int64_t max_nodes, double seconds, int64_t* offsets,
                         int64_t* nodes) {
    const layout::Problem problem(n, lower, upper, size);
    *nodes = 0;
    if (problem.max_load() > capacity) return 0;
    const bool narrow = capacity < (int64_t{1} << 28);
    layout::Outcome outcome = layout::Outcome::limit;
    const auto task = [&] {
        outcome = narrow ? search<int32_t>(problem, capacity, first, runs, run_nodes, max_nodes, seconds, offsets, nodes)
                         : search<int64_t>(problem, capacity, first, runs, run_nodes, max_nodes, seconds, offsets, nodes);
    };
    using Any = layout::Search<int64_t>;
    const size_t levels = std::min<size_t>(Any::kMaxDepth, 4 * static_cast<size_t>(n)) + 512;
    run_on_stack(levels * Any::kStackPerLevel, task);
    return static_cast<int>(outcome);
}

// Places in the given order, each buffer in the lowest or the tightest gap. Returns the arena,
// -1 if the deadline came first.
EXPORT int64_t layout_greedy(int n, const int64_t* lower, const int64_t* upper, const int64_t* size, const int32_t* order,
                             int tightest, double seconds, int64_t* offsets) {
    const layout::Problem problem(n, lower, upper, size);
    const layout::Deadline deadline(seconds);
    layout::Packer packer(problem);
    const int64_t total = packer.place(std::vector<int>(order, order + n), tightest != 0, deadline);
    if (total >= 0) std::copy(packer.offsets().begin(), packer.offsets().end(), offsets);
    return total;
}
