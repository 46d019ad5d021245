// One transformer block:
//
//   x1 = x + o(attention(rotate(q), rotate(k), v)),  out = x1 + down(gate(g) * up)  or  x1 + down(gelu(fc))
//
// Norms stand before the two branches, behind them, or both; queries and keys may be normalised before they
// rotate. FamilyForm and BlockDescription say what a model has. N = rows of the batch, C = width.
//
// A part of a block has some of the heads and some of the inner width; a call's config has their numbers.
// Where the residual stream is split by rows, x, out, dx and what norms save have N / parts rows.
//
// A backward may be done in halves (Backward::kInHalves). What the second one needs takes the place of what
// only the first one needed, so that no more than the norms' sums is added to what is saved: `saved` then has
// the gradients of the outputs of the products, and x that of the residual stream between the two branches.
//
// All calls enqueue work on the call's stream. Forward fills `saved` for backward, which reads and may
// overwrite it; with a null `out` (ModelCall::kBlockAgain) forward does only that. Results do not depend on
// what the memory held before, so a forward that is run again gives the same bits.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "model/call.hpp"

namespace zg::model {

struct BlockBytes {
  std::int64_t saved = 0, workspace = 0;
};

// What norms add to the gradients of their weights and biases in the first half: [count, C], for the second
// one.
inline View norm_sums(BufferPlan& plan, DType accumulator, std::int64_t count, std::int64_t width) {
  return plan.take(accumulator, count, width, round_up(width, kParamAlign));
}

// Adds norm_sums() to the gradients of these parameters, one for each row.
inline void add_norm_sums(const Call& call, const View& norms, std::span<const std::size_t> params) {
  std::int64_t row = 0;
  for (const std::size_t param : params) {
    const View sum = call.grad(param);
    call.ops.add(call.stream, sum, norms.row_range(row++, 1).col_range(0, sum.cols), sum);
  }
}

// The sizes of `saved` and of the workspace in a call of a backward.
inline Backward sizes_of(ModelCall kind) {
  return kind == ModelCall::kBlockBackwardFrozen ? Backward::kFrozen
         : kind == ModelCall::kBlockBackwardInput || kind == ModelCall::kBlockBackwardWeight
             ? Backward::kInHalves
             : Backward::kWhole;
}

// config: the sizes of the part.
BlockBytes block_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, BatchShape shape,
                       const OpSizes& sizes, Backward how);
void block_forward(const Call& call);
void block_backward(const Call& call);
void block_backward_weight(const Call& call);  // the second half

inline std::int64_t residual_rows(const ModelPart& part, BatchShape shape) {
  return part.sequence ? shape.rows() / part.parts : shape.rows();
}

}  // namespace zg::model
