// Threads that use one arena at once.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "ziggurat/device/device.hpp"

namespace zg::test {

// Each of four threads takes or releases a buffer `times` times, and writes all of each that it takes: up to
// four at a time, of `largest` bytes at most. Together they must never hold more than the budget, which must
// be so small that it matters, and no two may share a byte.
inline void expect_threads_share(Arena& arena, std::int64_t largest, int times, std::uint64_t seed) {
  std::atomic<std::int64_t> given{0};
  std::atomic<int> wrong{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + static_cast<std::uint64_t>(t));
      std::vector<std::pair<unsigned char*, std::int64_t>> held;
      const auto drop = [&] {
        const auto [data, bytes] = held.back();
        held.pop_back();
        for (std::int64_t i = 0; i < bytes; i += 997) wrong += data[i] == t + 1 ? 0 : 1;
        given -= arena.charge(bytes);
        arena.release(data, bytes);
      };
      for (int i = 0; i < times; ++i) {
        if (held.size() < 4 && random() % 2 == 0) {
          const auto bytes = static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(largest));
          void* const at_hand = random() % 2 == 0 ? arena.allocate_at_hand(bytes) : nullptr;
          auto* data = static_cast<unsigned char*>(at_hand != nullptr ? at_hand : arena.allocate(bytes));
          if (data == nullptr) {
            ++refused;
            continue;
          }
          if ((given += arena.charge(bytes)) > arena.budget()) ++wrong;
          std::memset(data, t + 1, static_cast<std::size_t>(bytes));
          held.emplace_back(data, bytes);
        } else if (!held.empty()) {
          drop();
        }
      }
      while (!held.empty()) drop();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(refused, 0) << "the budget never mattered";
  EXPECT_EQ(arena.in_use(), 0);
}

}  // namespace zg::test
