// The ops for mixtures of experts over a backend: the part of CheckedOps (checked_ops.hpp) that checks their
// operands.
#pragma once
#include "device/checked_operands.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/router_arguments.hpp"

// Expands op(name) as ZG_FOR_PLAIN_OPS does. sort_slots() is one, too, but has no storage type.
#define ZG_FOR_ROUTER_OPS(op)                                                               \
  op(route) op(route_backward) op(router_sums) op(gather_rows) op(add_rows) op(expert_gate) \
      op(expert_gate_backward) op(expert_bias_backward)

namespace zg::checked {

inline void expect_rule(const RouterRule& rule, std::int64_t experts) {
  ZG_ASSERT(experts >= 1 && experts <= kMaxExperts, "{} experts", experts);
  ZG_ASSERT(rule.groups >= 1 && experts % rule.groups == 0, "{} groups of {} experts", rule.groups, experts);
  ZG_ASSERT(rule.kept_groups >= 1 && rule.kept_groups <= rule.groups, "{} of {} groups", rule.kept_groups,
            rule.groups);
  const std::int64_t of_group = experts / rule.groups;
  ZG_ASSERT(rule.groups == 1 || rule.group_score == GroupScore::kLargest || of_group >= 2,
            "the two largest of {} experts", of_group);
  ZG_ASSERT(rule.per_token >= 1 && rule.per_token <= rule.kept_groups * of_group,
            "{} experts a token, of {} groups of {}", rule.per_token, rule.kept_groups, of_group);
  ZG_ASSERT(rule.scale > 0 && rule.epsilon >= 0 && rule.least_sum >= 0,
            "weights with a scale of {}, an epsilon of {}, a least sum of {}", rule.scale, rule.epsilon,
            rule.least_sum);
}
inline void expect_slots(const View& chosen, std::int64_t tokens, std::int64_t per_token) {
  expect(chosen, "chosen", DType::kI32, tokens, per_token);
  ZG_ASSERT_LT(tokens * per_token, std::int64_t{1} << 31);
}
// `parts` equal parts of the tokens have a row each.
inline void expect_parts(std::int64_t tokens, std::int64_t parts) {
  ZG_ASSERT(parts >= 1 && tokens % parts == 0, "{} parts of {} tokens", parts, tokens);
}
inline const std::int32_t* expect_order(const View& order, std::int64_t rows, std::int64_t per_token) {
  ZG_ASSERT_GE(per_token, 1);
  expect(order, "order", DType::kI32, 1, rows);
  return order.as<std::int32_t>();
}
inline void expect_expert(const View& gate_up, const View& weights, const View& y) {
  const DType t = gate_up.dtype;
  ZG_ASSERT_EQ(gate_up.cols % 2, 0);
  expect(gate_up, "gate_up", t, gate_up.rows, gate_up.cols);
  expect(weights, "weights", acc_of(t), weights.rows, weights.cols);
  expect(y, "y", t, gate_up.rows, gate_up.cols / 2);
}

// Calls f<A>() with A = this type of logits.
template <class F>
void with_acc(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f.template operator()<double>();
  ZG_ASSERT_EQ(dtype, DType::kF32);
  f.template operator()<float>();
}

template <class Backend>
class CheckedRouterOps : public Ops {
 public:
  template <class... Args>
  explicit CheckedRouterOps(Args&&... args) : backend_(std::forward<Args>(args)...) {}

  void route(Stream& s, const RouteArgs& args) override {
    const View &logits = args.logits, &bias = args.choice_bias;
    const DType a = logits.dtype;
    expect_rule(args.rule, logits.cols);
    expect(logits, "logits", a, logits.rows, logits.cols);
    if (bias) expect(bias, "choice_bias", a, 1, logits.cols);
    expect_slots(args.chosen, logits.rows, args.rule.per_token);
    expect(args.weights, "weights", a, logits.rows, args.rule.per_token);
    with_acc(a, [&]<class A>() {
      backend_.template route<A>(s, extent_of(logits),
                                 Route<A>{.logits = strided<A>(logits),
                                          .choice_bias = strided<A>(bias).data,
                                          .rule = args.rule,
                                          .chosen = strided<std::int32_t>(args.chosen),
                                          .weights = strided<A>(args.weights)});
    });
  }

