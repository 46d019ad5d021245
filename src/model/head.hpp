// The head: final norm, output matrix and loss, in chunks of rows so that the logits are never whole.
#pragma once
#include <cstdint>

#include "model/call.hpp"

namespace zg::model {

// Rows of logits held at once; a function of the sizes alone. Logits and their gradient take at most
// `bytes` (Ops::logits_bytes()), or half of what the output matrix's gradients take where that is more: each chunk reads and
// writes those gradients once, and more rows in a chunk make that cheaper.
std::int64_t head_chunk_rows(const ModelConfig& config, DType dtype, std::int64_t rows, std::int64_t bytes);

// Of workspace.
std::int64_t head_bytes(const ModelConfig& config, DType dtype, std::int64_t rows, const OpSizes& sizes,
                        std::int64_t logits_bytes);

// The call's unit is the head. `table` and `d_table` are the output matrix and its gradients, [V, C]. All
// gradients are times loss_scale.
void head_backward(const Call& call, View table, View d_table, View x, View targets, View loss_sum, View dx,
                   void* workspace, double loss_scale);
void head_loss(const Call& call, View table, View x, View targets, View loss_sum, void* workspace);
void head_logits(const Call& call, View table, View x, View logits, void* workspace);

}  // namespace zg::model
