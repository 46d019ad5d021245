// The reduction of one range of several operands, element by element in the order in which they are given.
#pragma once
#include <cstdint>
#include <span>

#include "ziggurat/comm/comm.hpp"

namespace zg::comm {

// out[i] = operands[0][i] (+ or max) operands[1][i] ...: in fp64 for f64, in fp32 for f32, f16 and bf16, and
// rounded once. `out` may be one of the operands. Ends the process for other types.
void reduce(std::span<const void* const> operands, void* out, std::int64_t count, DType dtype,
            Reduction reduction);

}  // namespace zg::comm