  void route_backward(Stream& s, const RouteBackwardArgs& args) override {
    const View &logits = args.logits, &d_logits = args.d_logits;
    const std::int64_t tokens = logits.rows;
    const DType a = acc_of(d_logits.dtype);
    expect_rule(args.rule, logits.cols);
    expect(logits, "logits", a, tokens, logits.cols);
    expect_slots(args.chosen, tokens, args.rule.per_token);
    expect(args.weights, "weights", a, tokens, args.rule.per_token);
    expect(args.d_weights, "d_weights", a, tokens, args.rule.per_token);
    expect(d_logits, "d_logits", d_logits.dtype, tokens, logits.cols);
    if (args.balance) {
      expect_parts(tokens, args.balance.rows);
      expect(args.balance, "balance", a, args.balance.rows, logits.cols);
    }
    with_type(d_logits.dtype, [&]<class T>() {
      using A = Acc<T>;
      backend_.template route_backward<T>(
          s, extent_of(logits),
          RouteBackward<T>{.logits = strided<A>(logits),
                           .chosen = strided<std::int32_t>(args.chosen),
                           .weights = strided<A>(args.weights),
                           .d_weights = strided<A>(args.d_weights),
                           .rule = args.rule,
                           .balance = strided<A>(args.balance),
                           .tokens_per_part = args.balance ? tokens / args.balance.rows : 1,
                           .z_factor = args.z_factor,
                           .d_logits = strided<T>(d_logits)});
    });
  }

  void router_sums(Stream& s, const RouterSumsArgs& args) override {
    const View &logits = args.logits, &sums = args.sums;
    const DType a = logits.dtype;
    expect_rule(args.rule, logits.cols);
    expect(logits, "logits", a, logits.rows, logits.cols);
    expect_slots(args.chosen, logits.rows, args.rule.per_token);
    expect_parts(logits.rows, sums.rows);
    expect(sums, "sums", a, sums.rows, 2 * logits.cols + 1);
    expect_row_scratch(args.scratch, a, row_groups(), sums.cols);
    with_acc(a, [&]<class A>() {
      backend_.template router_sums<A>(s, extent_of(logits),
                                       RouterSums<A>{.logits = strided<A>(logits),
                                                     .chosen = strided<std::int32_t>(args.chosen),
                                                     .rule = args.rule,
                                                     .parts = sums.rows,
                                                     .sums = strided<A>(sums),
                                                     .scratch = strided<A>(args.scratch)});
    });
  }

  void sort_slots(Stream& s, const SortSlotsArgs& args) override {
    const View &chosen = args.chosen, &starts = args.starts;
    const std::int64_t experts = starts.cols - 1;
    ZG_ASSERT(experts >= 1 && experts <= kMaxExperts, "{} experts", experts);
    ZG_ASSERT(chosen.cols >= 1 && chosen.cols <= experts, "{} of {} experts a token", chosen.cols, experts);
    expect_slots(chosen, chosen.rows, chosen.cols);
    expect(starts, "starts", DType::kI32, 1, experts + 1);
    expect(args.order, "order", DType::kI32, 1, chosen.count());
    expect_row_scratch(args.scratch, DType::kI32, row_groups(), experts);
    backend_.sort_slots(s, Extent{chosen.rows, experts},
                        SortSlots{.chosen = strided<std::int32_t>(chosen),
                                  .per_token = chosen.cols,
                                  .starts = starts.as<std::int32_t>(),
                                  .order = args.order.as<std::int32_t>(),
                                  .scratch = strided<std::int32_t>(args.scratch)});
  }

  void gather_rows(Stream& s, const GatherRowsArgs& args) override {
    const View &x = args.x, &y = args.y;
    const std::int32_t* const order = expect_order(args.order, y.rows, args.per_token);
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(y, "y", x.dtype, y.rows, x.cols);
    with_type(x.dtype, [&]<class T>() {
      backend_.template gather_rows<T>(
          s, extent_of(y),
          GatherRows<T>{.x = strided<T>(x), .order = order, .per_token = args.per_token, .y = strided<T>(y)});
    });
  }

