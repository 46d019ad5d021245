#include "ziggurat/base/parallel.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <tbb/info.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/errors.hpp"

namespace zg {
namespace {

// Restores the defaults after each test.
class ParallelFor : public testing::Test {
 protected:
  ~ParallelFor() override { set_parallelism(tbb::info::default_concurrency()); }
};
using ParallelDeathTest = ParallelFor;

using Chunks = std::set<std::pair<std::int64_t, std::int64_t>>;

// The threads that took part in a loop, each once.
Chunks chunks_of(std::int64_t n, std::int64_t grain, Near near = {}) {
  std::mutex mutex;
  Chunks chunks;
  parallel_for(near, n, grain, [&](std::int64_t begin, std::int64_t end) {
    std::lock_guard lock(mutex);
    EXPECT_TRUE(chunks.insert({begin, end}).second);
  });
  return chunks;
}

Chunks chunks_expected(std::int64_t n, std::int64_t grain) {
  Chunks chunks;
  for (std::int64_t b = 0; b < n; b += grain) chunks.insert({b, std::min(n, b + grain)});
  return chunks;
}

void expect_chunks(Near near = {}) {
  for (const std::int64_t n : {0, 1, 6, 7, 8, 1000}) {
    for (const std::int64_t grain : {1, 3, 7, 2000})
      EXPECT_EQ(chunks_of(n, grain, near), chunks_expected(n, grain)) << n << " by " << grain;
  }
}

// Two of the cores of this process, as nodes of their own: one team each.
CoreAssignment two_nodes(int first = 0, int second = 1) {
  const std::vector<int> cores = usable_cores();
  CoreAssignment a;
  a.nodes.push_back({.node = first, .compute = {cores.at(0)}, .threads = 1});
  a.nodes.push_back({.node = second, .compute = {cores.at(1)}, .threads = 1});
  a.bind = true;
  return a;
}

// The last core of this process is reserved, the others compute.
CoreAssignment one_reserved() {
  std::vector<int> cores = usable_cores();
  CoreAssignment a;
  a.nodes.push_back({.node = 0, .drives = {cores.back()}});
  cores.pop_back();
  a.nodes[0].threads = static_cast<int>(cores.size());
  a.nodes[0].compute = cores;
  a.bind = true;
  return a;
}

bool has_two_cores() {
  return usable_cores().size() >= 2;
}

void spin(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST_F(ParallelFor, ChunksDependOnSizesAlone) {
  for (const int threads : {1, 2, 5}) {
    set_parallelism(threads);
    EXPECT_EQ(parallelism(), threads);
    expect_chunks();
  }
  if (!has_two_cores()) return;
  ASSERT_EQ(set_parallelism(one_reserved()), "");
  EXPECT_EQ(parallelism(), static_cast<int>(usable_cores().size()) - 1);
  expect_chunks();
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  EXPECT_EQ(parallelism(), 2);
  expect_chunks();
  std::vector<char> memory(4 * kAskBytes, 1);
  expect_chunks({memory.data(), static_cast<std::int64_t>(memory.size())});
}

TEST_F(ParallelFor, NestsAndEveryElementIsVisitedOnce) {
  const auto visit = [] {
    constexpr std::int64_t kOuter = 37, kInner = 101;
    std::vector<int> visits(kOuter * kInner, 0);
    parallel_for(kOuter, 2, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        parallel_for(kInner, 10, [&](std::int64_t b, std::int64_t e) {
          for (std::int64_t j = b; j < e; ++j) ++visits[static_cast<std::size_t>(i * kInner + j)];
        });
      }
    });
    for (const int v : visits) ASSERT_EQ(v, 1);
  };
  visit();
  set_parallelism(1);
  visit();
  if (!has_two_cores()) return;
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  for (int repeat = 0; repeat < 20; ++repeat) visit();
}

TEST_F(ParallelFor, WhatTheBodyThrowsArrives) {
  const auto throws = [] {
    std::atomic<int> after{0};
    EXPECT_THROW(parallel_for(100, 1,
                              [&](std::int64_t begin, std::int64_t) {
                                if (begin == 50) throw std::runtime_error("from the body");
                                after += begin > 50;
                              }),
                 std::runtime_error);
    return after.load();
  };
  (void)throws();
  if (!has_two_cores()) return;
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  // The loop is over when it throws: nobody still uses the body, and the next one runs.
  for (int repeat = 0; repeat < 20; ++repeat) EXPECT_LE(throws(), 49);
  expect_chunks();
}

TEST_F(ParallelDeathTest, GrainMustBePositive) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(parallel_for(10, 0, [](std::int64_t, std::int64_t) {}), "grain >= 1.*0 against 1");
}

