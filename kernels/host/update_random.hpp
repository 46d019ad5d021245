// The random bits of stochastic rounding: 16 for each moment of each element, a pure function of the
// parameter's key, the step, the element's index in its parameter and the moment's (0 or 1). Vector width,
// alignment, threads and the cuts between calls play no part.
//
// One Philox4x32-10 block has the bits of eight elements. Element e of block b (of kQuantBlock elements)
// takes, of the counter (32 b + e / 4 % 32, step), word 2 (e / 128) + e % 4 / 2, the low half where e is
// even, the high half where it is odd: so a vector of counters makes two rows of neighbouring elements,
// without a shuffle. The second moment of e takes the bits of the first moment of e ^ 128, another element:
// each 16 bits serve twice, and no element's two roundings share any.
#pragma once
#include <cstdint>

#include "ziggurat/base/philox.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

// element, step >= 0. The definition, for tests; update_pass.hpp computes a block at a time.
inline std::uint32_t update_random16(RandomKey key, std::int64_t step, std::int64_t element, int moment) {
  static_assert(kQuantBlock == 256);
  const std::uint64_t b = static_cast<std::uint64_t>(element) / 256;
  const std::uint64_t e = (static_cast<std::uint64_t>(element) % 256) ^ (moment == 1 ? 128u : 0u);
  const std::uint64_t counter = 32 * b + e / 4 % 32;
  const std::uint64_t t = static_cast<std::uint64_t>(step);
  const Philox4 words =
      philox4x32_10({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                     static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(t >> 32)},
                    {key.key[0], key.key[1]});
  const std::uint32_t word = words[2 * (e / 128) + e % 4 / 2];
  return e % 2 == 0 ? word & 0xffffu : word >> 16;
}

// x in bf16, by 16 random bits below its last: up with the probability of what would be cut off.
inline bf16 round_stochastically(float x, std::uint32_t random16) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  bf16 rounded;
  rounded.bits = nan ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((u + random16) >> 16);
  return rounded;
}

}  // namespace zg::host
