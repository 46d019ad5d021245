// Encodes trained weights in FP8 on the device.
#pragma once
#include <cstdint>

#include "kernels/cuda/launch.hpp"

namespace zg::cuda {

// Codes and scales in kFp8Weights (ziggurat/kernels/fp8_weights.hpp) of n elements.
void encode_fp8(const Launch& on, std::int64_t n, const float* in, std::uint8_t* codes, float* scales);

}  // namespace zg::cuda
