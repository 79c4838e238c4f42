// The entry point of the library: all its operators.
#include "kernel.h"

extern "C" __attribute__((visibility("default"))) ortgraph::Status* RegisterCustomOps(
    ortgraph::SessionOptions* options, const ortgraph::ApiBase* base) {
  using namespace ortgraph;
  static const Definitions definitions = [] {
    Definitions made;
    add_activation(made);
    add_attention(made);
    add_attention_grad(made);
    add_batch_norm(made);
    add_convolution(made);
    add_convolution_grad(made);
    add_embedding(made);
    add_loss(made);
    add_movement(made);
    add_normalization(made);
    add_optimizer(made);
    add_pooling(made);
    add_product(made);
    add_random(made);
    add_reduction(made);
    add_softmax(made);
    return made;
  }();
  return register_operators(options, base, "ortgraph.kernels", definitions);
}