// The most that were in a body at once, with several callers.
int most_at_once(int callers, int repeats) {
  std::atomic<int> inside{0}, most{0};
  const auto loop = [&] {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      parallel_for(16, 1, [&](std::int64_t, std::int64_t) {
        const int now = ++inside;
        for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {
        }
        spin(std::chrono::microseconds(100));
        --inside;
      });
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) threads.emplace_back(loop);
  for (std::thread& thread : threads) thread.join();
  return most;
}

TEST_F(ParallelFor, ALimitHoldsForAllCallersTogether) {
  const int cores = tbb::info::default_concurrency();
  for (const int limit : {1, cores - 1}) {
    if (limit < 1 || limit >= cores) continue;
    set_parallelism(limit);
    EXPECT_LE(most_at_once(4, 20), limit);
  }
  if (!has_two_cores()) return;
  ASSERT_EQ(set_parallelism(one_reserved()), "");
  EXPECT_LE(most_at_once(4, 20), cores - 1);
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  EXPECT_LE(most_at_once(4, 20), 2);
}

TEST_F(ParallelFor, WithoutALimitAllCoresWork) {
  if (!has_two_cores()) GTEST_SKIP() << "one core";
  // Two chunks that wait for each other.
  const auto meet = [] {
    std::atomic<int> there{0};
    parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
      ++there;
      while (there < 2) std::this_thread::yield();
    });
  };
  meet();
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  meet();
}

TEST_F(ParallelFor, WhoComputesKeepsOffReservedCores) {
  if (!has_two_cores()) GTEST_SKIP() << "one core";
  const std::vector<int> before = usable_cores();
  const CoreAssignment cores = one_reserved();
  ASSERT_EQ(set_parallelism(cores), "");
  // From a thread that is none of TBB's, as streams are.
  std::thread([&] {
    for (int repeat = 0; repeat < 20; ++repeat) {
      parallel_for(16, 1, [&](std::int64_t, std::int64_t) {
        EXPECT_EQ(usable_cores(), cores.nodes[0].compute);
        // Also where loops stand within loops.
        parallel_for(4, 1,
                     [&](std::int64_t, std::int64_t) { EXPECT_EQ(usable_cores(), cores.nodes[0].compute); });
      });
      EXPECT_EQ(usable_cores(), before);
    }
    // What it had set itself is what it has again.
    ASSERT_EQ(bind_this_thread({before.back()}), 0);
    parallel_for(16, 1,
                 [&](std::int64_t, std::int64_t) { EXPECT_EQ(usable_cores(), cores.nodes[0].compute); });
    EXPECT_EQ(usable_cores(), std::vector<int>{before.back()});
    EXPECT_THROW(parallel_for(16, 1, [](std::int64_t, std::int64_t) { throw std::runtime_error("no"); }),
                 std::runtime_error);
    EXPECT_EQ(usable_cores(), std::vector<int>{before.back()});
  }).join();
  EXPECT_EQ(usable_cores(), before);
}

TEST_F(ParallelFor, NobodyIsBoundUnlessAsked) {
  const std::vector<int> before = usable_cores();
  const auto expect_free = [&] {
    for (int repeat = 0; repeat < 20; ++repeat)
      parallel_for(64, 1, [&](std::int64_t, std::int64_t) {
        EXPECT_EQ(usable_cores(), before);
        spin(std::chrono::microseconds(50));
      });
  };
  expect_free();
  set_parallelism(1);
  expect_free();
  if (!has_two_cores()) return;
  CoreAssignment cores = two_nodes();
  cores.bind = false;
  ASSERT_EQ(set_parallelism(cores), "");
  expect_free();
  // Nor by what was set before: workers that were bound are free again.
  for (int repeat = 0; repeat < 5; ++repeat) {
    ASSERT_EQ(set_parallelism(two_nodes()), "");
    (void)chunks_of(1000, 1);
    set_parallelism(tbb::info::default_concurrency());
    expect_free();
  }
}

