// The AdamW rule, shared by the dense, the multi-tensor and the embedding kernel.
#pragma once

#include "kernel.h"
#include "update.h"

namespace ortgraph {

class AdamRule {
 public:
  explicit AdamRule(const Attributes& a)
      : of_{a.decimal("beta1", 0.9), a.decimal("beta2", 0.999), a.decimal("epsilon", 1e-8),
            a.decimal("weight_decay", 0.01)} {}

  AdamStep at(const Tensor& rate, const Tensor& step, const Tensor& scale) const;

 private:
  AdamSettings of_;
};

}  // namespace ortgraph
