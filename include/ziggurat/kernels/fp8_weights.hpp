// The form in which matrices of trained layers are kept with StoredWeights::kFp8 (step/options.hpp).
#pragma once
#include "ziggurat/kernels/coded.hpp"

namespace zg {

// Blocks are 128 consecutive elements of the flat parameter, so they lie as they do in a matrix of one row.
inline constexpr CodeFormat kFp8Weights = {WeightCode::kFp8, CodeScale::kF32, 1, 128};

}  // namespace zg
