#include "model/expert_block.hpp"

#include "model/routing.hpp"
#include "model/stack.hpp"
#include "model/tensor_shard.hpp"

namespace zg::model {
namespace {

// The parameters of an expert, which is number `i` of its unit, in the order of expert_unit().
struct ExpertParams {
  std::size_t gate, up, down;
  explicit ExpertParams(std::int64_t i)
      : gate(static_cast<std::size_t>(3 * i)), up(gate + 1), down(gate + 2) {}
};

// Scratch for the rows of one expert, at most N: a token has an expert once. I = width inside an expert.
struct ExpertWorkspace {
  View x;             // T [N,C]: the experts' inputs; in a forward, later their outputs
  View gate_up, act;  // T [N,2I], T [N,I]
  // Of a backward: the gradients of the outputs, T [N,C], and then those of the inputs; the gradient of act,
  // T [N,I].
  View d_output, d_act;
  std::int64_t bytes = 0;

  ExpertWorkspace(const ModelConfig& c, DType t, BatchShape shape, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), inner = c.experts.inner;
    x = plan.take(t, n, c.width);
    gate_up = plan.take(t, n, 2 * inner);
    act = plan.take(t, n, inner);
    d_output = plan.take(t, n, c.width);
    d_act = plan.take(t, n, inner);
    bytes = plan.bytes();
  }
};

// The routed rows of one expert.
struct ExpertRows {
  View order;  // i32 [1,M]: their slots
  std::int64_t count() const { return order.cols; }
  View of(const View& buffer) const { return buffer.row_range(0, count()); }
};

ExpertRows rows_of(const Call& call, const Routing& routing, std::int64_t expert) {
  const std::int32_t* const starts = call.experts.starts;
  ZG_ASSERT(starts != nullptr && 0 <= starts[expert] && starts[expert] <= starts[expert + 1] &&
                starts[expert + 1] <= routing.order.cols,
            "expert {} has no range of the {} routed rows", expert, routing.order.cols);
  return {routing.order.col_range(starts[expert], starts[expert + 1] - starts[expert])};
}

}  // namespace

std::int64_t ExpertBlock::workspace_bytes(BatchShape batch, Backward) const {
  return ExpertWorkspace(config(), shape_.dtype, batch, nullptr).bytes;
}

std::vector<TensorParallelCall> ExpertBlock::exchanges(ModelCall call, BatchShape batch) const {
  const TensorShard& shard = shape_.shard;
  if (shard.degree == 1 || !is_last()) return {};
  const std::int64_t elements = residual_rows(shard, batch) * config().width;
  if (call == ModelCall::kExperts) return {sum_over_parts(shard, elements, shape_.dtype)};
  if (!shard.sequence) return {};
  return {{TensorParallelCall::Kind::kAllGather, elements, shape_.dtype}};
}

double ExpertBlock::forward_products(std::int64_t) const {
  const Experts& e = shape_.whole.experts;
  const auto share = static_cast<double>(e.router.per_token) / static_cast<double>(e.count);
  return share * static_cast<double>(unit().expert_count * 3 * shape_.whole.width * e.inner);
}

void ExpertBlock::run(const Call& call) const {
  switch (call.model_call) {
    case ModelCall::kExperts:
      return forward(call);
    case ModelCall::kExpertsBackward:
    case ModelCall::kExpertsBackwardFrozen:
      return backward(call);
    default:
      ZG_ASSERT(false, "call {} is none of experts", static_cast<int>(call.model_call));
  }
}

void ExpertBlock::forward(const Call& call) const {
  Ops& ops = call.ops;
  Stream& s = call.stream;
  const Routing routing = routing_of(call);
  const View sum = sums_of(call).rows;
  const ExpertWorkspace w(call.config, call.dtype, call.shape, call.workspace);
  const std::int64_t per_token = call.config.experts.router.per_token;
  for (std::int64_t i = 0; i < unit().expert_count; ++i) {
    const ExpertRows rows = rows_of(call, routing, unit().first_expert + i);
    if (rows.count() == 0) continue;
    ZG_ASSERT(static_cast<bool>(call.weights), "{} has rows, and no weights", unit().name);
    const ExpertParams p(i);
    const View x = rows.of(w.x), gate_up = rows.of(w.gate_up), act = rows.of(w.act);
    ops.gather_rows(s, {.x = routing.x, .order = rows.order, .per_token = per_token, .y = x});
    Stack(call, p.gate, p.up).forward(x, gate_up);
    ops.expert_gate(s, {.gate_up = gate_up,
                        .order = rows.order,
                        .weights = routing.weights,
                        .gate = call.config.block.gate,
                        .y = act});
    call.linear(act, p.down, {}, x);
    ops.add_rows(s, {.x = x, .order = rows.order, .per_token = per_token, .sum = sum});
  }
  if (!is_last()) return;
  ZG_ASSERT(static_cast<bool>(call.output), "{} ends its layer without an output", unit().name);
  ops.cast(s, sum, w.x);
  ops.add(s, call.sum_of_parts(w.x), call.output, call.output);
}

void ExpertBlock::backward(const Call& call) const {
  Ops& ops = call.ops;
  Stream& s = call.stream;
  const Routing routing = routing_of(call);
  const ExpertSums sums = sums_of(call);
  const ExpertWorkspace w(call.config, call.dtype, call.shape, call.workspace);
  const std::int64_t per_token = call.config.experts.router.per_token;
  const bool trains = static_cast<bool>(call.grads);
  if (is_last()) {
    ops.zero(s, sums.rows);
    (void)call.all_rows(call.activation_gradient, sums.d_output);
  }
  const View& d_output = call.shard.sequence ? sums.d_output : call.activation_gradient;
  if (trains && call.into == Gradients::kOverwrite) clear_gaps(ops, s, call.grads, call.unit);
  for (std::int64_t i = unit().expert_count; i-- > 0;) {
    const ExpertRows rows = rows_of(call, routing, unit().first_expert + i);
    const ExpertParams p(i);
    if (rows.count() == 0) {
      if (!trains || call.into == Gradients::kAdd) continue;
      for (const std::size_t param : {p.gate, p.up, p.down}) ops.zero(s, call.grad(param));
      continue;
    }
    const View x = rows.of(w.x), gate_up = rows.of(w.gate_up), act = rows.of(w.act), d_act = rows.of(w.d_act),
               d_rows = rows.of(w.d_output);
    const Stack stack(call, p.gate, p.up);
    ops.gather_rows(s, {.x = routing.x, .order = rows.order, .per_token = per_token, .y = x});
    ops.gather_rows(s, {.x = d_output, .order = rows.order, .per_token = per_token, .y = d_rows});
    stack.forward(x, gate_up);
    call.linear_dx(d_rows, p.down, d_act);
    ops.expert_gate_backward(s, {.gate_up = gate_up,
                                 .order = rows.order,
                                 .weights = routing.weights,
                                 .gate = call.config.block.gate,
                                 .dy = d_act,
                                 .y = act,
                                 .d_gate_up = gate_up,
                                 .d_weights = sums.d_weights});
    if (trains) call.linear_dw(d_rows, act, p.down);
    if (trains) stack.backward_weight(gate_up, x);
    stack.backward_input(gate_up, d_rows);
    ops.add_rows(s, {.x = d_rows, .order = rows.order, .per_token = per_token, .sum = sums.rows});
  }
}

}  // namespace zg::model
