// Which segments are kept at the host for good.
#include "ziggurat/store/placement.hpp"

#include <gtest/gtest.h>

#include "store/trace_support.hpp"
#include "support/seed.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg::test {
namespace {

using Ids = std::vector<SegmentId>;

// Ten segments of a page, far apart from each other, so that each use would fetch.
std::vector<AccessStep> filler(SegmentId first, int count) {
  std::vector<AccessStep> accesses;
  for (int i = 0; i < count; ++i) accesses.push_back(at_host(first + i));
  return accesses;
}

std::vector<AccessStep> operator+(std::vector<AccessStep> a, const std::vector<AccessStep>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(KeepByValue, TheMostValuableBytesComeFirst) {
  // 0 is read twice a round, 1 is modified once (a read and a write), 2 is read once, 3 is written and read
  // within a moment and then dead, 4 is overwritten, and read half a round later.
  const std::vector<AccessStep> round = std::vector<AccessStep>{at_host(0), at_host(4, Access::kOverwrite)} +
                                        filler(5, 10) +
                                        std::vector<AccessStep>{at_host(0),
                                                                at_host(1, Access::kWrite),
                                                                at_host(3, Access::kOverwrite),
                                                                at_host(3, Access::kRead, true),
                                                                at_host(4),
                                                                at_host(2)} +
                                        filler(5, 10);
  const TensorTable table = equal_table(1, 15);
  const Program program = program_of(round, 15);
  // Two pages stay free: the working set of an operation, and the largest segment.
  const auto kept = [&](int pages) { return keep_by_value(table, program, pages * kPage); };
  EXPECT_EQ(kept(2), Ids{});
  EXPECT_EQ(kept(3), Ids{0});
  EXPECT_EQ(kept(4), (Ids{0, 1}));
  EXPECT_EQ(kept(5), (Ids{0, 1, 4}));
  const Ids all = kept(100);
  EXPECT_EQ(std::count(all.begin(), all.end(), 3), 0) << "nothing is saved by keeping it";
  EXPECT_EQ(all.back(), 2);
  EXPECT_EQ(all.size(), 14u);
}

TEST(KeepByValue, LargerOnesFirstAndWhatDoesNotFitIsPassedOver) {
  TensorTable table(1);
  for (const std::int64_t pages : {1, 5, 3, 1}) {
    table.add({.name = fmt::format("{}", table.tensor_count()), .dtype = DType::kU8, .count = pages * kPage});
  }
  // All of them are 10 pages, which are left free in any case: the largest, and the largest once more.
  const Program program = program_of(scan(4, Access::kRead), 4);
  EXPECT_EQ(keep_by_value(table, program, 100 * kPage), Ids{}) << "everything is soon used again";
  // Six more of 5 pages: each use would fetch.
  for (int i = 0; i < 6; ++i) {
    table.add({.name = fmt::format("more{}", i), .dtype = DType::kU8, .count = 5 * kPage});
  }
  const Program longer = program_of(scan(10, Access::kRead), 10);
  const auto kept = [&](int pages) { return keep_by_value(table, longer, (10 + pages) * kPage); };
  EXPECT_EQ(kept(4), (Ids{2, 0})) << "of 5, 3, 1 and 1 pages: 3, and the first 1 for the rest";
  EXPECT_EQ(kept(25 + 4), (Ids{1, 4, 5, 6, 7, 2, 0}));
}

TEST(KeepByValue, LeavesRoomForWhatMayNotSink) {
  TensorTable table(1);
  for (int i = 0; i < 12; ++i) {
    table.add({.name = fmt::format("{}", i),
               .dtype = DType::kU8,
               .count = kPage,
               .lowest = i < 2 ? Tier::kHost : Tier::kNvme});
  }
  // 0 stays all the time, 1 for a while.
  auto round = std::vector<AccessStep>{at_host(0, Access::kWrite), at_host(1, Access::kOverwrite)} +
               filler(2, 10) + std::vector<AccessStep>{at_host(1, Access::kRead, true)};
  const Program program = program_of(round, 12);
  EXPECT_EQ(keep_by_value(table, program, 4 * kPage), Ids{});
  const Ids kept = keep_by_value(table, program, 6 * kPage);
  EXPECT_EQ(kept.size(), 2u);
  const AccessTrace trace = trace_of(table, round);
  EXPECT_FALSE(replay(trace, {0, 6 * kPage}, next_use_policy(), {.keep = kept}).obstacle);
}

TEST(KeepByValue, WhatIsKeptFitsAndSavesWhatItSays) {
  const std::uint64_t seed = test_seed(4301);
  SCOPED_TRACE(seed);
  Random random(seed);
  std::int64_t with = 0, without = 0;
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    AccessTrace trace;
    trace.table = random_table(random, 1, 6 + below(random, 20));
    const auto given = random_given(random, trace.table.segment_count());
    trace.programs.push_back(random_program(random, "p", trace.table, given, {.ops = 40}));
    trace.sequence = {0};
    const std::int64_t all = trace.table.total_charge(Tier::kHost);
    const std::int64_t host = all * (2 + below(random, 9)) / 10;
    const auto kept = keep_by_value(trace.table, trace.programs[0], host);
    if (kept.empty()) continue;
    std::int64_t bytes = 0;
    for (const SegmentId id : kept) {
      bytes += trace.table.segment(id).charge;
      EXPECT_EQ(trace.table.segment(id).lowest, Tier::kNvme);
    }
    EXPECT_LT(bytes, host);
    const Budgets budgets{all, host};
    const ReplayResult r = replay(trace, budgets, lru_policy(), {.keep = kept});
    EXPECT_FALSE(r.obstacle) << "room was to be left for every operation";
    const ReplayResult lru = replay(trace, budgets, lru_policy());
    with += r.per_round.nvme_read() + r.per_round.nvme_write();
    without += lru.per_round.nvme_read() + lru.per_round.nvme_write();
  }
  EXPECT_LE(with, without);
}

}  // namespace
}  // namespace zg::test
