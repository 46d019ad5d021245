// What acquire and release of a resident segment touch without a program: one cache line, no mutex.
//
// The word of a copy: flags, and how many leases read and write it. kOpen is set and cleared under the
// store's mutex; a lease is taken by a compare-and-swap that sees kOpen, and a copy is closed (to move it or
// drop it) by one that sees no lease. So either a taker sees it closed and goes the slow way, or the closer
// sees the lease and leaves the copy alone.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

#include "ziggurat/store/table.hpp"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace zg {

struct alignas(64) Hot {
  static constexpr std::uint64_t kOpen = 1;  // leases may be taken
  static constexpr std::uint64_t kSole =
      2;  // there is no other copy, and nothing moves: writing needs no decision
  static constexpr std::uint64_t kWaited = 4;  // somebody waits for the leases to end
  static constexpr std::uint64_t kReader = std::uint64_t{1} << 8, kWriter = std::uint64_t{1} << 32;
  static constexpr std::uint64_t kLeases = ~std::uint64_t{0xff}, kWriters = ~(kWriter - 1);

  std::atomic<std::uint64_t> word[2]{};  // device, host
  void* memory[2] = {nullptr, nullptr};  // changed only while closed
  std::atomic<std::uint64_t> last_use{0};
  std::atomic<std::int64_t> hits[2]{};  // uses of each copy by the fast way
  std::int64_t bytes = 0;

  static int readers(std::uint64_t w) { return static_cast<int>((w >> 8) & 0xffffff); }
  static int writers(std::uint64_t w) { return static_cast<int>(w >> 32); }
};
static_assert(sizeof(Hot) == 64);

// Of the arrays that have an element for the device and one for the host.
inline std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}

// Grows with time, the same for all threads; the unit does not matter.
inline std::uint64_t tick() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

}  // namespace zg
