#include "model/expert_block.hpp"

#include "model/adapters.hpp"
#include "model/routing.hpp"
#include "model/stack.hpp"
#include "model/tensor_shard.hpp"

namespace zg::model {
namespace {

// Scratch for the rows of one expert, at most G: a token has an expert once. I = width inside an expert.
struct ExpertWorkspace {
  View x;             // T [G,C]: the expert's inputs; a forward overwrites them with its outputs
  View gate_up, act;  // T [G,2I], T [G,I]
  // The backward needs these: the gradients of the experts' outputs, T [G,C], which the gradients of their
  // inputs then overwrite; and the gradient of act, T [G,I].
  View d_output, d_act;
  View bias_partials;  // A [row groups, widest bias], where experts have biases
  // Of the adapters; what a forward saves for the backward is computed again there, with the products.
  AdapterSaved low;
  AdapterWorkspace adapters;
  std::int64_t bytes = 0;

  ExpertWorkspace(const ModelConfig& c, const TensorShard& shard, DType t, BatchShape shape,
                  const OpSizes& sizes, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = routed_rows(shard, shape), inner = c.experts.inner;
    x = plan.take(t, n, c.width);
    gate_up = plan.take(t, n, 2 * inner);
    act = plan.take(t, n, inner);
    d_output = plan.take(t, n, c.width);
    d_act = plan.take(t, n, inner);
    if (c.experts.biases)
      bias_partials = plan.take(accumulator_of(t), sizes.row_groups(), std::max(2 * inner, c.width));
    const AdapterList list = AdapterList::of_expert(c);
    low = AdapterSaved(plan, list, c.lora, t, n, Backward::kWhole);
    adapters = AdapterWorkspace(plan, list, c.lora, t, t, n);
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

// Whether this rank adds the bias of an expert's last product: of the ranks that share the expert, the first
// one does.
bool has_bias(const Call& call, const ExpertParams& p) {
  return p.down_bias != BlockParams::kNone && call.shard.index == 0;
}

// Adds to the gradients of the slots' weights what the bias of the last product contributes, and writes or
// adds the bias's own gradient. All ranks that share the expert have the whole gradients of its outputs.
struct BiasRows {
  View dy, order, room;  // T [M,C], i32 [1,M], and scratch T [M,C]
};
void bias_backward(const Call& call, std::size_t bias, const BiasRows& rows, const View& partials) {
  const bool trains = static_cast<bool>(call.grads), first = call.shard.index == 0;
  if (!trains && !first) return;
  const View weights = routing_of(call).weights, d_weights = sums_of(call).d_weights;
  call.ops.expert_bias_backward(call.stream, {.dy = rows.dy,
                                              .order = rows.order,
                                              .weights = weights,
                                              .bias = call.weight(bias),
                                              .d_weights = first ? d_weights : View(),
                                              .weighed = trains ? rows.room : View()});
  if (!trains) return;
  const View d_bias = call.grad(bias);
  if (call.into == Gradients::kOverwrite) call.ops.zero(call.stream, d_bias);
  call.ops.bias_backward(call.stream, rows.room, d_bias, partials.col_range(0, d_bias.cols));
}

}  // namespace

std::int64_t ExpertBlock::workspace_bytes(BatchShape batch, Backward) const {
  return ExpertWorkspace(config(), shape_.shard, shape_.dtype, batch, *shape_.sizes, nullptr).bytes;
}

std::vector<TensorParallelCall> ExpertBlock::exchanges(ModelCall call, BatchShape batch) const {
  using Kind = TensorParallelCall::Kind;
  const TensorShard& shard = shape_.shard;
  std::vector<TensorParallelCall> calls;
  if (!is_last()) return calls;
  const std::int64_t elements = residual_rows(shard, batch) * config().width,
                     own = batch.rows() * config().width;
  const bool shares = shard.experts.degree > 1;
  if (call == ModelCall::kExperts) {
    if (shares) calls.push_back({Kind::kReduceScatter, own, accumulator_of(shape_.dtype), true});
    if (shard.degree > 1) calls.push_back(sum_over_parts(shard, elements, shape_.dtype));
    return calls;
  }
  if (shard.sequence) calls.push_back({Kind::kAllGather, elements, shape_.dtype});
  for (int i = 0; shares && i < 2; ++i) calls.push_back({Kind::kAllGather, own, shape_.dtype, true});
  return calls;
}

double ExpertBlock::forward_products(std::int64_t) const {
  const Experts& e = shape_.whole.experts;
  const auto share = static_cast<double>(e.router.per_token) / static_cast<double>(e.count);
  const std::int64_t of_group = unit().expert_count * shape_.shard.experts.degree;
  return share * static_cast<double>(of_group * 3 * shape_.whole.width * e.inner);
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
  const ExpertSums sums = sums_of(call);
  const View sum = sums.rows, inputs = call.shares_experts() ? sums.x : routing.x;
  const ExpertWorkspace w(call.config, call.shard, call.dtype, call.shape, ops, call.workspace);
  const std::int64_t per_token = call.config.experts.router.per_token;
  for (std::int64_t i = 0; i < unit().expert_count; ++i) {
    const ExpertRows rows = rows_of(call, routing, unit().first_expert + i);
    if (rows.count() == 0) continue;
    ZG_ASSERT(static_cast<bool>(call.weights), "{} has rows, and no weights", unit().name);
    const ExpertParams p(call.config, i);
    const View x = rows.of(w.x), gate_up = rows.of(w.gate_up), act = rows.of(w.act);
    ops.gather_rows(s, {.x = inputs, .order = rows.order, .per_token = per_token, .y = x});
    const Adapters adapters(call, w.low, w.adapters, unit().first_expert + i, rows.order);
    Stack(call, p.gate, p.up, p.gate_bias).forward(x, gate_up);
    adapters.forward(AdapterInput::kGateUp, x, gate_up);
    ops.expert_gate(s, {.gate_up = gate_up,
                        .order = rows.order,
                        .weights = routing.weights,
                        .gate = call.config.block.gate,
                        .y = act});
    call.linear(act, p.down, {}, x);
    adapters.forward(AdapterInput::kDown, act, x);
    const bool biased = has_bias(call, p);
    ops.add_rows(s, {.x = x,
                     .order = rows.order,
                     .per_token = per_token,
                     .sum = sum,
                     .bias = biased ? call.weight(p.down_bias) : View(),
                     .weights = biased ? routing.weights : View()});
  }
  if (!is_last()) return;
  ZG_ASSERT(static_cast<bool>(call.output), "{} ends its layer without an output", unit().name);
  call.sum_rows(sum);
  const View outputs = w.x.row_range(0, call.shape.rows());
  ops.cast(s, call.own_rows(sum), outputs);
  ops.add(s, call.sum_of_parts(outputs), call.output, call.output);
}

void ExpertBlock::backward(const Call& call) const {
  Ops& ops = call.ops;
  Stream& s = call.stream;
  const Routing routing = routing_of(call);
  const ExpertSums sums = sums_of(call);
  const ExpertWorkspace w(call.config, call.shard, call.dtype, call.shape, ops, call.workspace);
  const std::int64_t per_token = call.config.experts.router.per_token;
  const bool trains = static_cast<bool>(call.grads), trains_adapters = static_cast<bool>(call.adapters.grads);
  if (is_last()) {
    ops.zero(s, sums.rows);
    if (call.shares_experts()) {
      ops.zero(s, sums.d_weights);  // this rank fills in its own experts' slots alone
      call.gather_rows(routing.x, sums.x);
      const View own = call.all_rows(call.activation_gradient, call.own_rows(sums.d_output));
      call.gather_rows(own, sums.d_output);
    } else {
      (void)call.all_rows(call.activation_gradient, sums.d_output);
    }
  }
  const View& d_output = sums.d_output ? sums.d_output : call.activation_gradient;
  const View& inputs = call.shares_experts() ? sums.x : routing.x;
  if (trains && call.into == Gradients::kOverwrite) clear_gaps(ops, s, call.grads, call.unit);
  // Experts without rows keep these zeros.
  if (trains_adapters && call.into == Gradients::kOverwrite) ops.zero(s, call.adapters.grads);
  for (std::int64_t i = unit().expert_count; i-- > 0;) {
    const ExpertRows rows = rows_of(call, routing, unit().first_expert + i);
    const ExpertParams p(call.config, i);
    if (rows.count() == 0) {
      if (!trains || call.into == Gradients::kAdd) continue;
      for (std::size_t param = p.begin; param < p.end; ++param) ops.zero(s, call.grad(param));
      continue;
    }
    const View x = rows.of(w.x), gate_up = rows.of(w.gate_up), act = rows.of(w.act), d_act = rows.of(w.d_act),
               d_rows = rows.of(w.d_output);
    const Stack stack(call, p.gate, p.up, p.gate_bias, w.bias_partials);
    const Adapters adapters(call, w.low, w.adapters, unit().first_expert + i, rows.order);
    ops.gather_rows(s, {.x = inputs, .order = rows.order, .per_token = per_token, .y = x});
    ops.gather_rows(s, {.x = d_output, .order = rows.order, .per_token = per_token, .y = d_rows});
    stack.forward(x, gate_up);
    adapters.forward(AdapterInput::kGateUp, x, gate_up);
    call.linear_dx(d_rows, p.down, d_act);
    adapters.backward_input(AdapterInput::kDown, d_rows, d_act);
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
    if (p.down_bias != BlockParams::kNone)
      bias_backward(call, p.down_bias, {d_rows, rows.order, x}, w.bias_partials);
    if (trains_adapters) {
      adapters.forward(AdapterInput::kDown, act, {});
      adapters.backward_weight(AdapterInput::kDown, d_rows, act);
    }
    stack.backward_input(gate_up, d_rows);
    adapters.backward_input(AdapterInput::kGateUp, gate_up, d_rows);
    if (trains_adapters) adapters.backward_weight(AdapterInput::kGateUp, gate_up, x);
    ops.add_rows(s, {.x = d_rows, .order = rows.order, .per_token = per_token, .sum = sums.rows});
  }
}

}  // namespace zg::model