// The first caller that needs workers is bound to a core; the workers that start for it are not.
TEST_F(ParallelFor, NorAreWorkersThatWereBornBound) {
  if (!has_two_cores()) GTEST_SKIP() << "one core";
  const std::vector<int> before = usable_cores();
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  std::thread([] {
    ASSERT_EQ(bind_this_thread({usable_cores().front()}), 0);
    for (int repeat = 0; repeat < 20; ++repeat) (void)chunks_of(1000, 1);
  }).join();
  set_parallelism(tbb::info::default_concurrency());
  for (int repeat = 0; repeat < 20; ++repeat) {
    parallel_for(64, 1, [&](std::int64_t, std::int64_t) {
      EXPECT_EQ(usable_cores(), before);
      spin(std::chrono::microseconds(50));
    });
  }
}

TEST_F(ParallelFor, EveryNodesThreadsRunOnItsCores) {
  if (!has_two_cores()) GTEST_SKIP() << "one core";
  const CoreAssignment cores = two_nodes();
  ASSERT_EQ(set_parallelism(cores), "");
  // Two chunks that wait for each other: each node has one thread, and so one of them.
  std::mutex mutex;
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::set<std::vector<int>> places;
    std::atomic<int> there{0};
    parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
      {
        std::lock_guard lock(mutex);
        places.insert(usable_cores());
      }
      ++there;
      while (there < 2) std::this_thread::yield();
      // A loop within stays on its node.
      const std::vector<int> mine = usable_cores();
      parallel_for(8, 1, [&](std::int64_t, std::int64_t) { EXPECT_EQ(usable_cores(), mine); });
    });
    EXPECT_EQ(places, (std::set<std::vector<int>>{cores.nodes[0].compute, cores.nodes[1].compute}));
  }
}

TEST_F(ParallelFor, WhoIsDoneWithItsNodesPartHelpsWithTheOthers) {
  if (!has_two_cores()) GTEST_SKIP() << "one core";
  ASSERT_EQ(set_parallelism(two_nodes()), "");
  for (const std::int64_t held : {0, 8}) {  // the first chunk of either node
    std::atomic<int> others{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    parallel_for(16, 1, [&](std::int64_t begin, std::int64_t) {
      others += begin != held;
      while (begin == held && others < 15 && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    });
    EXPECT_LT(std::chrono::steady_clock::now(), end) << "nobody took what lay behind chunk " << held;
  }
}

TEST_F(ParallelFor, ALoopRunsWhereItsMemoryLies) {
  if (!has_two_cores()) GTEST_SKIP() << "one core";
  const int node = read_core_topology().nodes.front().node;
  if (read_core_topology().nodes.size() > 1) GTEST_SKIP() << "pages may lie on any of several nodes";
  const std::size_t bytes = 4 * kAskBytes;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const Near near{memory, static_cast<std::int64_t>(bytes)};
  const auto places = [&](Near where) {
    std::mutex mutex;
    std::set<std::vector<int>> seen;
    for (int repeat = 0; repeat < 10; ++repeat) {
      parallel_for(where, 64, 1, [&](std::int64_t, std::int64_t) {
        spin(std::chrono::microseconds(20));
        std::lock_guard lock(mutex);
        seen.insert(usable_cores());
      });
    }
    return seen;
  };
  const auto on = [](const NodeCores& cores) { return std::set<std::vector<int>>{cores.compute}; };
  const CoreAssignment first = two_nodes(node, node + 1), second = two_nodes(node + 1, node);
  // Pages that were never touched lie nowhere: everybody takes part, here with chunks that wait for each
  // other.
  ASSERT_EQ(set_parallelism(first), "");
  std::atomic<int> there{0};
  parallel_for(near, 2, 1, [&](std::int64_t, std::int64_t) {
    ++there;
    while (there < 2) std::this_thread::yield();
  });
  std::memset(memory, 1, bytes);
  EXPECT_EQ(places(near), on(first.nodes[0]));
  ASSERT_EQ(set_parallelism(second), "");
  EXPECT_EQ(places(near), on(second.nodes[1]));
  munmap(memory, bytes);
}

TEST_F(ParallelFor, CoresThatAreNotOursAreAReasonNotToBind) {
  const std::vector<int> before = usable_cores();
  CoreAssignment cores;
  cores.nodes.push_back({.node = 0, .compute = {before.back() + 1}, .threads = 1});
  cores.bind = true;
  const std::string why = set_parallelism(cores);
  EXPECT_HAS(why, "cores " + std::to_string(before.back() + 1));
  // The loops run all the same, and the limit holds.
  parallel_for(64, 1, [&](std::int64_t, std::int64_t) { EXPECT_EQ(usable_cores(), before); });
  EXPECT_EQ(parallelism(), 1);
  expect_chunks();
}

}  // namespace
}  // namespace zg
