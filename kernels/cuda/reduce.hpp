// The reduction of several ranks' operands in communication between GPUs.
#pragma once
#include <cstdint>
#include <span>

#include "kernels/cuda/kernels.hpp"

namespace zg::cuda {

inline constexpr int kMostOperands = 64;

// out[i] = operands[0][i] (+ or max) operands[1][i] ..., element by element in this order, in fp32 (in fp64
// for double), rounded once: the same bits as the host's reduction. A maximum with NaN is NaN. `out` may be
// one of the operands. There are 1 to kMostOperands of them.
template <class T>
void reduce(const Launch& on, std::span<const void* const> operands, void* out, std::int64_t count,
            bool maximum);

}  // namespace zg::cuda
