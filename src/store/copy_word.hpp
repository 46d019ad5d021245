// The cache line of a segment: all that acquire and release of a resident segment access without a program,
// and without the mutex.
//
// Each copy has a word: flags, and the numbers of leases that read and write it. kOpen is set and cleared
// under the store's mutex. A lease is taken by a compare-and-swap that succeeds only while kOpen is set; a
// copy is closed, to be moved or dropped, by a compare-and-swap that succeeds only while no lease is counted.
// So either the thread that wants the lease finds the copy closed and takes the slow path, or the thread that
// wants to close it finds the lease and leaves the copy alone.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

#include "ziggurat/store/table.hpp"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace zg {

struct alignas(64) CopyWord {
  static constexpr std::uint64_t kOpen = 1;  // leases may be taken
  // There is no other copy, and the segment has no moves: a write needs no decision.
  static constexpr std::uint64_t kSole = 2;
  static constexpr std::uint64_t kWaited = 4;  // a thread waits for leases of the segment to end
  static constexpr std::uint64_t kReader = std::uint64_t{1} << 8, kWriter = std::uint64_t{1} << 32;
  static constexpr std::uint64_t kLeases = ~std::uint64_t{0xff}, kWriters = ~(kWriter - 1);

  std::atomic<std::uint64_t> word[2]{};  // device, host
  void* memory[2] = {nullptr, nullptr};  // changed only while the copy is closed
  std::atomic<std::uint64_t> last_use{0};
  std::atomic<std::int64_t> hits[2]{};  // acquires that found the copy
  std::int64_t bytes = 0;

  static int readers(std::uint64_t w) { return static_cast<int>((w >> 8) & 0xffffff); }
  static int writers(std::uint64_t w) { return static_cast<int>(w >> 32); }
};
static_assert(sizeof(CopyWord) == 64);

// A clock that all threads share, in no particular unit.
inline std::uint64_t tick() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

}  // namespace zg
