// The random bits of stochastic rounding: 16 for each moment of each element, a pure function of the
// parameter's key, the step, the element's index in its parameter and the moment's (0 or 1). Vector width,
// alignment, threads and the cuts between calls play no part.
//
// A block (of kQuantBlock elements) has 64 words of 32 bits, from the 16 Philox4x32-10 counters
// (16 block + j, step): words 2 j and 2 j + 1 are the first two of counter j, words 32 + 2 j and 33 + 2 j the
// other two, so that a vector of counters makes two rows of neighbouring words without a shuffle. Taken as
// 256 bytes in a ring, lowest first, element e of the block has the 4 bytes from
//
//   4 (e / 2 % 64) + 2 (e % 2) + e / 128                     for its first moment,
//   128 bytes further                                        for its second,
//
// of which the lowest bits are used, 16 by bf16 and 20 by 8 bits. So each place serves a first moment and the
// second moment of another element, and what two elements share has another weight for each: the highest 8
// bits, which nearly decide, are those of no other first moment.
#pragma once
#include <cstdint>

#include "ziggurat/base/philox.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

inline constexpr std::int64_t kRandomWords = 64;  // of a block

// element, step >= 0. The definition, for tests; update_pairs.hpp computes two blocks at a time.
inline std::uint32_t update_random(RandomKey key, std::int64_t step, std::int64_t element, int moment) {
  static_assert(kQuantBlock == 4 * kRandomWords);
  const auto word = [&](std::int64_t k) {
    const std::uint64_t counter = static_cast<std::uint64_t>(16 * (element / kQuantBlock) + k % 32 / 2);
    const std::uint64_t t = static_cast<std::uint64_t>(step);
    const Philox4 words =
        philox4x32_10({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                       static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(t >> 32)},
                      {key.key[0], key.key[1]});
    return std::uint64_t{words[static_cast<std::size_t>(k / 32 * 2 + k % 2)]};
  };
  const std::int64_t e = element % kQuantBlock;
  const std::int64_t k = (e / 2 + moment * kRandomWords / 2) % kRandomWords;
  const std::uint64_t two = word(k) | word((k + 1) % kRandomWords) << 32;
  return static_cast<std::uint32_t>(two >> (16 * (e % 2) + 8 * (e / 128)));
}

// x in bf16, the low 16 bits of `random` added below its last: up with the probability of what is cut off.
inline bf16 round_stochastically(float x, std::uint32_t random) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  bf16 rounded;
  rounded.bits = nan ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((u + (random & 0xffffu)) >> 16);
  return rounded;
}

}  // namespace zg::host
