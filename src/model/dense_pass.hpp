// The passes through a dense transformer block:
//
//   x1 = x + o(attention(rotate(q), rotate(k), v)),  out = x1 + down(gate(g) * up)  or  x1 + down(gelu(fc))
//
// Norms stand at the inputs of the two branches, at their outputs, or both; queries and keys may be
// normalised before they rotate. FamilyForm and BlockDescription decide this for a model. N = rows of the
// batch, C = width.
//
// A tensor-parallel rank has some of the heads and some of the inner width; a call's config has these sizes.
// With sequence parallelism x, out, dx and the buffers that norms save have N / degree rows.
//
// A backward may be done in two halves (Backward::kInHalves). The first half overwrites values that only it
// needs with values that the second half needs, so that `saved` grows only by the norms' sums. Afterwards
// `saved` has the gradients of the products' outputs, and x the gradient of the residual stream between the
// two branches.
//
// All calls enqueue work on the call's stream. Forward fills `saved` for backward, which reads and may
// overwrite it; with a null `out` (ModelCall::kBlockAgain) forward only fills `saved`. Results do not depend
// on what the memory held before, so a forward that is run again gives the same bits.
#pragma once
#include "model/call.hpp"

namespace zg::model {

// The kind of backward that decides the sizes of `saved` and of the workspace in a call.
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
