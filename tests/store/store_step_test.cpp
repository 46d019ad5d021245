// Steps that repeat, exactly or nearly.
#include <gtest/gtest.h>

#include <thread>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr SegmentId kSegments = 20;
constexpr int kRoom = 8;

// Reads segments at the host, in room for some of them, and looks at each. Nothing is under way when it asks,
// so that what is missed does not depend on who is faster.
class Steps {
 public:
  Steps()
      : rig_(table_, {0, kRoom * kPage},
             std::make_unique<MemoryIo>(1, table_.drive_bytes() * 2, MemoryIo::Options{})) {
    for (SegmentId id = 0; id < kSegments; ++id)
      fill(store().acquire(id, Tier::kHost, Access::kOverwrite).data(), kPage, id, 0);
    store().demote_all();
    store().drain();
  }
  TensorStore& store() { return *rig_.store; }
  Rig& rig() { return rig_; }

  void read(SegmentId id) {
    store().drain();
    const Lease lease = store().acquire(id, Tier::kHost, Access::kRead);
    EXPECT_TRUE(holds(lease.data(), kPage, id, 0)) << id;
  }
  // Runs a step that reads these segments; returns its misses.
  std::int64_t step(const std::vector<SegmentId>& ids, const char* name = "step") {
    const std::int64_t before = misses();
    store().step_begin(name);
    for (const SegmentId id : ids) read(id);
    store().step_end();
    store().drain();
    store().check();
    rig_.within_budgets();
    return misses() - before;
  }
  std::int64_t misses() { return store().statistics().tiers[static_cast<std::size_t>(Tier::kHost)].misses; }
  std::int64_t left_record() { return store().statistics().left_record; }

 private:
  TensorTable table_ = equal_table(1, kSegments);
  Rig rig_;
};

std::vector<SegmentId> up_to(SegmentId end, SegmentId begin = 0) {
  std::vector<SegmentId> ids;
  for (SegmentId id = begin; id < end; ++id) ids.push_back(id);
  return ids;
}

TEST(StoreStep, TheSecondStepMissesNothing) {
  Steps steps;
  EXPECT_EQ(steps.step(up_to(kSegments)), kSegments);
  for (int again = 0; again < 3; ++again) EXPECT_EQ(steps.step(up_to(kSegments)), 0) << again;
  EXPECT_EQ(steps.left_record(), 0);
  const StoreStatistics s = steps.store().statistics();
  EXPECT_GE(s.prefetches, 3 * (kSegments - kRoom));
  EXPECT_LE(s.prefetched_in_vain, 2);
}

// Next use reads no more than it must: what has no room beside what is fetched ahead (half of it), each time
// round.
TEST(StoreStep, WhatHasRoomStays) {
  Steps steps;
  for (int i = 0; i < 3; ++i) (void)steps.step(up_to(kSegments));
  const LinkBytes before = steps.store().traffic();
  constexpr int kTimes = 4;
  for (int i = 0; i < kTimes; ++i) (void)steps.step(up_to(kSegments));
  const std::int64_t read = (steps.store().traffic() - before).nvme_read() / kPage;
  EXPECT_LE(read, kTimes * (kSegments - kRoom / 2 + 1));  // LRU: all of them
}

TEST(StoreStep, AccessesBesideTheRecordAreCountedAndRight) {
  Steps steps;
  (void)steps.step(up_to(12));
  std::vector<SegmentId> ids = up_to(12);
  ids.insert(ids.begin() + 6, {15, 16, 17});
  (void)steps.step(ids);
  EXPECT_EQ(steps.left_record(), 3);
}

TEST(StoreStep, LeftOutAndSwappedAccessesDoNotLeadAstray) {
  Steps steps;
  (void)steps.step(up_to(kSegments));
  std::vector<SegmentId> ids = up_to(kSegments);
  ids.erase(ids.begin() + 5, ids.begin() + 8);
  std::swap(ids[10], ids[11]);
  // Until enough of the rest is seen, what was left out may still come, and keeps the room that it was
  // fetched to.
  EXPECT_LE(steps.step(ids), 8);
  EXPECT_EQ(steps.left_record(), 0);
  EXPECT_LE(steps.step(ids), 1);
}

