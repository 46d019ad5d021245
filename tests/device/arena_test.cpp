// The host arena: a budget that is never passed.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "support/arena_users.hpp"
#include "support/seed.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

TEST(Arena, ChargesWholePages) {
  EXPECT_EQ(arena_charge(0), kPage);
  EXPECT_EQ(arena_charge(1), kPage);
  EXPECT_EQ(arena_charge(kPage), kPage);
  EXPECT_EQ(arena_charge(kPage + 1), 2 * kPage);
  const auto arena = make_host_arena("test", 2 * kPage);
  EXPECT_EQ(arena->granule(), kPage);
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, kPage, kPage + 1, 5 * kPage})
    EXPECT_EQ(arena->charge(bytes), arena_charge(bytes)) << bytes;
}

TEST(Arena, GivesExactlyItsBudget) {
  const auto arena = make_host_arena("test", 3 * kPage + 1000);
  EXPECT_EQ(arena->budget(), 3 * kPage + 1000);
  void* a = arena->allocate(kPage + 1);
  void* b = arena->allocate(5);
  ASSERT_NE(a, nullptr);
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % kPage, 0u);
  EXPECT_EQ(arena->in_use(), 3 * kPage);
  EXPECT_EQ(arena->allocate(1), nullptr);
  arena->release(b, 5);
  EXPECT_EQ(arena->allocate(kPage + 1), nullptr);
  void* c = arena->allocate(kPage);
  EXPECT_NE(c, nullptr);
  arena->release(a, kPage + 1);
  arena->release(c, kPage);
  EXPECT_EQ(arena->in_use(), 0);
  EXPECT_EQ(arena->peak(), 3 * kPage);
}

TEST(Arena, UsesItsMemoryAgainForAnySize) {
  std::set<void*> mapped;
  int taken = 0;
  const auto arena = make_host_arena("test", 4 * kPage);  // its end calls the hooks
  arena->set_hooks({[&](void* data, std::int64_t) { mapped.insert(data), ++taken; },
                    [&](void* data, std::int64_t) { EXPECT_EQ(mapped.erase(data), 1u); }});
  void* a = arena->allocate(3 * kPage);
  arena->release(a, 3 * kPage);
  for (int i = 0; i < 10; ++i) {
    void* again = arena->allocate(3 * kPage - i);
    EXPECT_EQ(again, a);
    arena->release(again, 3 * kPage - i);
  }
  void* b = arena->allocate(2 * kPage);
  void* c = arena->allocate(2 * kPage);
  EXPECT_EQ(taken, 1);
  EXPECT_EQ(mapped.size(), 1u);
  EXPECT_EQ(arena->peak(), arena->budget());
  arena->release(b, 2 * kPage);
  arena->release(c, 2 * kPage);
}

TEST(Arena, HooksComeInPairs) {
  std::map<void*, std::int64_t> mapped;
  const auto hooks = [&](std::map<void*, std::int64_t>& into) {
    return Arena::Hooks{[&into](void* data, std::int64_t bytes) {
                          EXPECT_TRUE(into.emplace(data, bytes).second);
                          std::memset(data, 1, static_cast<std::size_t>(bytes));  // mapped already
                        },
                        [&into](void* data, std::int64_t bytes) {
                          const auto it = into.find(data);
                          ASSERT_NE(it, into.end());
                          EXPECT_EQ(it->second, bytes);
                          std::memset(data, 2, static_cast<std::size_t>(bytes));  // mapped still
                          into.erase(it);
                        }};
  };
  std::map<void*, std::int64_t> others;
  {
    std::mt19937_64 random(7);
    const auto arena = make_host_arena("test", 16 * kPage);
    // Buffers from before the hooks were set are none of theirs.
    void* before = arena->allocate(kPage);
    arena->release(before, kPage);
    arena->set_hooks(hooks(mapped));
    std::vector<std::pair<void*, std::int64_t>> held;
    for (int i = 0; i < 500; ++i) {
      if (random() % 2 == 0) {
        const auto bytes = static_cast<std::int64_t>(1 + random() % (5 * kPage));
        if (void* data = arena->allocate(bytes)) held.emplace_back(data, bytes);
      } else if (!held.empty()) {
        arena->release(held.back().first, held.back().second);
        held.pop_back();
      }
      std::int64_t bytes = 0;
      for (const auto& [data, size] : mapped) bytes += size;
      ASSERT_LE(bytes, arena->budget());
    }
    for (const auto& [data, bytes] : held) arena->release(data, bytes);
    EXPECT_FALSE(mapped.empty());
    arena->set_hooks(hooks(others));
    EXPECT_TRUE(mapped.empty()) << "what the old hooks saw come they must see go";
    arena->release(arena->allocate(kPage), kPage);
    EXPECT_EQ(others.size(), 1u);
  }
  EXPECT_TRUE(mapped.empty());
  EXPECT_TRUE(others.empty());
}

TEST(Arena, ThreadsNeverPassTheBudgetNorShareABuffer) {
  const std::uint64_t seed = test_seed(17);
  SCOPED_TRACE(seed);
  const auto arena = make_host_arena("test", 12 * kPage);  // less than one thread alone may hold
  expect_threads_share(*arena, 4 * kPage, 3000, seed);
  EXPECT_LE(arena->peak(), 12 * kPage);
}

TEST(ArenaDeathTest, WhatIsNotGivenBackShows) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const auto arena = make_host_arena("test", kPage);
        (void)arena->allocate(1);
      },
      "in_use");
}

}  // namespace
}  // namespace zg::test
