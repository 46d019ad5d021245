// The causes for which the compute stream stalls.
#include <gtest/gtest.h>

#include <thread>

#include "engine/stall_meter.hpp"
#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

// A stream that reports as busy what the test sets.
class ToldStream final : public Stream {
 public:
  const std::string& name() const override { return name_; }
  Event record() override { return {}; }
  void wait(const Event&) override {}
  void callback(Task) override {}
  void synchronize() override {}
  double busy_seconds() const override { return busy; }
  double waited_seconds() const override { return waited; }
  double busy = 0, waited = 0;

 private:
  std::string name_ = "told";
};

class StallMeterTest : public testing::Test {
 protected:
  // Sleeps; at least the time that is returned passes.
  double pass() {
    const auto begin = Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return seconds_between(begin, Clock::now());
  }
  ToldStream compute_, optimizer_;
  double exchanged_ = 0;
  StallMeter meter_{compute_, optimizer_, [this] { return exchanged_; }};
};

TEST_F(StallMeterTest, EachPieceBelongsToItsCauseAndNothingIsLost) {
  const auto outside = Clock::now();
  meter_.begin();
  const auto inside = Clock::now();
  const double other = pass();
  meter_.awaits(WaitCause::kReads, nullptr);
  const double reads = pass();
  meter_.awaits(WaitCause::kWriteBacks, nullptr);
  const double write_backs = pass();
  meter_.awaits(WaitCause::kMemory, &compute_);
  const double memory = pass();
  meter_.awaits(WaitCause::kCopies, nullptr);
  const double copies = pass();
  meter_.awaits(WaitCause::kLeases, &optimizer_);
  const double optimizer = pass();
  meter_.awaits_nothing();
  const double least = seconds_between(inside, Clock::now());
  const StallTimes times = meter_.end();
  const double most = seconds_between(outside, Clock::now());
  EXPECT_GE(times[StallCause::kOther], other);
  EXPECT_GE(times[StallCause::kReads], reads);
  EXPECT_GE(times[StallCause::kWriteBacks], write_backs);
  EXPECT_GE(times[StallCause::kMemory], memory);
  EXPECT_GE(times[StallCause::kCopies], copies);
  EXPECT_GE(times[StallCause::kOptimizer], optimizer);
  EXPECT_GE(times.total(), least - 1e-9);
  EXPECT_LE(times.total(), most + 1e-9);
}

TEST_F(StallMeterTest, WhatTheOptimizerStillHasIsItsStall) {
  meter_.begin();
  meter_.awaits(WaitCause::kMemory, &optimizer_);
  EXPECT_EQ(meter_.awaited(), StallCause::kOptimizer);
  const double memory = pass();
  meter_.awaits(WaitCause::kLeases, &compute_);  // it computes
  EXPECT_EQ(meter_.awaited(), StallCause::kOther);
  meter_.awaits_nothing();
  EXPECT_EQ(meter_.awaited(), std::nullopt);
  const StallTimes times = meter_.end();
  EXPECT_GE(times[StallCause::kOptimizer], memory);
  EXPECT_EQ(times[StallCause::kMemory], 0);
}

// The rank thread waits, and the stream has work all the while: that is no stall.
TEST_F(StallMeterTest, WaitsBehindWorkDoNotCount) {
  meter_.begin();
  meter_.awaits(WaitCause::kReads, nullptr);
  compute_.busy += 1000;  // more than passes
  meter_.awaits(WaitCause::kWriteBacks, nullptr);
  const double write_backs = pass();
  meter_.awaits_nothing();
  const StallTimes times = meter_.end();
  EXPECT_EQ(times[StallCause::kReads], 0);
  EXPECT_GE(times[StallCause::kWriteBacks], write_backs);
}

// What the stream waits for other parts counts by itself, whatever the rank thread does meanwhile; waits
// before and after it keep their causes.
TEST_F(StallMeterTest, ExchangesOfPartsAreTakenFromWhereTheyWere) {
  meter_.begin();
  meter_.awaits(WaitCause::kReads, nullptr);
  const double parts = pass();
  exchanged_ += parts;
  meter_.mark(StallCause::kRanks);
  const double ranks = pass();
  const StallTimes times = meter_.end();
  EXPECT_NEAR(times[StallCause::kParts], parts, 1e-9);
  EXPECT_GE(times[StallCause::kRanks], ranks);
}

// A stream that counts its waits for events as work waits for exchanges and for copies alike.
TEST_F(StallMeterTest, ExchangesAreNoCopies) {
  meter_.begin();
  exchanged_ += 0.25;
  compute_.busy += 1, compute_.waited += 1;
  meter_.mark(StallCause::kRanks);
  const double ranks = pass();
  const StallTimes times = meter_.end();
  EXPECT_NEAR(times[StallCause::kParts], 0.25, 1e-9);
  EXPECT_NEAR(times[StallCause::kCopies], 0.75, 1e-9);
  EXPECT_GE(times[StallCause::kRanks], ranks);
}

void expect_whole(const StepResult& r) {
  EXPECT_EQ(r.stall_for.total(), r.stall);
  for (const double seconds : r.stall_for.seconds) EXPECT_GE(seconds, 0);
  // Each stream's clock is read after the step's.
  EXPECT_LE(r.stall, r.seconds + 1e-3);
}

TEST(Stall, ThePartsAreTheStallWheneverUpdatesRun) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
    SCOPED_TRACE(name_of(timing));
    TinySetup setup;
    setup.layout.drives = 1;
    setup.room = Room::kSmallest;
    setup.timing = timing;
    if (timing == UpdateTiming::kEarly) setup.clip = 0;
    TinyRun run(setup);
    run.initialize();
    double waits = 0;
    for (int i = 0; i < 4; ++i) {
      const StepResult r = run.step(i < 3 ? Then::kTrain : Then::kPause);
      expect_whole(r);
      waits += r.stall_for[StallCause::kReads] + r.stall_for[StallCause::kWriteBacks];
    }
    EXPECT_GT(waits, 0);
    (void)run.evaluate();
    run.settle();
  }
}

TEST(Stall, WithoutDrivesNothingWaitsForThem) {
  TinySetup setup;
  setup.room = Room::kSmallest;
  TinyRun run(setup);
  run.initialize();
  for (int i = 0; i < 3; ++i) {
    const StepResult r = run.step(i < 2 ? Then::kTrain : Then::kPause);
    expect_whole(r);
    EXPECT_EQ(r.stall_for[StallCause::kReads], 0);
    EXPECT_EQ(r.stall_for[StallCause::kWriteBacks], 0);
  }
}

TEST(Stall, TheWorkIsToldInWordsOfTheModel) {
  TinySetup setup;
  TinyRun run(setup);
  EXPECT_EQ(run.engine().work(), "");
  run.initialize();
  (void)run.step(Then::kPause);
  EXPECT_EQ(run.engine().work(), "gradient of the embedding");  // the last operation of a step
}

}  // namespace
}  // namespace zg::test
