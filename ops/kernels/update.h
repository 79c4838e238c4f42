// The arithmetic of optimizer updates, on plain arrays: shared by the kernels for ONNX Runtime and by those for scripts.
//
// An output pointer may equal its input pointer, which is why nothing is declared restrict; ivdep tells the vectoriser
// that there is no dependence between different elements.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vector.h"

namespace ortgraph {

#define ORTGRAPH_INLINE inline __attribute__((always_inline))

struct AdamSettings {
  double beta1, beta2, epsilon, weight_decay;
  bool correct_bias = true;
};

// Numbers of one step; computed in double, used in float32.
struct AdamStep {
  float decay, l2, beta1, rest1, beta2, rest2, root2, epsilon, size, scale;
};

// Step `n` counts from 1. `scale` multiplies the gradient.
inline AdamStep adam_step(const AdamSettings& of, double rate, double n, float scale) {
  const double correction1 = of.correct_bias ? 1.0 - std::pow(of.beta1, n) : 1.0;
  const double correction2 = of.correct_bias ? 1.0 - std::pow(of.beta2, n) : 1.0;
  AdamStep s;
  s.decay = static_cast<float>(1.0 - rate * of.weight_decay);
  s.l2 = static_cast<float>(of.weight_decay);
  s.beta1 = static_cast<float>(of.beta1);
  s.rest1 = static_cast<float>(1.0 - of.beta1);
  s.beta2 = static_cast<float>(of.beta2);
  s.rest2 = static_cast<float>(1.0 - of.beta2);
  s.root2 = static_cast<float>(std::sqrt(correction2));
  s.epsilon = static_cast<float>(of.epsilon);
  s.size = static_cast<float>(rate / correction1);
  s.scale = scale;
  return s;
}

ORTGRAPH_INLINE void adam_element(const AdamStep& s, float w, float grad, float m, float v, float* w_new, float* m_new,
                                  float* v_new) {
  const float m1 = m + s.rest1 * (grad - m);
  const float v1 = s.beta2 * v + s.rest2 * grad * grad;
  *w_new = w * s.decay - s.size * (m1 / (std::sqrt(v1) / s.root2 + s.epsilon));
  *m_new = m1;
  *v_new = v1;
}

inline void adam_update(const AdamStep& s, std::int64_t n, const float* w, const float* g, const float* m,
                        const float* v, float* w_new, float* m_new, float* v_new) {
  const AdamStep step = s;  // a local copy: the stores below cannot change it
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    adam_element(step, w[i], g[i] * step.scale, m[i], v[i], w_new + i, m_new + i, v_new + i);
  }
}

// The same with gradient zero, scaled too: an infinite scale gives NaN as it does in the dense update.
inline void adam_decay(const AdamStep& s, std::int64_t n, const float* w, const float* m, const float* v, float* w_new,
                       float* m_new, float* v_new) {
  const AdamStep step = s;
  const float grad = 0.0f * step.scale;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) adam_element(step, w[i], grad, m[i], v[i], w_new + i, m_new + i, v_new + i);
}

// Adam with weight decay as a part of the gradient (L2), as before AdamW.
inline void adam_l2_update(const AdamStep& s, std::int64_t n, const float* w, const float* g, const float* m,
                           const float* v, float* w_new, float* m_new, float* v_new) {
  AdamStep step = s;
  step.decay = 1.0f;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    adam_element(step, w[i], g[i] * step.scale + step.l2 * w[i], m[i], v[i], w_new + i, m_new + i, v_new + i);
  }
}

// Stochastic gradient descent as torch.optim.SGD computes it.
struct SgdStep {
  float rate, decay, momentum, rest, scale;
  bool first, nesterov;  // first: the buffer starts as the gradient, without dampening
};

ORTGRAPH_INLINE float sgd_gradient(const SgdStep& s, float w, float g) { return g * s.scale + s.decay * w; }

inline void sgd_update(const SgdStep& s, std::int64_t n, const float* w, const float* g, float* w_new) {
  const SgdStep step = s;
  if (step.decay == 0.0f) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) w_new[i] = w[i] - step.rate * (g[i] * step.scale);
    return;
  }
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) w_new[i] = w[i] - step.rate * sgd_gradient(step, w[i], g[i]);
}

