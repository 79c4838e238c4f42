#include "layout_problem.h"
#include "layout_search.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <typename T>
int fit(const layout::Problem& problem, int64_t capacity, const layout::Strategy& strategy, int64_t max_nodes,
        double seconds, int64_t* offsets, int64_t* nodes) {
    const layout::Deadline deadline(seconds);
    layout::Memo memo(18);
    layout::Search<T> search(problem, static_cast<T>(capacity), strategy, max_nodes, deadline, memo);
    const layout::Outcome outcome = search.run();
    *nodes = search.nodes();
    if (outcome == layout::Outcome::found) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
    return static_cast<int>(outcome);
}

}  // namespace

// 1: found (offsets are written), 0: there is no placement within the capacity, 2: stopped by a limit.
EXPORT int layout_fit(int n, const int64_t* lower, const int64_t* upper, const int64_t* size, int64_t capacity, int key,
                      int lowest, int tight_first, double noise, uint64_t seed, int64_t max_nodes, double seconds,
                      int64_t* offsets, int64_t* nodes) {
    const layout::Problem problem(n, lower, upper, size);
    *nodes = 0;
    if (problem.max_load() > capacity) return 0;
    const layout::Strategy strategy{key, lowest != 0, tight_first != 0, noise, seed};
    if (capacity < (int64_t{1} << 28))
        return fit<int32_t>(problem, capacity, strategy, max_nodes, seconds, offsets, nodes);
    return fit<int64_t>(problem, capacity, strategy, max_nodes, seconds, offsets, nodes);
}
