// The passes through a dense transformer block:
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
#include "model/call.hpp"

namespace zg::model {

// The sizes of `saved` and of the workspace in a call of a backward.
inline Backward sizes_of(ModelCall kind) {
  return kind == ModelCall::kBlockBackwardFrozen ? Backward::kFrozen
         : kind == ModelCall::kBlockBackwardInput || kind == ModelCall::kBlockBackwardWeight
             ? Backward::kInHalves
             : Backward::kWhole;
}

void dense_forward(const Call& call);
void dense_backward(const Call& call);
void dense_backward_weight(const Call& call);  // the second half

}  // namespace zg::model
