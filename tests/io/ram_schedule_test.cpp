// What stalls and changes of speed leave of a drive made of memory. The truth is checked against sums by hand
// and by small steps, at points of the clock that are made up: sums of whole nanoseconds, so that they differ
// by the rounding of a double. Only the last tests look at the clock, and as in ram_test.cpp at lower bounds.
#include "io/ram_schedule.hpp"

#include <cmath>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "io/queue.hpp"
#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

using std::chrono::nanoseconds;

Clock::time_point at(double s) {
  return Clock::time_point(nanoseconds(std::llround(s * 1e9)));
}
double offered(const RamModel& model, double from, double to) {
  return full_speed_seconds(model, at(from), at(to));
}
RamModel stalls(double every, double seconds) {
  return {.bytes_per_second = 1e9, .stall_every_seconds = every, .stall_seconds = seconds};
}
RamModel changes(double every, double factor) {
  return {.bytes_per_second = 1e9, .change_every_seconds = every, .change_factor = factor};
}

// --- by hand ---

TEST(RamSchedule, WithoutStallsAndChangesTimeIsOffered) {
  const RamModel constant[] = {{.bytes_per_second = 3e8},
                               {.bytes_per_second = 3e8, .stall_every_seconds = 2},
                               {.bytes_per_second = 3e8, .change_every_seconds = 2},
                               {.bytes_per_second = 3e8, .change_factor = 7}};
  for (const RamModel& model : constant) {
    EXPECT_TRUE(RamSchedule(model).is_constant());
    EXPECT_DOUBLE_EQ(offered(model, 1.25, 1e6), 1e6 - 1.25);
    EXPECT_EQ(mean_bytes_per_second(model), 3e8);
  }
  EXPECT_EQ(offered(constant[0], 5, 5), 0);
  EXPECT_EQ(offered(constant[0], 5, 4), 0);
}

TEST(RamSchedule, AStallIsTheFirstPartOfItsPeriod) {
  const RamModel model = stalls(2, 0.5);
  EXPECT_EQ(offered(model, 0, 0.5), 0);
  EXPECT_EQ(offered(model, 4.125, 4.375), 0);
  EXPECT_DOUBLE_EQ(offered(model, 0, 2), 1.5);
  EXPECT_DOUBLE_EQ(offered(model, 0.25, 1), 0.5);
  EXPECT_DOUBLE_EQ(offered(model, 1.75, 2.75), 0.5);
  EXPECT_DOUBLE_EQ(offered(model, -2, 0), 1.5);
  EXPECT_DOUBLE_EQ(offered(model, -1.75, -1), 0.5);
  EXPECT_DOUBLE_EQ(offered(model, 0, 20000), 15000);
  EXPECT_DOUBLE_EQ(mean_bytes_per_second(model), 0.75e9);
}

TEST(RamSchedule, FullSpeedComesFirstThenTheSlowHalf) {
  const RamModel model = changes(3, 4);
  EXPECT_DOUBLE_EQ(offered(model, 0, 3), 3);
  EXPECT_DOUBLE_EQ(offered(model, 3, 6), 0.75);
  EXPECT_DOUBLE_EQ(offered(model, 2, 7), 1 + 0.75 + 1);
  EXPECT_DOUBLE_EQ(offered(model, -3, 0), 0.75);
  EXPECT_DOUBLE_EQ(offered(model, 0, 6000), 3750);
  EXPECT_DOUBLE_EQ(mean_bytes_per_second(model), 0.625e9);
}

TEST(RamSchedule, StallsAndChangesTogether) {
  // All stalls in the halves of full speed; then in the slow ones; then by turns.
  RamModel model = stalls(2, 0.5);
  model.change_every_seconds = 1, model.change_factor = 2;
  EXPECT_DOUBLE_EQ(offered(model, 0, 2), 0.5 + 0.5);
  EXPECT_DOUBLE_EQ(mean_bytes_per_second(model), 0.5e9);
  model.stall_seconds = 1.5;
  EXPECT_DOUBLE_EQ(offered(model, 0, 2), 0.25);
  EXPECT_DOUBLE_EQ(mean_bytes_per_second(model), 0.125e9);
  model.stall_every_seconds = 3, model.stall_seconds = 1;
  // Full in [0, 1), [2, 3), [4, 5); stalls in [0, 1) and [3, 4).
  EXPECT_DOUBLE_EQ(offered(model, 0, 6), (1 + 1) + (2 * 1) / 2.0);
  EXPECT_DOUBLE_EQ(mean_bytes_per_second(model), 0.5e9);
}

