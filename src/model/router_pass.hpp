// The branch of a block that its layer's experts share: the router, and the MLP that all tokens pass besides.
#pragma once
#include "model/call.hpp"

namespace zg::model {

struct DenseCall;

// Continues a forward after the norm before the branch. A first forward decides the routing, begins the sum
// of the experts with the MLP's output, and leaves the residual stream in the call's output. A forward that
// is run again fills only what the block's backward needs: the routing is kept.
void router_forward(const DenseCall& block);

// The branch's backward, after the experts' backwards; dx is the gradient of the layer's output. Returns the
// gradient of the branch's input, T [N,C] in scratch, which is still to be summed over tensor-parallel ranks.
View router_backward(const DenseCall& block, const View& dx);

}  // namespace zg::model
