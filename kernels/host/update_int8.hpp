// Moments in 8 bits: a logarithmic code with eight steps to the octave, like the top bits of an fp32
// number. It covers a window of octaves, which each block of kQuantBlock elements places below its largest
// value.
//
// Let top(x) = bits(x) >> 20 (the exponent and three bits of mantissa), and x(t) = the float with bits t <<
// 20:
//
//   first moment, signed   scale a = x(base), base = max(0, top(largest |m|) + 2 - 127)
//     code                 sign << 7 | top(|m| + a, rounded) - base
//     value                +-(x(base + magnitude) - a)
//   second, not negative   scale x(base), base = max(0, top(largest v) + 1 - 255)
//     code                 0 if v < 2^-133, else max(1, top(v, rounded) - base)
//     value                0 for code 0, else x(base + code)
//
// Adding a makes the first moment's code linear about zero, where its steps are a / 8 = 2^-18.6 of the
// block's largest value; elsewhere its error is less than (|m| + a) / 8. The second moment's code reaches
// down to 2^-31.7 of the largest value, and its error above that is less than v / 8. It never turns a
// positive value into zero, so that m / (sqrt(v) + eps) cannot blow up because v was lost; small values
// become too large instead. Its grid does not move with the block's largest value. Code bytes of zero with
// scales of zero are moments of zero.
//
// Rounding is stochastic: 20 random bits (update_random.hpp) are added to the bits that are cut off.
// Rounding to nearest would not do: beta2 = 0.999 changes v by a thousandth in a step, far less than half a
// step of the code, and v would never move (tests/kernels/update_int8_test.cpp).
//
// A block with an infinity or a NaN becomes NaN as a whole: scale NaN, codes zero.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "ziggurat/kernels/types.hpp"

namespace zg::host {

// The definition, one element at a time, for tests; update_pass.hpp computes the same in vectors. moment: 0
// or 1; random: from update_random().
namespace int8 {

inline constexpr int kShift = 20;
inline constexpr std::uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

inline float from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline std::uint32_t below_the_code(std::uint32_t random) {
  return random & 0xfffffu;
}

// largest: the bits of the block's largest |m|, or v, compared as integers: a NaN is larger than all numbers.
inline std::uint32_t base_of(int moment, std::uint32_t largest) {
  const int base = static_cast<int>(largest >> kShift) + (moment == 0 ? 2 - 127 : 1 - 255);
  return static_cast<std::uint32_t>(std::max(0, base));
}
inline float scale_of(int moment, std::uint32_t largest) {
  return from_bits(largest >= kInfinity ? kNan : base_of(moment, largest) << kShift);
}

inline std::uint8_t encode(int moment, float value, float scale, std::uint32_t random) {
  if (!(scale == scale)) return 0;
  const std::uint32_t base = std::bit_cast<std::uint32_t>(scale) >> kShift;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (moment == 0) {
    const std::uint32_t shifted = std::bit_cast<std::uint32_t>(from_bits(bits & 0x7fffffffu) + scale);
    const std::uint32_t magnitude = ((shifted + below_the_code(random)) >> kShift) - base;
    return static_cast<std::uint8_t>((bits >> 24 & 0x80u) | magnitude);
  }
  if (bits >> 16 == 0) return 0;
  const std::uint32_t top = (bits + below_the_code(random)) >> kShift;
  return static_cast<std::uint8_t>(std::max(1, static_cast<int>(top) - static_cast<int>(base)));
}

inline float decode(int moment, std::uint8_t code, float scale) {
  if (!(scale == scale)) return from_bits(kNan);
  const std::uint32_t base = std::bit_cast<std::uint32_t>(scale) >> kShift;
  if (moment == 0) {
    const float magnitude = from_bits((base + (code & 0x7fu)) << kShift) - scale;
    return code & 0x80u && magnitude > 0 ? -magnitude : magnitude;
  }
  return code == 0 ? 0.0f : from_bits((base + code) << kShift);
}

}  // namespace int8
}  // namespace zg::host
