// expert_gate() and its backward for gates and ups in pairs (Gate::kClampedPairs).
#pragma once
#include "kernels/cuda/kernels.hpp"

namespace zg::cuda {

template <class T>
void expert_pairs(const Launch& on, Extent extent, const ExpertGate<T>& args);
template <class T>
void expert_pairs_backward(const Launch& on, Extent extent, const ExpertGateBackward<T>& args);

}  // namespace zg::cuda