TEST(RamSchedule, ABlockThatStraddlesTakesWhatTheScheduleSays) {
  const auto done = [](const RamModel& model, double start, double work) {
    return std::chrono::duration<double>(RamSchedule(model).done(at(start), work).time_since_epoch()).count();
  };
  constexpr double kNanosecond = 1.5e-9;  // rounded down, and what a double cannot tell
  const RamModel stalling = stalls(2, 0.5), changing = changes(3, 4);
  EXPECT_NEAR(done(stalling, 1.75, 0.5), 2.75, kNanosecond);
  EXPECT_NEAR(done(stalling, 1.75, 0.25), 2, kNanosecond);  // just before the stall
  EXPECT_NEAR(done(stalling, 1.75, 0.25 + 1e-6), 2.5 + 1e-6, kNanosecond);
  EXPECT_NEAR(done(stalling, 0.125, 3.25), 4.75, kNanosecond);
  EXPECT_NEAR(done(stalling, 0.125, 0), 0.5, kNanosecond);  // nothing is served in a stall
  EXPECT_NEAR(done(stalling, 0.75, 0), 0.75, kNanosecond);
  EXPECT_NEAR(done(changing, 2, 2), 6.25, kNanosecond);  // 1 s, 0.75 s in 3 s, 0.25 s
  EXPECT_NEAR(done(changing, 2, 1.5), 5, kNanosecond);
  EXPECT_NEAR(done(changing, 4, 0.5), 6, kNanosecond);
  EXPECT_NEAR(done(changing, -1, 0.5), 0.25, kNanosecond);
}

TEST(RamSchedule, WhatTakesForeverIsCutOff) {
  constexpr double kLongest = RamSchedule::kLongest;
  for (const RamModel& model : {stalls(10, 9.9), changes(1e5, 1e300)})
    EXPECT_EQ(RamSchedule(model).done(at(7), 1e300), at(7 + kLongest));
}

// --- against sums of small steps, of models made by chance ---

// Periods and stalls of whole milliseconds, so that the speed is the same within each.
class RandomSchedules : public testing::Test {
 protected:
  std::int64_t below(std::uint64_t bound) { return static_cast<std::int64_t>(random_.below(n_++, bound)); }
  RamModel model() {
    RamModel m{.bytes_per_second = 1e9};
    if (below(4) > 0) {
      stall_every_ = 10 + below(60);
      stall_ = below(static_cast<std::uint64_t>(stall_every_));
      m.stall_every_seconds = static_cast<double>(stall_every_) * 1e-3;
      m.stall_seconds = static_cast<double>(stall_) * 1e-3;
    } else {
      stall_every_ = 1, stall_ = 0;
    }
    change_ = below(3) > 0 ? 10 + below(40) : 0;
    m.change_every_seconds = static_cast<double>(change_) * 1e-3;
    m.change_factor = 1 + static_cast<double>(below(40)) / 8;
    return m;
  }
  // In the millisecond that begins at `t`, in another way than the schedule's.
  double speed_at(const RamModel& m, std::int64_t t) const {
    if (t % stall_every_ < stall_) return 0;
    return change_ > 0 && t / change_ % 2 == 1 ? 1 / m.change_factor : 1;
  }
  double summed(const RamModel& m, std::int64_t from, std::int64_t to) const {
    double sum = 0;
    for (std::int64_t t = from; t < to; ++t) sum += speed_at(m, t);
    return sum * 1e-3;
  }

  const NamedRandom random_{printed_seed(), "schedules"};
  std::uint64_t n_ = 0;
  std::int64_t stall_every_ = 1, stall_ = 0, change_ = 0;  // of the last model, in milliseconds
};

