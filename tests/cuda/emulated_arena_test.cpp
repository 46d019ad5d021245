// Memory of a CUDA device: a hard budget, whatever sum of charges it allows in any order, and a steady state
// that asks CUDA for nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "device/cuda/arena.hpp"
#include "support/arena_users.hpp"
#include "support/errors.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/support/count_allocations.hpp"
#include "tests/support/seed.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

using cuda::CudaArena;

constexpr std::int64_t kGranule = 4096;

FakeOptions small(std::int64_t granules) {
  return {.memory = granules * kGranule, .granule = kGranule};
}

TEST(CudaArena, ChargesWholeGranulesAndGivesExactlyItsBudget) {
  FakeRuntime runtime({.memory = 64 * kMiB});
  constexpr std::int64_t kTwo = 2 * kMiB;
  CudaArena arena(runtime, {.budget = 3 * kTwo + 5000});
  EXPECT_EQ(arena.granule(), kTwo);
  EXPECT_EQ(arena.charge(0), kTwo);
  EXPECT_EQ(arena.charge(kTwo + 1), 2 * kTwo);
  EXPECT_EQ(runtime.calls("create_physical"), 0) << "nothing is taken before it is wanted";
  void* a = arena.allocate(kTwo + 1);
  EXPECT_EQ(runtime.calls("create_physical"), 2);
  void* b = arena.allocate(5);
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % kTwo, 0u);
  EXPECT_EQ(arena.in_use(), 3 * kTwo);
  EXPECT_EQ(arena.allocate(1), nullptr);
  arena.release(b, 5);
  EXPECT_EQ(arena.allocate(kTwo + 1), nullptr);
  void* c = arena.allocate(kTwo);
  arena.release(a, kTwo + 1);
  arena.release(c, kTwo);
  EXPECT_EQ(arena.in_use(), 0);
  EXPECT_EQ(arena.peak(), 3 * kTwo);
  EXPECT_EQ(arena.report().taken, 3 * kTwo) << "it is kept";
}

TEST(CudaArena, AllThatBytesAllowCanBeHad) {
  FakeRuntime runtime(small(16));
  CudaArena arena(runtime, {.budget = 16 * kGranule});
  // Every second granule is freed: no hole is larger than one.
  std::vector<void*> held(16);
  for (void*& p : held) {
    p = arena.allocate(kGranule);
    std::memset(p, static_cast<int>(&p - held.data()), kGranule);
  }
  for (std::size_t i = 0; i < 16; i += 2) arena.release(held[i], kGranule);
  EXPECT_EQ(arena.report().regathered, 0);
  auto* large = static_cast<unsigned char*>(arena.allocate(8 * kGranule));
  ASSERT_NE(large, nullptr);
  std::memset(large, 0xaa, 8 * kGranule);
  EXPECT_EQ(arena.report().regathered, 1);
  EXPECT_GE(arena.report().regathered_bytes, 7 * kGranule);
  EXPECT_EQ(runtime.calls("create_physical"), 16);
  for (std::size_t i = 1; i < 16; i += 2) {
    const auto* p = static_cast<unsigned char*>(held[i]);
    EXPECT_TRUE(std::all_of(p, p + kGranule, [&](unsigned char c) { return c == i; })) << i;
    arena.release(held[i], kGranule);
  }
  void* rest = arena.allocate(8 * kGranule);
  ASSERT_NE(rest, nullptr);
  arena.release(large, 8 * kGranule);
  arena.release(rest, 8 * kGranule);
  void* all = arena.allocate(16 * kGranule);
  ASSERT_NE(all, nullptr);
  arena.release(all, 16 * kGranule);
}

TEST(CudaArena, RandomBuffersKeepTheirBytesAndNothingPassesTheBudget) {
  const std::uint64_t seed = test_seed(5);
  SCOPED_TRACE(seed);
  for (std::uint64_t round = 0; round < 6; ++round) {
    std::mt19937_64 random(seed + round);
    constexpr std::int64_t kBudget = 40 * kGranule + 100;
    FakeRuntime runtime(small(41));
    CudaArena arena(runtime, {.budget = kBudget});
    struct Held {
      unsigned char* data;
      std::int64_t bytes;
      int value;
    };
    std::vector<Held> held;
    std::int64_t in_use = 0;
    for (int i = 0; i < 600; ++i) {
      if (random() % 2 == 0) {
        const auto bytes =
            static_cast<std::int64_t>(1 + random() % static_cast<std::uint64_t>(12 * kGranule));
        auto* data = static_cast<unsigned char*>(arena.allocate(bytes));
        ASSERT_EQ(data != nullptr, in_use + arena.charge(bytes) <= kBudget) << i;
        if (data == nullptr) continue;
        in_use += arena.charge(bytes);
        held.push_back({data, bytes, static_cast<int>(random() % 256)});
        std::memset(data, held.back().value, static_cast<std::size_t>(arena.charge(bytes)));
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        const Held h = held.back();
        held.pop_back();
        for (std::int64_t j = 0; j < arena.charge(h.bytes); j += 499) ASSERT_EQ(h.data[j], h.value);
        arena.release(h.data, h.bytes);
        in_use -= arena.charge(h.bytes);
      }
      ASSERT_EQ(arena.in_use(), in_use);
      ASSERT_LE(arena.report().taken, kBudget);
    }
    for (const Held& h : held) arena.release(h.data, h.bytes);
    EXPECT_GT(arena.report().regathered, 0);
  }
}

