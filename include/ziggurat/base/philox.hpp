// Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). The same (key, counter) gives the same random bits on every device and in any order.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace zg {

using Philox4 = std::array<std::uint32_t, 4>;

inline Philox4 philox4x32_10(Philox4 counter, std::array<std::uint32_t, 2> key) {
  constexpr std::uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{kM0} * counter[0];
    const std::uint64_t p1 = std::uint64_t{kM1} * counter[2];
    counter = {static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(p1),
               static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(p0)};
    key[0] += kW0;
    key[1] += kW1;
  }
  return counter;
}

// FNV-1a, 64 bit: hashes a parameter's name to its random key.
constexpr std::uint64_t fnv1a64(std::string_view text) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return h;
}

// A stream of random numbers, named by (seed, name): element i is a pure function of seed, name and i.
class NamedRandom {
 public:
  NamedRandom(std::uint64_t seed, std::string_view name) {
    const std::uint64_t k = fnv1a64(name) ^ (seed * 0x9E3779B97F4A7C15ull);
    key_ = {static_cast<std::uint32_t>(k), static_cast<std::uint32_t>(k >> 32)};
    seed_ = seed;
  }
  Philox4 block(std::uint64_t index) const {
    return philox4x32_10({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                          static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)},
                         key_);
  }
  // For kernels that compute the counters themselves.
  const std::array<std::uint32_t, 2>& key() const { return key_; }
  // Uniform integer below `bound` (> 0), by multiplication; its bias is below bound / 2^64.
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const {
    const Philox4 b = block(index);
    __extension__ using Wide = unsigned __int128;
    const std::uint64_t x = (std::uint64_t{b[1]} << 32) | b[0];
    return static_cast<std::uint64_t>((Wide{x} * bound) >> 64);
  }
  // Uniform in (0, 1): 24 bits, never 0.
  float uniform(std::uint64_t index) const {
    return (static_cast<float>(block(index)[0] >> 8) + 0.5f) * 0x1p-24f;
  }
  // Standard normal by Box-Muller, in double so that every platform rounds to the same float.
  float normal(std::uint64_t index) const;

 private:
  std::array<std::uint32_t, 2> key_;
  std::uint64_t seed_;
};

}  // namespace zg