template <bool kDecay, bool kFirst, bool kNesterov>
inline void sgd_momentum_as(const SgdStep& s, std::int64_t n, const float* w, const float* g, const float* b,
                            float* w_new, float* b_new) {
  const SgdStep step = s;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float grad = kDecay ? sgd_gradient(step, w[i], g[i]) : g[i] * step.scale;
    const float buffer = kFirst ? grad : step.momentum * b[i] + step.rest * grad;
    w_new[i] = w[i] - step.rate * (kNesterov ? grad + step.momentum * buffer : buffer);
    b_new[i] = buffer;
  }
}

template <bool kDecay, bool kFirst>
inline void sgd_momentum_of(const SgdStep& s, std::int64_t n, const float* w, const float* g, const float* b,
                            float* w_new, float* b_new) {
  s.nesterov ? sgd_momentum_as<kDecay, kFirst, true>(s, n, w, g, b, w_new, b_new)
             : sgd_momentum_as<kDecay, kFirst, false>(s, n, w, g, b, w_new, b_new);
}

inline void sgd_momentum_update(const SgdStep& s, std::int64_t n, const float* w, const float* g, const float* b,
                                float* w_new, float* b_new) {
  if (s.decay != 0.0f) {
    return s.first ? sgd_momentum_of<true, true>(s, n, w, g, b, w_new, b_new)
                   : sgd_momentum_of<true, false>(s, n, w, g, b, w_new, b_new);
  }
  s.first ? sgd_momentum_of<false, true>(s, n, w, g, b, w_new, b_new)
          : sgd_momentum_of<false, false>(s, n, w, g, b, w_new, b_new);
}

// LAMB (You et al. 2020): Adam's direction with weight decay in it, scaled by the tensor's trust ratio.
struct LambStep {
  AdamStep adam;
  float decay, rate;  // size of the direction in `adam` is 1 / (1 - beta1^n)
};

// The step's direction from new moments and the old weight.
ORTGRAPH_INLINE float lamb_direction(const LambStep& s, float w, float m, float v) {
  return s.adam.size * (m / (std::sqrt(v) / s.adam.root2 + s.adam.epsilon)) + s.decay * w;
}

struct Squares {
  double weight = 0, direction = 0;
};

constexpr std::int64_t kSumBlock = 1024;  // elements that are added in float32 before the sum goes on in double

// First pass: new moments, and the squares of weight and direction.
inline Squares lamb_moments(const LambStep& s, std::int64_t n, const float* w, const float* g, const float* m,
                            const float* v, float* m_new, float* v_new) {
  const LambStep step = s;
  Squares total;
  float weights[kSumBlock], directions[kSumBlock];
  for (std::int64_t from = 0; from < n; from += kSumBlock) {
    const std::int64_t count = std::min(kSumBlock, n - from);
#pragma GCC ivdep
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t i = from + j;
      const float grad = g[i] * step.adam.scale;
      const float m1 = m[i] + step.adam.rest1 * (grad - m[i]);
      const float v1 = step.adam.beta2 * v[i] + step.adam.rest2 * grad * grad;
      const float u = lamb_direction(step, w[i], m1, v1);
      weights[j] = w[i] * w[i];
      directions[j] = u * u;
      m_new[i] = m1;
      v_new[i] = v1;
    }
    V a{}, b{};
    vectors(count, [&](std::int64_t i, auto span) {
      a += load(weights + i, span);
      b += load(directions + i, span);
    });
    total.weight += sum(a);
    total.direction += sum(b);
  }
  return total;
}

// Second pass, with `size` = rate times trust ratio.
inline void lamb_weights(const LambStep& s, float size, std::int64_t n, const float* w, const float* m_new,
                         const float* v_new, float* w_new) {
  const LambStep step = s;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) w_new[i] = w[i] - size * lamb_direction(step, w[i], m_new[i], v_new[i]);
}

inline double squares(const float* x, std::int64_t n) {
  double total = 0;
  for (std::int64_t from = 0; from < n; from += kSumBlock) {
    V lanes{};
    vectors(std::min(kSumBlock, n - from), [&](std::int64_t i, auto span) {
      const V v = load(x + from + i, span);
      lanes += v * v;
    });
    total += sum(lanes);
  }
  return total;
}

}  // namespace ortgraph