TEST(CudaArena, TheSteadyStateAsksCudaForNothing) {
  FakeRuntime runtime(small(64));
  CudaArena arena(runtime, {.budget = 64 * kGranule});
  std::vector<std::pair<void*, std::int64_t>> held;
  held.reserve(64);
  // Two phases whose buffers are of other sizes, each the whole budget.
  const auto step = [&] {
    for (const std::int64_t granules : {2, 16}) {
      for (std::int64_t left = 64; left > 0; left -= granules)
        held.emplace_back(arena.allocate(granules * kGranule), granules * kGranule);
      for (std::size_t i = 0; i < held.size(); ++i)
        arena.release(held[i * 7 % held.size()].first, held[0].second);
      held.clear();
    }
  };
  step();
  step();
  const std::int64_t calls = runtime.calls(), allocations = allocations_of_this_thread();
  for (int i = 0; i < 50; ++i) step();
  EXPECT_EQ(runtime.calls() - calls, 0);
  EXPECT_EQ(allocations_of_this_thread() - allocations, 0);
}

TEST(CudaArena, ThreadsNeverPassTheBudgetNorShareABuffer) {
  const std::uint64_t seed = test_seed(23);
  SCOPED_TRACE(seed);
  FakeRuntime runtime(small(24));
  CudaArena arena(runtime, {.budget = 24 * kGranule});
  expect_threads_share(arena, 8 * kGranule, 1500, seed);
}

