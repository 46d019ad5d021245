// Blocks of values as integers with a scale: how they cross between ranks where that is asked for.
//
// A block has kQuantBlock values, the last one of an array perhaps fewer. It begins with its scale, an fp32
// number: the largest magnitude in the block, divided by the largest code, 127 with 8 bits or 7 with 4. Then
// come the codes, signed integers: value / scale, rounded to nearest even. With 4 bits a byte has two of
// them, the first in the low half. What comes back is code * scale, so it is wrong by at most half a scale: a
// 254th, or a 14th, of the largest magnitude. Of a block with an infinity or a NaN the scale is NaN, so all
// values that come back are. All devices make the same bits.
//
// The format and its use are those of ZeRO++ (Wang et al., 2023).
#pragma once
#include <cstdint>

#include "ziggurat/kernels/types.hpp"

namespace zg::kernels {

// bits: 8 or 4.
constexpr std::int64_t quantized_block_bytes(int bits) {
  return static_cast<std::int64_t>(sizeof(float)) + kQuantBlock * bits / 8;
}
constexpr std::int64_t quantized_bytes(std::int64_t values, int bits) {
  return (values + kQuantBlock - 1) / kQuantBlock * quantized_block_bytes(bits);
}
constexpr int largest_code(int bits) {
  return (1 << (bits - 1)) - 1;
}

}  // namespace zg::kernels
