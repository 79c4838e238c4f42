// Optimizer updates on plain arrays, for callers without ONNX Runtime: C functions over lists of tensors, in place.
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "../kernels/update.h"

namespace ortgraph {
namespace {

constexpr std::int64_t kSlice = 32768;
constexpr std::int64_t kBlock = 1024;

enum Type : int { kFloat = 1, kHalf = 10, kBfloat16 = 16 };

template <class T>
void widen_block(const T* from, float* to, std::int64_t n) {
  vectors(n, [&](std::int64_t i, auto span) { store(to + i, load(from + i, span), span); });
}
template <class T>
void narrow_block(const float* from, T* to, std::int64_t n) {
  vectors(n, [&](std::int64_t i, auto span) { store(to + i, load(from + i, span), span); });
}

// n elements from element `at` on as floats: the array's own, or a copy in `block`.
const float* floats(const void* x, int type, std::int64_t at, std::int64_t n, float* block) {
  if (type == kFloat) return static_cast<const float*>(x) + at;
  if (type == kBfloat16) widen_block(static_cast<const Bf16*>(x) + at, block, n);
  if (type == kHalf) widen_block(static_cast<const Half*>(x) + at, block, n);
  return block;
}

// body(part) for part in [0, parts), on `threads` threads of which the caller's is one. Each thread walks a range of its
// own, which reads memory in order, and then helps with those of the others.
template <class Body>
void parallel(std::int64_t parts, int threads, const Body& body) {
  const std::int64_t ranges = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, parts));
  std::vector<std::atomic<std::int64_t>> next(static_cast<std::size_t>(ranges));
  for (std::int64_t r = 0; r < ranges; ++r) next[static_cast<std::size_t>(r)] = parts * r / ranges;
  const auto work = [&](std::int64_t own) {
    for (std::int64_t k = 0; k < ranges; ++k) {
      const std::int64_t r = (own + k) % ranges, end = parts * (r + 1) / ranges;
      for (std::int64_t part; (part = next[static_cast<std::size_t>(r)].fetch_add(1)) < end;) body(part);
    }
  };
  std::vector<std::thread> others;
  try {
    for (std::int64_t i = 1; i < ranges; ++i) others.emplace_back(work, i);
  } catch (const std::exception&) {
    // No further thread to be had: those that there are do all the work.
  }
  work(0);
  for (std::thread& other : others) other.join();
}

// Tensors cut in slices that depend on sizes only.
struct Slices {
  Slices(std::int64_t tensors, const std::int64_t* sizes) {
    for (std::int64_t t = 0; t < tensors; ++t) {
      for (std::int64_t at = 0; at < sizes[t]; at += kSlice) list.push_back({t, at, std::min(kSlice, sizes[t] - at)});
    }
  }
  struct Slice {
    std::int64_t tensor, at, n;
  };
  std::vector<Slice> list;
};

LambStep lamb_step(const double* settings, double step, int correct_bias) {
  const AdamSettings of{settings[0], settings[1], settings[2], 0.0, correct_bias != 0};
  return {adam_step(of, 1.0, step, 1.0f), static_cast<float>(settings[3]), 1.0f};
}

}  // namespace
}  // namespace ortgraph

#define ORTGRAPH_PUBLIC extern "C" __attribute__((visibility("default")))

