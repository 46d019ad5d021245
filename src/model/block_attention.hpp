// The attention of a block, over whole sequences or over this rank's part of them.
//
// In a ring, the keys and values of the other parts pass by, and each block of them is merged into the
// result. In the backward they pass by again, with their gradients behind them, which each part adds to: what
// comes home has the sums of all. Ulysses exchanges queries, keys and values before, and what attention gives
// after, so that between the two a rank has some of the heads over whole sequences.
#pragma once
#include <vector>

#include "model/call.hpp"

namespace zg::model {

// What attention keeps for the backward; `qkv` and `whole` are of this rank's heads over whole sequences with
// Ulysses, and `whole` is null otherwise.
struct SavedAttention {
  View qkv;    // [N, (heads + 2 kv_heads) * head_size]
  View att;    // [N, heads * head_size]: the result
  View lse;    // [sequences * heads, time]
  View whole;  // as many elements as att
  SavedAttention() = default;
  SavedAttention(BufferPlan& plan, const ModelConfig& c, DType dtype, BatchShape shape);
};

struct AttentionWorkspace {
  View scratch;  // of the ops; null where they need none
  // Ring: the sums of the result, or of the gradients of queries; keys and values that pass by, two of each,
  // and their gradients.
  View sums, kv[2], dkv[2];
  // Ulysses: q, k and v of this rank's rows, or their gradients over whole sequences; what is exchanged; and
  // the gradient of the result over whole sequences.
  View qkv, packed, d_whole;
  AttentionWorkspace() = default;
  AttentionWorkspace(BufferPlan& plan, const ModelConfig& c, DType dtype, BatchShape shape,
                     const AttentionRule& rule, const OpSizes& sizes);
};

// How a layer, counted from 0, attends to the sequences of a batch. A window as long as these hides nothing.
AttentionRule attention_rule(const ModelConfig& c, std::int64_t layer, const BatchShape& shape);

// Where a block puts q, k and v of its rows for attention_forward().
View attention_input(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w);
void attention_forward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w);
// d_att is the gradient of saved.att; d_qkv [N, ...] is overwritten with that of attention_input().
void attention_backward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w,
                        const View& d_att, const View& d_qkv);

// Block::context_calls().
std::vector<ContextCall> context_calls(const ModelConfig& c, DType dtype, BatchShape shape,
                                       Direction direction);

}  // namespace zg::model