TEST(CudaArena, ARefusalSaysWhoHoldsTheMemory) {
  FakeRuntime runtime({.memory = 100 * kMiB});
  CudaArena arena(runtime, {.budget = 80 * kMiB});
  void* a = arena.allocate(10 * kMiB);
  void* b = arena.allocate(6 * kMiB);
  arena.release(b, 6 * kMiB);
  runtime.set_other_use(0, 70 * kMiB);  // 14 MiB are free now
  const Error error = error_of([&] { arena.allocate(40 * kMiB); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_EQ(error.where(), "tiers.device");
  const std::string text = error.what();
  for (const char* part :
       {"refused 40.0 MiB", "the budget's 80.0 MiB", "10.0 MiB are in use", "6.0 MiB are held but free",
        "hold 70.0 MiB of the device's 100.0 MiB", "14.0 MiB are free", "lower tiers.device to 30.0 MiB"})
    EXPECT_HAS(text, part) << part << "\n" << text;
  EXPECT_EQ(arena.in_use(), 10 * kMiB);
  EXPECT_EQ(runtime.memory_info().free, 14 * kMiB) << "what it got before the refusal is given back";
  // What fits can still be had, and all of it when there is room again.
  void* c = arena.allocate(20 * kMiB);
  ASSERT_NE(c, nullptr);
  runtime.set_other_use(0, 0);
  void* d = arena.allocate(50 * kMiB);
  ASSERT_NE(d, nullptr);
  arena.release(a, 10 * kMiB);
  arena.release(c, 20 * kMiB);
  arena.release(d, 50 * kMiB);
}

TEST(CudaArena, ABudgetThatIsNotFreeIsRefusedAtOnce) {
  FakeRuntime runtime({.memory = 100 * kMiB});
  runtime.set_other_use(0, 30 * kMiB);
  const Error error = error_of([&] { CudaArena arena(runtime, {.budget = 80 * kMiB}); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_HAS(error.what(), "70.0 MiB free of 100.0 MiB");
}

// Every call of CUDA fails once, at every place: nothing is lost, and the next attempt succeeds.
TEST(CudaArena, SurvivesEveryCallThatFails) {
  for (const char* name : {"reserve_addresses", "create_physical", "map_each", "unmap", "use_device"}) {
    for (std::int64_t nth = 1; nth <= 8; ++nth) {
      SCOPED_TRACE(testing::Message() << name << ", call " << nth);
      FakeRuntime runtime(small(16));
      CudaArena arena(runtime, {.budget = 16 * kGranule});
      runtime.fail(name, nth, std::string(name) == "create_physical" ? Errc::kMemory : Errc::kDevice);
      std::vector<void*> held;
      const auto allocate = [&](std::int64_t granules) {
        void* data = nullptr;
        try {
          data = arena.allocate(granules * kGranule);
        } catch (const Error&) {
          data = arena.allocate(granules * kGranule);
        }
        ASSERT_NE(data, nullptr);
        std::memset(data, 1, static_cast<std::size_t>(granules * kGranule));
        held.push_back(data);
      };
      for (int i = 0; i < 16; ++i) allocate(1);
      for (std::size_t i = 0; i < 16; i += 2) arena.release(held[i], kGranule);
      allocate(8);
      for (std::size_t i = 1; i < 16; i += 2) arena.release(held[i], kGranule);
      arena.release(held[16], 8 * kGranule);
      allocate(16);
      EXPECT_EQ(arena.report().taken, 16 * kGranule);
      arena.release(held[17], 16 * kGranule);
    }
  }
}

TEST(CudaArena, WhatAFailureLeftIsUsedFirst) {
  FakeRuntime runtime(small(16));
  CudaArena arena(runtime, {.budget = 16 * kGranule});
  runtime.fail("map_each", 1);
  EXPECT_THROW(arena.allocate(2 * kGranule), Error);
  EXPECT_EQ(arena.in_use(), 0);
  void* data = arena.allocate(3 * kGranule);
  EXPECT_EQ(runtime.calls("create_physical"), 3);
  EXPECT_EQ(arena.report().taken, 3 * kGranule);
  arena.release(data, 3 * kGranule);
}

TEST(CudaArena, HooksSeeAllThatIsMapped) {
  FakeRuntime runtime(small(16));
  std::map<char*, std::int64_t> seen;
  {
    CudaArena arena(runtime, {.budget = 16 * kGranule});
    arena.release(arena.allocate(kGranule), kGranule);
    arena.set_hooks({[&](void* data, std::int64_t bytes) {
                       EXPECT_TRUE(seen.emplace(static_cast<char*>(data), bytes).second);
                       std::memset(data, 1, static_cast<std::size_t>(bytes));  // mapped already
                     },
                     [&](void* data, std::int64_t bytes) {
                       const auto it = seen.find(static_cast<char*>(data));
                       ASSERT_NE(it, seen.end());
                       EXPECT_EQ(it->second, bytes);
                       std::memset(data, 2, static_cast<std::size_t>(bytes));  // mapped still
                       seen.erase(it);
                     }});
    EXPECT_TRUE(seen.empty());
    EXPECT_EQ(runtime.memory_info().free, 16 * kGranule) << "what was kept goes back first";
    std::vector<void*> held;
    for (int i = 0; i < 4; ++i) held.push_back(arena.allocate(4 * kGranule));
    EXPECT_EQ(seen.size(), 4u);
    arena.release(held[0], 4 * kGranule);
    arena.release(held[2], 4 * kGranule);
    void* large = arena.allocate(8 * kGranule);
    std::int64_t covered = 0;
    for (const auto& [at, bytes] : seen) covered += bytes;
    EXPECT_EQ(covered, 16 * kGranule);
    arena.release(large, 8 * kGranule);
    arena.release(held[1], 4 * kGranule);
    arena.release(held[3], 4 * kGranule);
  }
  EXPECT_TRUE(seen.empty());
}

TEST(CudaArena, ActsOnItsDevice) {
  FakeRuntime runtime({.devices = 2, .memory = 64 * kMiB});
  CudaArena one(runtime, {.device = 1, .budget = 8 * kMiB});
  runtime.use_device(0);
  void* data = one.allocate(8 * kMiB);
  EXPECT_EQ(runtime.place(data, 8 * kMiB).device, 1);
  one.release(data, 8 * kMiB);
  runtime.use_device(0);
  EXPECT_EQ(runtime.memory_info().free, 64 * kMiB);
}

TEST(CudaArena, GoesQuietlyWhenTheDeviceHasFailed) {
  FakeRuntime runtime(small(4));
  {
    CudaArena arena(runtime, {.budget = 4 * kGranule});
    void* data = arena.allocate(4 * kGranule);
    arena.release(data, 4 * kGranule);
    runtime.break_device("an illegal access");
    EXPECT_EQ(arena.allocate(4 * kGranule), data);  // no call of CUDA, so nothing to fail
    arena.release(data, 4 * kGranule);
  }
  EXPECT_TRUE(runtime.take_mistakes().empty());
}

TEST(CudaArenaDeathTest, WhatIsReleasedAndWhatIsNotShows) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  FakeRuntime runtime(small(16));
  EXPECT_DEATH(
      {
        CudaArena arena(runtime, {.budget = kGranule});
        (void)arena.allocate(1);
      },
      "in_use_");
  // Memory that was regathered for another buffer cannot be touched where it was.
  EXPECT_DEATH(
      {
        CudaArena arena(runtime, {.budget = 4 * kGranule});
        std::vector<char*> held;
        for (int i = 0; i < 4; ++i) held.push_back(static_cast<char*>(arena.allocate(kGranule)));
        arena.release(held[0], kGranule);
        arena.release(held[2], kGranule);
        (void)arena.allocate(2 * kGranule);
        std::fprintf(stderr, "regathered\n");
        held[0][0] = held[2][0] = 1;
      },
      "regathered");
}

}  // namespace
}  // namespace zg::test
