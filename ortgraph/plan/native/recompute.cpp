// Recompute selection on a sequence of evaluations: plain C functions for ortgraph.plan.recompute.native.
#include <cstring>

#include "recompute_evict.h"
#include "recompute_search.h"

using namespace recompute;

extern "C" {

struct RecomputeGraph {
  int32_t operations, values;
  const double *cost, *scratch;
  const uint8_t* repeatable;
  const int32_t *input_start, *inputs, *output_start, *outputs, *after_start, *after, *follower_start, *followers,
      *inplace_start, *inplace;
  const double* size;
  const uint8_t* kept;
  const int32_t* producer;
};

struct RecomputeOptions {
  double budget, iterations, hot, cold, seconds;
  int64_t seed;
  int32_t reorder, stages;  // no stages: anneal
};

struct RecomputeResult {
  double cost, excess;
  int64_t accepted;
  int32_t length;
};

}

namespace {

Graph view(const RecomputeGraph& g) {
  return Graph{g.operations, g.values, g.cost, g.scratch, g.repeatable,
               {g.input_start, g.inputs}, {g.output_start, g.outputs}, {g.after_start, g.after},
               {g.follower_start, g.followers}, {g.inplace_start, g.inplace}, g.size, g.kept, g.producer};
}

}  // namespace

// Improves a sequence; writes the result to `out` and returns 0, or 1 where it is longer than `capacity`.
extern "C" __attribute__((visibility("default"))) int32_t recompute_improve(
    const RecomputeGraph* given, const RecomputeOptions* options, const int32_t* steps, int32_t count, int32_t* out,
    int32_t capacity, RecomputeResult* result) {
  const Graph graph = view(*given);
  Search search(graph, {options->budget, options->iterations, options->hot, options->cold, options->seconds,
                        options->seed, options->reorder != 0, options->stages});
  search.start(std::vector<int32_t>(steps, steps + count));
  if (options->stages) search.greedy(options->stages);
  else search.anneal();
  const std::vector<int32_t> found = search.found() ? search.best() : search.steps();
  result->cost = search.found() ? search.best_cost() : search.sequence().cost();
  result->excess = search.found() ? 0.0 : search.sequence().load().excess();
  result->accepted = search.accepted();
  result->length = static_cast<int32_t>(found.size());
  if (result->length > capacity) return 1;
  std::memcpy(out, found.data(), found.size() * sizeof(int32_t));
  return 0;
}

// One pass under a hard budget; writes the sequence and returns its length, -1 where it failed or got longer than `capacity`.
extern "C" __attribute__((visibility("default"))) int32_t recompute_evict(
    const RecomputeGraph* given, double budget, double patience, double seconds, const int32_t* order, int32_t count,
    int32_t* out, int32_t capacity) {
  const Graph graph = view(*given);
  Eviction eviction(graph, budget, patience, seconds);
  const std::vector<int32_t> found = eviction.run(std::vector<int32_t>(order, order + count), capacity);
  if (eviction.failed() || static_cast<int32_t>(found.size()) > capacity) return -1;
  std::memcpy(out, found.data(), found.size() * sizeof(int32_t));
  return static_cast<int32_t>(found.size());
}