  void add_rows(Stream& s, const AddRowsArgs& args) override {
    const View &x = args.x, &sum = args.sum;
    const std::int32_t* const order = expect_order(args.order, x.rows, args.per_token);
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(sum, "sum", acc_of(x.dtype), sum.rows, x.cols);
    ZG_ASSERT_EQ(static_cast<bool>(args.bias), static_cast<bool>(args.weights));
    if (args.bias) {
      expect(args.bias, "bias", x.dtype, 1, x.cols);
      expect(args.weights, "weights", acc_of(x.dtype), sum.rows, args.per_token);
    }
    with_type(x.dtype, [&]<class T>() {
      backend_.template add_rows<T>(s, extent_of(x),
                                    AddRows<T>{.x = strided<T>(x),
                                               .order = order,
                                               .per_token = args.per_token,
                                               .sum = strided<Acc<T>>(sum),
                                               .bias = strided<T>(args.bias).data,
                                               .weights = strided<Acc<T>>(args.weights)});
    });
  }

  void expert_bias_backward(Stream& s, const ExpertBiasBackwardArgs& args) override {
    const View &dy = args.dy, &weights = args.weights;
    const DType t = dy.dtype;
    const std::int32_t* const order = expect_order(args.order, dy.rows, weights.cols);
    expect(dy, "dy", t, dy.rows, dy.cols);
    expect(weights, "weights", acc_of(t), weights.rows, weights.cols);
    expect(args.bias, "bias", t, 1, dy.cols);
    if (args.d_weights) expect(args.d_weights, "d_weights", acc_of(t), weights.rows, weights.cols);
    if (args.weighed) expect(args.weighed, "weighed", t, dy.rows, dy.cols);
    with_type(t, [&]<class T>() {
      using A = Acc<T>;
      backend_.template expert_bias_backward<T>(s, extent_of(dy),
                                                ExpertBiasBackward<T>{.dy = strided<T>(dy),
                                                                      .order = order,
                                                                      .weights = strided<A>(weights),
                                                                      .per_token = weights.cols,
                                                                      .bias = strided<T>(args.bias).data,
                                                                      .d_weights = strided<A>(args.d_weights),
                                                                      .weighed = strided<T>(args.weighed)});
    });
  }

  void expert_gate(Stream& s, const ExpertGateArgs& args) override {
    const View &gate_up = args.gate_up, &weights = args.weights, &y = args.y;
    expect_expert(gate_up, weights, y);
    const std::int32_t* const order = expect_order(args.order, gate_up.rows, weights.cols);
    with_type(gate_up.dtype, [&]<class T>() {
      backend_.template expert_gate<T>(s, extent_of(y),
                                       ExpertGate<T>{.gate_up = strided<T>(gate_up),
                                                     .order = order,
                                                     .weights = strided<Acc<T>>(weights),
                                                     .per_token = weights.cols,
                                                     .gate = args.gate,
                                                     .y = strided<T>(y)});
    });
  }

  void expert_gate_backward(Stream& s, const ExpertGateBackwardArgs& args) override {
    const View &gate_up = args.gate_up, &weights = args.weights, &y = args.y;
    const DType t = gate_up.dtype;
    expect_expert(gate_up, weights, y);
    const std::int32_t* const order = expect_order(args.order, gate_up.rows, weights.cols);
    expect(args.dy, "dy", t, y.rows, y.cols);
    expect(args.d_gate_up, "d_gate_up", t, gate_up.rows, gate_up.cols);
    expect(args.d_weights, "d_weights", acc_of(t), weights.rows, weights.cols);
    with_type(t, [&]<class T>() {
      using A = Acc<T>;
      backend_.template expert_gate_backward<T>(
          s, extent_of(y),
          ExpertGateBackward<T>{.gate_up = strided<T>(gate_up),
                                .order = order,
                                .weights = strided<A>(weights),
                                .per_token = weights.cols,
                                .gate = args.gate,
                                .dy = strided<T>(args.dy),
                                .y = strided<T>(y),
                                .d_gate_up = strided<T>(args.d_gate_up),
                                .d_weights = strided<A>(args.d_weights)});
    });
  }

 protected:
  Backend backend_;
};

}  // namespace zg::checked
