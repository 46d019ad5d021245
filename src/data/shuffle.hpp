// A random permutation of [0, n), of which each element can be computed by itself.
#pragma once
#include <bit>
#include <cstdint>

#include "ziggurat/base/philox.hpp"

namespace zg {

// A Feistel network over the smallest even number of bits that can hold n values. A result that is not below
// n passes through the network again until it is (cycle walking). Since the network is a permutation, this
// ends, and gives a permutation of [0, n).
class Shuffle {
 public:
  // n: 1 or more.
  Shuffle(const NamedRandom& random, std::int64_t n)
      : random_(random),
        count_(static_cast<std::uint64_t>(n)),
        half_((std::bit_width(count_ - 1) + 1) / 2),
        mask_((std::uint64_t{1} << half_) - 1) {}
  std::int64_t at(std::int64_t i) const {
    auto x = static_cast<std::uint64_t>(i);
    do x = once(x);
    while (x >= count_);
    return static_cast<std::int64_t>(x);
  }

 private:
  static constexpr std::uint64_t kRounds = 12;  // small halves need many

  std::uint64_t once(std::uint64_t x) const {
    std::uint64_t left = x >> half_, right = x & mask_;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = left ^ (random_.block(right * kRounds + round)[0] & mask_);
      left = right, right = mixed;
    }
    return left << half_ | right;
  }

  NamedRandom random_;
  std::uint64_t count_;
  int half_;
  std::uint64_t mask_;
};

}  // namespace zg
