// The random bits of stochastic rounding, for each moment of each element: a pure function of the
// parameter's key, the step, the index of the element in its parameter, and the moment (0 or 1). They do
// not depend on vector width, alignment, threads, or how the parameter is cut into calls.
//
// A block (of kQuantBlock elements) has 64 words of 32 bits, from the 16 Philox4x32-10 counters (16
// block + j, step). Words 2 j and 2 j + 1 are the first two words of counter j, and words 32 + 2 j and
// 33 + 2 j the other two, so that a vector of counters gives two runs of consecutive words without a
// shuffle. The words form a ring of 256 bytes, the lowest byte of each first. Element e of the block uses
// the 4 bytes that begin at byte
//
//   4 (e / 2 % 64) + 2 (e % 2) + e / 128                     for its first moment,
//   128 bytes further                                        for its second,
//
// and of these the lowest 16 bits (for bf16) or 20 bits (for 8-bit codes). So several elements use the same
// byte, but at a different significance each. The highest 8 bits, which mostly decide the rounding, are
// shared with no other first moment, only with the second moment of another element.
#pragma once
#include <cstdint>

#include "ziggurat/base/philox.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

inline constexpr std::int64_t kRandomWords = 64;  // words of a block

// The definition, for tests; update_pairs.hpp computes two blocks at a time. element, step >= 0.
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

// Rounds x to bf16 by the low 16 bits of `random`: up with the probability that makes the expectation exact.
inline bf16 round_stochastically(float x, std::uint32_t random) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  bf16 rounded;
  rounded.bits = nan ? std::uint16_t{0x7fc0} : static_cast<std::uint16_t>((u + (random & 0xffffu)) >> 16);
  return rounded;
}

}  // namespace zg::host
