// The AdamW rule, shared by the dense, the multi-tensor and the embedding kernel.
#pragma once

#include <cmath>

#include "kernel.h"

namespace ortgraph {

// Numbers of one step; computed in double, used in float32.
struct AdamStep {
  float decay, beta1, rest1, beta2, rest2, root2, epsilon, size, scale;
};

class AdamRule {
 public:
  explicit AdamRule(const Attributes& a)
      : beta1_(a.decimal("beta1", 0.9)),
        beta2_(a.decimal("beta2", 0.999)),
        epsilon_(a.decimal("epsilon", 1e-8)),
        weight_decay_(a.decimal("weight_decay", 0.01)) {}

  AdamStep at(const Tensor& rate, const Tensor& step, const Tensor& scale) const;

 private:
  double beta1_, beta2_, epsilon_, weight_decay_;
};

inline __attribute__((always_inline)) void adam_element(const AdamStep& s, float w, float grad, float m, float v,
                                                        float* w_new, float* m_new, float* v_new) {
  const float m1 = m + s.rest1 * (grad - m);
  const float v1 = s.beta2 * v + s.rest2 * grad * grad;
  *w_new = w * s.decay - s.size * (m1 / (std::sqrt(v1) / s.root2 + s.epsilon));
  *m_new = m1;
  *v_new = v1;
}

// An output pointer may equal its input pointer, which is why nothing is declared restrict; ivdep tells the vectoriser
// that there is no dependence between different elements.
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

}  // namespace ortgraph
