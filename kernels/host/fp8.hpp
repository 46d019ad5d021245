// Matrices in FP8: the arithmetic of host::encode(), and trained weights in kFp8Weights.
#pragma once
#include <cstdint>

namespace zg::host {

inline constexpr float kLargestE4m3 = 448;

// The largest magnitude among n numbers; NaNs do not count.
float largest_magnitude(const float* from, std::int64_t n);

// The factor by which a block is multiplied before it is rounded; its scale is one over the factor. The order
// of operations is PyTorch's, which divides a number by a tensor. In a block with magnitudes below kLeast the
// factor would overflow, so the block becomes zeros.
constexpr float fp8_factor(float largest) {
  constexpr float kLeast = 0x1p-117f;
  return largest >= kLeast ? 1 / largest * kLargestE4m3 : 1;
}

// codes[i] = in[i] * factor in e4m3, rounded to nearest, ties to even. A magnitude that is too large becomes
// the largest; a NaN stays one.
void encode_e4m3(const float* in, std::int64_t n, float factor, std::uint8_t* codes);

// Encodes n elements in kFp8Weights. A NaN becomes a NaN's code, and an infinity makes its block's elements
// NaNs.
void encode_fp8(std::int64_t n, const float* in, std::uint8_t* codes, float* scales);

}  // namespace zg::host