TEST_F(RandomSchedules, OfferWhatTheSumOfTheirMillisecondsIs) {
  for (int round = 0; round < 300; ++round) {
    const RamModel m = model();
    const std::int64_t from = 1000000 + below(1000), to = from + below(3000);
    // A sum of 3000 terms, each rounded.
    EXPECT_NEAR(offered(m, static_cast<double>(from) * 1e-3, static_cast<double>(to) * 1e-3),
                summed(m, from, to), 1e-9 * (1e-3 + static_cast<double>(to - from)))
        << "round " << round;
  }
}

TEST_F(RandomSchedules, HaveTheMeanOfTheirCommonPeriod) {
  for (int round = 0; round < 300; ++round) {
    const RamModel m = model();
    const std::int64_t period = std::lcm(stall_every_, std::max<std::int64_t>(2 * change_, 1));
    const double mean = summed(m, 0, period) / (static_cast<double>(period) * 1e-3);
    EXPECT_NEAR(mean_bytes_per_second(m), mean * m.bytes_per_second, 1) << "round " << round;
    // And nothing else over a long time: at most a stall and a change more or less, which are below 0.2 s.
    EXPECT_NEAR(offered(m, 0, 100), mean * 100, 0.2) << "round " << round;
  }
}

TEST_F(RandomSchedules, AreDoneWhenTheWorkIsOfferedAndNotBefore) {
  for (int round = 0; round < 1000; ++round) {
    const RamModel m = model();
    const RamSchedule schedule(m);
    const auto start = at(1e5) + nanoseconds(below(1000000000));
    const double work = static_cast<double>(below(100000000)) * 1e-9 / 3;
    const auto done = schedule.done(start, work);
    // Rounded down to a nanosecond; and a double of a tenth of a second is rounded itself, once a piece.
    constexpr double kRounding = 1e-12;
    EXPECT_LE(schedule.offered(start, done), work + kRounding) << "round " << round;
    EXPECT_GT(schedule.offered(start, done + nanoseconds(1)), work - kRounding) << "round " << round;
    // One that follows begins where the first ends: together they take what both take at once.
    const auto both = schedule.done(start, 2 * work), second = schedule.done(done, work);
    EXPECT_NEAR(schedule.offered(start, second), schedule.offered(start, both), 2e-9) << "round " << round;
  }
}

// --- what is refused ---

TEST(RamSchedule, RefusesWhatHasNoMeaning) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  struct Case {
    RamModel model;
    const char* text;
  };
  const Case cases[] = {
      {stalls(0.005, 0.001), "time between stalls of 0.005"},
      {stalls(-1, 0), "time between stalls of -1"},
      {stalls(2e6, 0), "time between stalls"},
      {stalls(nan, 0), "time between stalls"},
      {stalls(0, 0.3), "a stall of 0.3"},
      {stalls(2, 2), "a stall of 2"},
      {stalls(2, -0.1), "a stall of -0.1"},
      {stalls(2, nan), "a stall of"},
      {changes(0.001, 2), "time between changes of 0.001"},
      {changes(-1, 2), "time between changes of -1"},
      {changes(inf, 2), "time between changes"},
      {changes(2, 0.5), "change factor of 0.5"},
      {changes(2, nan), "change factor"},
      {changes(2, inf), "change factor"},
  };
  for (const Case& c : cases) {
    const auto refused = [&](const auto& use) {
      const Error e = error_of([&] { use(); });
      EXPECT_EQ(e.code(), Errc::kUsage);
      EXPECT_HAS(e.message(), c.text);
      EXPECT_NE(e.hint(), "") << e.what();
    };
    refused([&] { (void)mean_bytes_per_second(c.model); });
    refused([&] { (void)full_speed_seconds(c.model, at(0), at(1)); });
    refused([&] { (void)make_ram_queue(kPage, 1, c.model); });
  }
}

// --- the queue that follows it ---

class RamScheduleQueue : public testing::Test {
 protected:
  static constexpr std::int64_t kBlock = kMiB;

