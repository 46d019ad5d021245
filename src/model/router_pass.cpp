#include "model/router_pass.hpp"

#include "model/dense_call.hpp"

namespace zg::model {
namespace {

// The gate of the MLP that all tokens pass is a router over one expert, which every token has.
constexpr RouterRule kSharedGate{.score = RouterScore::kSigmoid};

bool has_mlp(const DenseCall& b) {
  return b.p.gate != kNone;
}
bool has_gate(const DenseCall& b) {
  return b.p.shared_gate != kNone;
}

// The MLP's activation from its input x.
void activate(const DenseCall& b, const View& x) {
  b.gate_up().forward(x, b.f.gate_up);
  b.adapters.forward(AdapterInput::kGateUp, x, b.f.gate_up);
  if (!has_gate(b)) return b.ops.swiglu(b.s, b.f.gate_up, b.f.act, b.c.block.gate);
  const SharedGate& gate = b.f.shared_gate;
  b.call.linear(x, b.call.weight(b.p.shared_gate), {}, gate.logits);
  b.ops.route(b.s,
              {.logits = gate.logits, .rule = kSharedGate, .chosen = gate.chosen, .weights = gate.weights});
  b.ops.sort_slots(b.s, {.chosen = gate.chosen,
                         .starts = gate.starts,
                         .order = gate.order,
                         .scratch = b.w.sorting.col_range(0, 1)});
  b.ops.expert_gate(b.s, {.gate_up = b.f.gate_up,
                          .order = gate.order,
                          .weights = gate.weights,
                          .gate = b.c.block.gate,
                          .y = b.f.act});
}

// Adds the gradient of the MLP's input to `sum`; dy is the gradient of its output.
void mlp_backward(const DenseCall& b, const View& dy, const View& x, const View& sum) {
  const bool trains = static_cast<bool>(b.call.grads),
             trains_adapters = static_cast<bool>(b.call.adapters.grads);
  if (trains) b.weight_gradient(b.mlp, dy);
  b.call.linear_dx(dy, b.p.down, b.w.d_act);
  b.adapters.backward_input(AdapterInput::kDown, dy, b.w.d_act);
  if (trains_adapters) b.adapters.backward_weight(AdapterInput::kDown, dy, b.f.act);
  if (has_gate(b)) {
    const SharedGate& gate = b.f.shared_gate;
    b.ops.expert_gate_backward(b.s, {.gate_up = b.f.gate_up,
                                     .order = gate.order,
                                     .weights = gate.weights,
                                     .gate = b.c.block.gate,
                                     .dy = b.w.d_act,
                                     .y = b.f.act,
                                     .d_gate_up = b.f.gate_up,
                                     .d_weights = b.w.d_shared_weights});
    b.call.sum_numbers(b.w.d_shared_weights);
    b.ops.route_backward(b.s, {.logits = gate.logits,
                               .chosen = gate.chosen,
                               .weights = gate.weights,
                               .d_weights = b.w.d_shared_weights,
                               .rule = kSharedGate,
                               .d_logits = b.w.d_shared_logits});
    if (trains) b.call.linear_dw(b.w.d_shared_logits, x, b.call.grad(b.p.shared_gate));
    if (b.call.shard.index == 0)
      b.call.linear_dx_more(b.w.d_shared_logits, b.call.weight(b.p.shared_gate), sum);
  } else {
    b.ops.swiglu_backward(b.s, b.f.gate_up, b.w.d_act, b.f.gate_up, b.c.block.gate);
  }
  b.gate_up().backward_input(b.f.gate_up, sum, Gradients::kAdd);
  b.adapters.backward_input(AdapterInput::kGateUp, b.f.gate_up, sum);
  if (trains) b.gate_up().backward_weight(b.f.gate_up, x);
  if (trains_adapters) b.adapters.backward_weight(AdapterInput::kGateUp, b.f.gate_up, x);
}

// Logits are of the accumulator's type, in which products add no bias.
void router_logits(const DenseCall& b, const View& x, const View& logits) {
  const View router = b.call.weight(b.p.router);
  if (b.p.router_bias == kNone) return b.call.linear(x, router, {}, logits);
  const View bias = b.call.weight(b.p.router_bias);
  b.ops.cast(b.s, View(bias.data, bias.dtype, logits.rows, logits.cols, 0), logits);
  b.call.linear_more(x, router, logits);
}

}  // namespace

void router_forward(const DenseCall& b) {
  const Call& call = b.call;
  const Routing routing = routing_of(call);
  const ExpertSums sums = sums_of(call);
  const View x = call.all_rows(b.norm2(), routing.x);
  const bool again = call.model_call == ModelCall::kBlockAgain;
  PendingCollective inputs;
  if (!again) {
    inputs = call.begin_gather_rows(x, sums.x);  // while the router decides
    const View chosen = call.own_rows(routing.chosen), weights = call.own_rows(routing.weights);
    router_logits(b, x, routing.logits);
    b.ops.route(b.s, {.logits = routing.logits,
                      .choice_bias = call.experts.choice_bias,
                      .rule = b.c.experts.router,
                      .chosen = chosen,
                      .weights = weights});
    inputs.end();
    call.gather_rows(chosen, routing.chosen);
    call.gather_rows(weights, routing.weights);
    b.ops.sort_slots(
        b.s,
        {.chosen = routing.chosen, .starts = routing.starts, .order = routing.order, .scratch = b.w.sorting});
    if (call.experts.sums_tokens) {
      b.ops.router_sums(b.s, {.logits = routing.logits,
                              .chosen = chosen,
                              .rule = b.c.experts.router,
                              .sums = routing.sums,
                              .scratch = b.w.summing});
    }
  }
  if (has_mlp(b)) activate(b, x);
  if (again) return b.adapters.forward(AdapterInput::kDown, b.f.act, {});
  const View sum = call.own_rows(sums.rows);
  if (call.shares_experts()) b.ops.zero(b.s, sums.rows);
  if (has_mlp(b)) {
    call.linear(b.f.act, b.p.down, {}, b.w.d_norm);
    b.adapters.forward(AdapterInput::kDown, b.f.act, b.w.d_norm);
    b.ops.cast(b.s, b.w.d_norm, sum);
  } else if (!call.shares_experts()) {
    b.ops.zero(b.s, sum);
  }
  b.ops.cast(b.s, b.f.x1, call.output);
}

View router_backward(const DenseCall& b, const View& dx) {
  const Call& call = b.call;
  const Routing routing = routing_of(call);
  const ExpertSums sums = sums_of(call);
  const View sum = call.own_rows(sums.rows), d_weights = call.own_rows(sums.d_weights);
  call.sum_rows(sums.rows);
  call.sum_rows(sums.d_weights);
  call.sum_numbers(d_weights);
  if (has_mlp(b)) mlp_backward(b, call.shard.sequence ? call.own_rows(sums.d_output) : dx, routing.x, sum);
  b.ops.route_backward(b.s, {.logits = routing.logits,
                             .chosen = call.own_rows(routing.chosen),
                             .weights = call.own_rows(routing.weights),
                             .d_weights = d_weights,
                             .rule = b.c.experts.router,
                             .balance = call.experts.balances ? sums.balance : View(),
                             .z_factor = call.experts.z_factor,
                             .d_logits = b.w.d_logits});
  if (call.grads) {
    const View d_router = call.grad(b.p.router);
    b.p.router_bias == kNone
        ? call.linear_dw(b.w.d_logits, routing.x, d_router)
        : call.linear_dw_db(b.w.d_logits, routing.x, d_router, call.grad(b.p.router_bias), b.w.bias_partials);
  }
  // All ranks have the same gradient of the logits; the sum over ranks counts it once.
  if (call.shard.index == 0) call.linear_dx_more(b.w.d_logits, call.weight(b.p.router), sum);
  b.ops.cast(b.s, sum, b.w.d_norm);
  return b.w.d_norm;
}

}  // namespace zg::model
