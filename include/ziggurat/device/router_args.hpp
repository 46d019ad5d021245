// Operands of the ops for mixtures of experts, as op_args.hpp has them for other ops. N tokens, E experts, K
// = RouterRule::per_token, C width, I an expert's inner width.
//
// A slot is one of a token's K choices: slot n * K + j is choice j of token n. The slots of all tokens,
// sorted by expert and then by token, are the routed rows: those of an expert are neighbours, and their
// tokens ascend. Ops that compute one expert are given a range of M routed rows, as the slots in this range.
#pragma once
#include "ziggurat/base/view.hpp"
#include "ziggurat/kernels/router.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

struct RouteArgs {
  View logits = {};       // A [N,E]
  View choice_bias = {};  // A [1,E], or null
  RouterRule rule = {};
  View chosen = {};   // i32 [N,K], written: the token's experts, ascending
  View weights = {};  // A [N,K], written
};

// The probabilities p of balance terms are the softmax of a token's logits, or for RouterScore::kSigmoid the
// scores divided by their sum.
struct RouteBackwardArgs {
  View logits = {}, chosen = {}, weights = {};  // as in route()
  View d_weights = {};                          // A [N,K]: the gradient of the weights
  RouterRule rule = {};
  // A [S,E] with S a divisor of N, or null: factors of p. The loss includes the sum over tokens n and experts
  // e of balance[n / (N / S), e] * p[n, e].
  View balance = {};
  // The loss includes z_factor * the sum over tokens of the squared log-sum-exp of their logits.
  double z_factor = 0;
  View d_logits = {};  // T [N,E], written
};

struct RouterSumsArgs {
  View logits = {}, chosen = {};  // as in route()
  RouterRule rule = {};
  // A [S, 2E + 1] with S a divisor of N, written. Row s sums over tokens [s * N / S, (s + 1) * N / S), in a
  // fixed order: first E sums of p, then E numbers of slots, then the sum of squared log-sum-exps of logits.
  View sums = {};
  View scratch = {};  // A [row_groups(), at least 2E + 1]
};

struct SortSlotsArgs {
  View chosen = {};   // i32 [N,K] as route() writes it
  View starts = {};   // i32 [1,E+1], written: routed rows [starts[e], starts[e + 1]) are of expert e
  View order = {};    // i32 [1,N*K], written: the slot of each routed row
  View scratch = {};  // i32 [row_groups(), at least E]
};

struct GatherRowsArgs {
  View x = {};      // T [N,C]
  View order = {};  // i32 [1,M]: slots
  std::int64_t per_token = 1;
  View y = {};  // T [M,C], written: the rows of the slots' tokens
};

struct AddRowsArgs {
  View x = {};      // T [M,C]
  View order = {};  // i32 [1,M]: slots of M different tokens
  std::int64_t per_token = 1;
  View sum = {};  // A [N,C]; each row of x is added to the row of its slot's token
  // T [1,C] and A [N,K], or both null: each row of x is added together with its slot's weight times the bias.
  View bias = {}, weights = {};
};

struct ExpertBiasBackwardArgs {
  View dy = {};         // T [M,C]: the gradient of the tokens' rows
  View order = {};      // i32 [1,M]: slots
  View weights = {};    // A [N,K]
  View bias = {};       // T [1,C]
  View d_weights = {};  // A [N,K], or null; to each slot's the dot product of dy and the bias is added
  View weighed = {};    // T [M,C], or null; written: dy times the slot's weight, whose column sums are the
                        // gradient of the bias
};

struct ExpertGateArgs {
  View gate_up = {};  // T [M,2I], in columns as `gate` has them
  View order = {};    // i32 [1,M]: slots
  View weights = {};  // A [N,K]
  Gate gate = Gate::kSilu;
  View y = {};  // T [M,I], written: the activation times the slot's weight
};

struct ExpertGateBackwardArgs {
  View gate_up = {}, order = {}, weights = {};  // as in expert_gate()
  Gate gate = Gate::kSilu;
  View dy = {};         // T [M,I]
  View y = {};          // T [M,I], written: the bits of expert_gate(); may be dy
  View d_gate_up = {};  // T [M,2I], written; may be gate_up
  View d_weights = {};  // A [N,K]; of each slot the dot product of dy and the activation is written
};

}  // namespace zg