  void open(RamModel model) {
    model.moves_bytes = false;
    queue_ = make_ram_queue(kBlock, 64, model);
  }
  void begin(std::uint32_t id, Op op) {
    queue_->begin({.op = op, .id = id, .data = nullptr, .bytes = kBlock});
  }
  void reap(std::size_t count) {
    std::vector<BlockDone> done;
    while (done.size() < count) queue_->reap(done, Queue::kForever);
  }
  // The seconds at full speed that the drive offers until `count` blocks are done that are begun at once.
  double offered_for(const RamModel& model, std::uint32_t count, const std::vector<Op>& ops) {
    open(model);
    const auto start = Clock::now();
    for (std::uint32_t id = 0; id < count; ++id) begin(id, ops[id % ops.size()]);
    reap(count);
    return full_speed_seconds(model, start, Clock::now());
  }

  std::unique_ptr<Queue> queue_;
};

// A block takes a millisecond at full speed, so that the blocks are begun long before they can be done. Each
// is rounded down to a nanosecond.
TEST_F(RamScheduleQueue, ServesNoMoreThanIsOffered) {
  RamModel model{.bytes_per_second = kBlock / 1e-3};
  const auto rounding = [](int blocks) { return blocks * 2e-9; };
  for (const bool changing : {false, true}) {
    model.stall_every_seconds = changing ? 0 : 0.02;
    model.stall_seconds = changing ? 0 : 0.015;
    model.change_every_seconds = changing ? 0.01 : 0;
    model.change_factor = 100;
    EXPECT_GE(offered_for(model, 40, {Op::kRead}), 40e-3 - rounding(40));
    EXPECT_GE(offered_for(model, 40, {Op::kRead, Op::kWrite}), 40e-3 - rounding(40));  // half duplex
    RamModel duplex = model;
    duplex.duplex = true;
    EXPECT_GE(offered_for(duplex, 40, {Op::kRead, Op::kWrite}), 20e-3 - rounding(20));
    EXPECT_GE(offered_for(duplex, 40, {Op::kWrite}), 40e-3 - rounding(40));
    RamModel channels = model;
    channels.channels = 8;
    EXPECT_GE(offered_for(channels, 1, {Op::kRead}), 8e-3 - rounding(1));
    EXPECT_GE(offered_for(channels, 40, {Op::kRead, Op::kWrite}), 40e-3 - rounding(40));
  }
}

// No bandwidth, so that the stall alone is waited for. It follows the clock, not the queue: three in four
// blocks are begun in a stall, and each of those is done when no stall is.
TEST_F(RamScheduleQueue, AnswersNoBlockThatBeginsInAStallBeforeItsEnd) {
  const RamModel model{.stall_every_seconds = 0.02, .stall_seconds = 0.015};
  const auto period_of = [](Clock::time_point t) { return t.time_since_epoch() / nanoseconds(20000000); };
  const auto in_stall = [&](Clock::time_point t) {
    return t.time_since_epoch() % nanoseconds(20000000) < nanoseconds(15000000);
  };
  open(model);
  int seen = 0;
  for (int i = 0; seen < 5 && i < 1000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // or all tries fit between two stalls
    const auto before = Clock::now();
    begin(0, Op::kRead);
    const auto after = Clock::now();
    reap(1);
    const auto done = Clock::now();
    if (!in_stall(before) || !in_stall(after) || period_of(before) != period_of(after)) continue;
    EXPECT_TRUE(period_of(done) > period_of(before) || !in_stall(done));
    ++seen;
  }
  EXPECT_EQ(seen, 5);
}

TEST_F(RamScheduleQueue, SaysWhatItPretendsToBe) {
  open({.bytes_per_second = 2e9,
        .stall_every_seconds = 2,
        .stall_seconds = 0.3,
        .change_every_seconds = 3,
        .change_factor = 4});
  for (const char* text : {"stalls 0.3 s every 2", "4x slower and back every 3"})
    EXPECT_HAS(queue_->features(), text);
  open({.bytes_per_second = 2e9, .stall_every_seconds = 2, .change_every_seconds = 3});
  for (const char* text : {"stall", "slower"}) EXPECT_HAS_NOT(queue_->features(), text);
}

}  // namespace
}  // namespace zg::io::test
