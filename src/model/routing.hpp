// The buffers that the blocks of a layer with a mixture of experts pass on to each other. N = rows of the
// batch, G = rows of all ranks of the expert group (N with one rank), C = width, E = experts, K = experts of
// a token; router_args.hpp explains slots and routed rows.
#pragma once
#include "model/call.hpp"

namespace zg::model {

// What a forward keeps for the experts and for the backward.
struct Routing {
  View x;        // T [N,C]: the experts' input
  View logits;   // A [N,E]
  View chosen;   // i32 [G,K]
  View weights;  // A [G,K]
  View starts;   // i32 [1,E+1]: the routed rows of each expert
  View order;    // i32 [1,G*K]: the slot of each routed row
  View sums;     // A [sequences, 2E+1]: of router_sums()
  std::int64_t bytes = 0;

  Routing(const ModelConfig& c, const TensorShard& shard, DType t, BatchShape shape, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), g = routed_rows(shard, shape), e = c.experts.count,
                       k = c.experts.router.per_token;
    x = plan.take(t, n, c.width);
    logits = plan.take(accumulator_of(t), n, e);
    chosen = plan.take(DType::kI32, g, k);
    weights = plan.take(accumulator_of(t), g, k);
    starts = plan.take(DType::kI32, 1, e + 1);
    order = plan.take(DType::kI32, 1, g * k);
    sums = plan.take(accumulator_of(t), shape.sequences, 2 * e + 1);
    bytes = plan.bytes();
  }
};

// Sums over a layer's experts, of one micro-batch in one pass.
struct ExpertSums {
  View rows;       // A [G,C]: a forward's outputs, or the gradient of the experts' inputs
  View d_weights;  // A [G,K]: the gradient of Routing::weights
  View balance;    // A [sequences, E]: RouteBackwardArgs::balance
  // T [G,C], if this rank's rows are not all: the gradient of the output. And with several ranks in the
  // expert group, the experts' inputs.
  View d_output, x;
  std::int64_t bytes = 0;

  ExpertSums(const ModelConfig& c, const TensorShard& shard, DType t, BatchShape shape, void* base) {
    BufferPlan plan(base);
    const std::int64_t g = routed_rows(shard, shape);
    const bool shares = shard.experts.degree > 1;
    rows = plan.take(accumulator_of(t), g, c.width);
    d_weights = plan.take(accumulator_of(t), g, c.experts.router.per_token);
    balance = plan.take(accumulator_of(t), shape.sequences, c.experts.count);
    if (shard.sequence || shares) d_output = plan.take(t, g, c.width);
    if (shares) x = plan.take(t, g, c.width);
    bytes = plan.bytes();
  }
};

inline Routing routing_of(const Call& call) {
  return {call.config, call.shard, call.dtype, call.shape, call.experts.routing};
}
inline ExpertSums sums_of(const Call& call) {
  return {call.config, call.shard, call.dtype, call.shape, call.experts.sums};
}

}  // namespace zg::model
