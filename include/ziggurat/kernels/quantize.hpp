// The quantised form of values that are sent between ranks: blocks of integers with a scale each.
//
// A block has kQuantBlock values; the last block of an array may have fewer. It begins with its scale, an
// fp32 number: the largest magnitude in the block, divided by the largest code, 127 with 8 bits or 7 with 4.
// The codes follow, signed integers: value / scale, rounded to nearest even. With 4 bits a byte has two
// codes, the first in the low half. The decoded value is code * scale, so its error is at most half a scale:
// 1/254 (8 bits) or 1/14 (4 bits) of the largest magnitude. A block with an infinity or a NaN has a NaN as
// its scale, so all its decoded values are NaN. All devices produce the same bits.
//
// The format and its use follow ZeRO++ (Wang et al., 2023).
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
