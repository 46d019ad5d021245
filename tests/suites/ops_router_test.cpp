// The device's ops for mixtures of experts against the same ops in plain fp64 loops, as ops_test.cpp has it
// for the others.
#include "tests/suites/ops_operands.hpp"

namespace zg::test {
namespace {

template <class T>
class RouterOps : public testing::Test {};
TYPED_TEST_SUITE(RouterOps, StorageTypes);

constexpr std::int64_t kTokens = 6, kExperts = 8, kChoices = 3, kColumns = 13;

// A layer's routing, forward and backward, by each of the rules.
TYPED_TEST(RouterOps, Routes) {
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const bool all : {false, true}) {
      const RouterRule rule{.score = score,
                            .per_token = kChoices,
                            .renormalize = all,
                            .epsilon = all ? 1e-3 : 0,
                            .scale = all ? 2.5 : 1,
                            .groups = all ? 4 : 1,
                            .kept_groups = all ? 2 : 1};
      Operands<TypeParam> o;
      const auto logits = o.a(kTokens, kExperts), weights = o.a(kTokens, kChoices),
                 d_weights = o.a(kTokens, kChoices), bias = o.a_dense(1, kExperts),
                 balance = o.a(2, kExperts), sums = o.a(3, 2 * kExperts + 1);
      const auto d_logits = o.t(kTokens, kExperts);
      const auto chosen = o.id_matrix(kTokens, kChoices);
      const auto scratch = o.scratch(o.device().ops().row_groups(), 2 * kExperts + 1);
      o.run([&](Ops& ops, Stream& s, auto pick) {
        ops.route(s, {.logits = pick(logits),
                      .choice_bias = all ? pick(bias) : View(),
                      .rule = rule,
                      .chosen = pick(chosen),
                      .weights = pick(weights)});
        ops.route_backward(s, {.logits = pick(logits),
                               .chosen = pick(chosen),
                               .weights = pick(weights),
                               .d_weights = pick(d_weights),
                               .rule = rule,
                               .balance = all ? pick(balance) : View(),
                               .z_factor = all ? 0.1 : 0,
                               .d_logits = pick(d_logits)});
        ops.router_sums(s, {.logits = pick(logits),
                            .chosen = pick(chosen),
                            .rule = rule,
                            .sums = pick(sums),
                            .scratch = pick(scratch)});
      });
    }
  }
}

// What the experts do with their rows.
TYPED_TEST(RouterOps, ComputesExperts) {
  for (const Gate gate : {Gate::kSilu, Gate::kGeluTanh, Gate::kClampedPairs}) {
    Operands<TypeParam> o;
    const auto chosen = o.ids({0, 2, 1, 2, 0, 1, 0, 2, 1, 2, 0, 1}, 2);
    const auto starts = o.id_matrix(1, 4), order = o.id_matrix(1, 2 * kTokens);
    const auto counts = o.id_scratch(o.device().ops().row_groups(), 3);
    const auto tokens = o.t(kTokens, 2 * kColumns), rows = o.t(4, 2 * kColumns), y = o.t(4, kColumns),
               dy = o.t(4, kColumns), d_rows = o.t(4, 2 * kColumns), again = o.t(4, kColumns);
    const auto bias = o.t(1, kColumns), weighed = o.t(4, kColumns), more = o.t(4, kColumns);
    const auto weights = o.a(kTokens, 2), d_weights = o.a(kTokens, 2), sum = o.a(kTokens, kColumns);
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.sort_slots(
          s, {.chosen = pick(chosen), .starts = pick(starts), .order = pick(order), .scratch = pick(counts)});
      const View expert = pick(order).col_range(4, 4);  // the second expert's slots: each has four
      ops.gather_rows(s, {.x = pick(tokens), .order = expert, .per_token = 2, .y = pick(rows)});
      ops.expert_gate(
          s, {.gate_up = pick(rows), .order = expert, .weights = pick(weights), .gate = gate, .y = pick(y)});
      ops.expert_gate_backward(s, {.gate_up = pick(rows),
                                   .order = expert,
                                   .weights = pick(weights),
                                   .gate = gate,
                                   .dy = pick(dy),
                                   .y = pick(again),
                                   .d_gate_up = pick(d_rows),
                                   .d_weights = pick(d_weights)});
      ops.add_rows(s, {.x = pick(y), .order = expert, .per_token = 2, .sum = pick(sum)});
      ops.add_rows(s, {.x = pick(y),
                       .order = expert,
                       .per_token = 2,
                       .sum = pick(sum),
                       .bias = pick(bias),
                       .weights = pick(weights)});
      ops.expert_bias_backward(s, {.dy = pick(more),
                                   .order = expert,
                                   .weights = pick(weights),
                                   .bias = pick(bias),
                                   .d_weights = pick(d_weights),
                                   .weighed = pick(weighed)});
    });
  }
}

}  // namespace
}  // namespace zg::test
