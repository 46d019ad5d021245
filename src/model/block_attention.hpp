// The attention of a block, over whole sequences or over this rank's shard of them.
//
// In a ring, the keys and values of all ranks are passed from rank to rank, and each rank merges its
// attention to each block of them into its result. In the backward they are passed around again, each block
// followed by its gradients, to which every rank adds; after the full circle a rank receives the complete
// gradients of its own keys and values. Ulysses exchanges queries, keys and values before attention, and the
// result after it, so that in between a rank has some of the heads over whole sequences.
#pragma once
#include <vector>

#include "model/call.hpp"

namespace zg::model {

// Buffers that attention saves for the backward. With Ulysses, `qkv` and `whole` are for this rank's heads
// over whole sequences; otherwise `whole` is null.
struct SavedAttention {
  View qkv;    // [N, the columns of queries, keys and values]
  View att;    // [N, result_columns()]: the result
  View lse;    // [sequences * heads, time]
  View whole;  // Ulysses: the result for this rank's heads; as many elements as att
  SavedAttention() = default;
  SavedAttention(BufferPlan& plan, const ModelConfig& c, DType dtype, BatchShape shape);
};

struct AttentionWorkspace {
  View scratch;  // scratch of the attention ops; null if they need none
  // Ring: the sums of the result, and in the same memory of the gradients of queries; two buffers for keys
  // and values that are passed around, and two for their gradients.
  View sums, d_queries, kv[2], dkv[2];
  // Ulysses: q, k and v of this rank's rows, or their gradients over whole sequences; the packed operand of
  // the exchange; and the gradient of the result over whole sequences.
  View qkv, packed, d_whole;
  AttentionWorkspace() = default;
  AttentionWorkspace(BufferPlan& plan, const ModelConfig& c, DType dtype, BatchShape shape,
                     const AttentionRule& rule, const OpSizes& sizes);
};

// The attention rule of a layer (from 0) for a batch. A window as long as the sequences is dropped, since it
// hides nothing.
AttentionRule attention_rule(const ModelConfig& c, std::int64_t layer, const BatchShape& shape);

// The buffer into which a block writes q, k and v of its rows for attention_forward().
View attention_input(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w);
void attention_forward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w);
// d_att is the gradient of saved.att; d_qkv [N, ...] is overwritten with the gradient of attention_input().
void attention_backward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w,
                        const View& d_att, const View& d_qkv);

// Block::context_calls().
std::vector<ContextCall> context_calls(const ModelConfig& c, DType dtype, BatchShape shape,
                                       Direction direction);

}  // namespace zg::model