// One Adam step of float32 weights w with moments m and v; g of type g_type. Where low is given, low[t] of type low_type
// gets the rounded new weight. l2: weight decay is a part of the gradient. 0 on success.
ORTGRAPH_PUBLIC int ortgraph_adam(std::int64_t tensors, const std::int64_t* sizes, float* const* w, const void* const* g,
                                  int g_type, float* const* m, float* const* v, void* const* low, int low_type,
                                  const double* settings, double rate, double step, float scale, int l2,
                                  int correct_bias, int threads) {
  using namespace ortgraph;
  const AdamSettings of{settings[0], settings[1], settings[2], settings[3], correct_bias != 0};
  const AdamStep numbers = adam_step(of, rate, step, scale);
  try {
    const Slices slices(tensors, sizes);
    parallel(static_cast<std::int64_t>(slices.list.size()), threads, [&](std::int64_t i) {
      const auto [t, at, n] = slices.list[static_cast<std::size_t>(i)];
      const std::int64_t size = g_type == kFloat && !low ? n : kBlock;
      float block[kBlock];
      for (std::int64_t from = at; from < at + n; from += size) {
        const std::int64_t count = std::min(size, at + n - from);
        const float* grad = floats(g[t], g_type, from, count, block);
        float *wt = w[t] + from, *mt = m[t] + from, *vt = v[t] + from;
        (l2 ? adam_l2_update : adam_update)(numbers, count, wt, grad, mt, vt, wt, mt, vt);
        if (!low) continue;
        if (low_type == kBfloat16) narrow_block(wt, static_cast<Bf16*>(low[t]) + from, count);
        if (low_type == kHalf) narrow_block(wt, static_cast<Half*>(low[t]) + from, count);
      }
    });
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// First half of a LAMB step: new moments m and v, and for each tensor the squares of weight and direction in totals[2 t] and
// totals[2 t + 1]. settings: beta1, beta2, epsilon, weight decay. 0 on success.
ORTGRAPH_PUBLIC int ortgraph_lamb_moments(std::int64_t tensors, const std::int64_t* sizes, const float* const* w,
                                          const void* const* g, int g_type, float* const* m, float* const* v,
                                          const double* settings, double step, int correct_bias, double* totals,
                                          int threads) {
  using namespace ortgraph;
  const LambStep numbers = lamb_step(settings, step, correct_bias);
  try {
    const Slices slices(tensors, sizes);
    std::vector<Squares> sums(slices.list.size());
    parallel(static_cast<std::int64_t>(slices.list.size()), threads, [&](std::int64_t i) {
      const auto [t, at, n] = slices.list[static_cast<std::size_t>(i)];
      const std::int64_t size = g_type == kFloat ? n : kBlock;
      float block[kBlock];
      Squares total;
      for (std::int64_t from = at; from < at + n; from += size) {
        const std::int64_t count = std::min(size, at + n - from);
        const float* grad = floats(g[t], g_type, from, count, block);
        float *mt = m[t] + from, *vt = v[t] + from;
        const Squares part = lamb_moments(numbers, count, w[t] + from, grad, mt, vt, mt, vt);
        total.weight += part.weight;
        total.direction += part.direction;
      }
      sums[static_cast<std::size_t>(i)] = total;
    });
    std::fill(totals, totals + 2 * tensors, 0.0);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      totals[2 * slices.list[i].tensor] += sums[i].weight;
      totals[2 * slices.list[i].tensor + 1] += sums[i].direction;
    }
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// Second half: each tensor's weights go by its own rate along the direction of its new moments. 0 on success.
ORTGRAPH_PUBLIC int ortgraph_lamb_weights(std::int64_t tensors, const std::int64_t* sizes, float* const* w,
                                          const float* const* m, const float* const* v, const double* settings,
                                          double step, int correct_bias, const double* rates, int threads) {
  using namespace ortgraph;
  const LambStep numbers = lamb_step(settings, step, correct_bias);
  try {
    const Slices slices(tensors, sizes);
    parallel(static_cast<std::int64_t>(slices.list.size()), threads, [&](std::int64_t i) {
      const auto [t, at, n] = slices.list[static_cast<std::size_t>(i)];
      lamb_weights(numbers, static_cast<float>(rates[t]), n, w[t] + at, m[t] + at, v[t] + at, w[t] + at);
    });
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// The sum of the squares of all elements: infinite or NaN when an element is. 0 on success.
ORTGRAPH_PUBLIC int ortgraph_squares(std::int64_t tensors, const std::int64_t* sizes, const void* const* x, int type,
                                     int threads, double* result) {
  using namespace ortgraph;
  try {
    const Slices slices(tensors, sizes);
    std::vector<double> sums(slices.list.size());
    parallel(static_cast<std::int64_t>(slices.list.size()), threads, [&](std::int64_t i) {
      const auto [t, at, n] = slices.list[static_cast<std::size_t>(i)];
      float block[kBlock];
      double total = 0;
      for (std::int64_t from = at; from < at + n; from += kBlock) {
        const std::int64_t count = std::min(kBlock, at + n - from);
        total += squares(floats(x[t], type, from, count, block), count);
      }
      sums[static_cast<std::size_t>(i)] = total;
    });
    *result = 0;
    for (const double s : sums) *result += s;
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