TEST(StoreStep, AnEarlyExitKeepsTheLongerRecord) {
  Steps steps;
  (void)steps.step(up_to(kSegments));
  EXPECT_LE(steps.step(up_to(6)), 0);
  EXPECT_LE(steps.step(up_to(kSegments)), 1);
  EXPECT_EQ(steps.left_record(), 0);
}

TEST(StoreStep, AnEvaluationInBetweenIsExpectedTheSecondTime) {
  Steps steps;
  const std::vector<SegmentId> train = up_to(10), evaluate = up_to(kSegments, 10);
  for (int i = 0; i < 2; ++i) {
    (void)steps.step(train, "train");
    (void)steps.step(evaluate, "evaluation");
  }
  // Each knows what follows it; the start of both is fetched during the other.
  EXPECT_LE(steps.step(train, "train"), 1);
  EXPECT_LE(steps.step(evaluate, "evaluation"), 1);
  EXPECT_EQ(steps.left_record(), 0);
}

TEST(StoreStep, WhatIsExpectedFromATraceNeedsNoFirstStep) {
  Steps steps;
  Program program("step");
  for (const SegmentId id : up_to(kSegments))
    program.add_op(std::vector<AccessStep>{{id, Tier::kHost, Access::kRead, false}});
  program.finish(kSegments);
  steps.store().expect(program);
  EXPECT_EQ(steps.step(up_to(kSegments)), 0);
}

// A program or a demotion between steps ends the forecast for a while; afterwards it is followed again.
TEST(StoreStep, AProgramOrASinkInBetweenIsNoReasonToForget) {
  for (const bool program_between : {true, false}) {
    Steps steps;
    for (int i = 0; i < 3; ++i) (void)steps.step(up_to(kSegments));
    Program program("p");
    for (const SegmentId id : {3, 4, 5})
      program.add_op(std::vector<AccessStep>{{id, Tier::kHost, Access::kRead, false}});
    program.finish(kSegments);
    if (program_between) {
      steps.store().run(&program, nullptr);
      for (const SegmentId id : {3, 4, 5}) (void)steps.store().acquire(id, Tier::kHost, Access::kRead);
      steps.store().run(nullptr, nullptr);
    } else {
      steps.store().demote_all();
    }
    steps.store().drain();
    EXPECT_GE(steps.store().report(7)[0].next_use, 0) << "the next step is known";
    EXPECT_LE(steps.step(up_to(kSegments)), 2);
    EXPECT_EQ(steps.step(up_to(kSegments)), 0);
  }
}

TEST(StoreStep, TensorsMayComeDuringAStep) {
  Steps steps;
  for (int i = 0; i < 2; ++i) {
    steps.store().step_begin();
    for (int n = 0; n < 40; ++n) {
      const TensorId t = steps.store().add(
          {.name = fmt::format("new{}.{}", i, n), .dtype = DType::kU8, .count = 100, .lowest = Tier::kHost});
      const SegmentId id = steps.store().table().tensor(t).first_segment;
      if (n < 2) steps.store().acquire(id, Tier::kHost, Access::kOverwrite).release();
    }
    steps.read(1);
    steps.store().step_end();
    steps.store().check();
  }
}

// Other threads acquire during a step. Their accesses are recorded with it, in any order.
TEST(StoreStep, SeveralThreadsInAStep) {
  Steps steps;
  for (int round = 0; round < 30; ++round) {
    steps.store().step_begin();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (SegmentId id = t; id < kSegments; id += 4) {
          const Lease lease = steps.store().acquire(id, Tier::kHost, Access::kRead);
          EXPECT_TRUE(holds(lease.data(), kPage, id, 0)) << id;
        }
      });
    }
    for (auto& t : threads) t.join();
    steps.store().step_end();
  }
  steps.store().drain();
  steps.store().check();
  EXPECT_LT(steps.left_record(), 30 * kSegments / 4);
}

}  // namespace
}  // namespace zg::test
