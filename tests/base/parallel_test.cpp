#include "ziggurat/base/parallel.hpp"

#include <gtest/gtest.h>
#include <tbb/info.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

namespace zg {
namespace {

TEST(ParallelFor, ChunksDependOnSizesAlone) {
  for (const int threads : {1, 2, 5}) {
    set_parallelism(threads);
    EXPECT_EQ(parallelism(), threads);
    for (const std::int64_t n : {0, 1, 6, 7, 8, 1000}) {
      for (const std::int64_t grain : {1, 3, 7, 2000}) {
        std::mutex mutex;
        std::set<std::pair<std::int64_t, std::int64_t>> chunks, expected;
        parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          std::lock_guard lock(mutex);
          EXPECT_TRUE(chunks.insert({begin, end}).second);
        });
        for (std::int64_t b = 0; b < n; b += grain) expected.insert({b, std::min(n, b + grain)});
        EXPECT_EQ(chunks, expected) << n << " by " << grain;
      }
    }
  }
  set_parallelism(tbb::info::default_concurrency());
}

TEST(ParallelFor, NestsAndEveryElementIsVisitedOnce) {
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
}

TEST(ParallelFor, WhatTheBodyThrowsArrives) {
  EXPECT_THROW(parallel_for(100, 1,
                            [](std::int64_t begin, std::int64_t) {
                              if (begin == 50) throw std::runtime_error("from the body");
                            }),
               std::runtime_error);
}

TEST(ParallelDeathTest, GrainMustBePositive) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(parallel_for(10, 0, [](std::int64_t, std::int64_t) {}), "grain >= 1.*0 against 1");
}

}  // namespace
}  // namespace zg
