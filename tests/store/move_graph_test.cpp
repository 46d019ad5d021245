// The order of moves, by a driver with a clock of its own.
#include "store/move_graph.hpp"

#include <gtest/gtest.h>

#include "store/move_clock.hpp"
#include "store/programs.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

// Bandwidths in pages a second, by Link.
std::array<double, kLinks> pages_a_second(double to_device, double to_host, double read, double write) {
  const auto bytes = [](double pages) { return pages * static_cast<double>(kPage); };
  return {bytes(to_device), bytes(to_host), bytes(read), bytes(write), bytes(1), bytes(1)};
}

// Each operation reads one segment at the device.
Program read_each(const TensorTable& table) {
  Program p("reads");
  for (SegmentId id = 0; id < table.segment_count(); ++id)
    p.add_op(std::vector<AccessStep>{{id, Tier::kDevice, Access::kRead, false}});
  p.finish(table.segment_count());
  return p;
}

double seconds_to_read_eight(double to_device, double read, double op_seconds, std::int64_t depth) {
  const TensorTable table = equal_table(1, 8, kPage);
  const Program p = read_each(table);
  MoveClock clock(
      table, {.budgets = {6 * kPage, 6 * kPage}, .bytes_per_second = pages_a_second(to_device, 1, read, 1)});
  for (SegmentId id = 0; id < 8; ++id) clock.residency.assume_content(id, Tier::kNvme);
  return clock.run({&p}, depth, op_seconds);
}

// Reads, copies and operations overlap: beside the slowest only the first of those before it and the last of
// those after it take time.
TEST(MoveGraph, AProgramTakesAsLongAsItsSlowestLink) {
  EXPECT_DOUBLE_EQ(seconds_to_read_eight(2, 1, 0.25, 4), 8 * 1 + 0.5 + 0.25);    // the drives
  EXPECT_DOUBLE_EQ(seconds_to_read_eight(0.25, 1, 0.5, 4), 1 + 8 * 4 + 0.5);     // copies to the device
  EXPECT_DOUBLE_EQ(seconds_to_read_eight(2, 1, 2, 4), 1 + 0.5 + 8 * 2);          // operations
  EXPECT_DOUBLE_EQ(seconds_to_read_eight(2, 1, 0.25, 0), 8 * (1 + 0.5 + 0.25));  // nothing is decided ahead
}

TEST(MoveGraph, ALargeSegmentPassesTheHostInPieces) {
  const TensorTable table = equal_table(1, 1, 8 * kPage);
  const Program p = read_each(table);
  const auto seconds = [&](std::int64_t piece) {
    MoveClock clock(table, {.budgets = {8 * kPage, 8 * kPage},
                            .bytes_per_second = pages_a_second(2, 2, 1, 1),
                            .piece_bytes = piece});
    clock.residency.assume_content(0, Tier::kNvme);
    return clock.run({&p}, 0, 0);
  };
  EXPECT_DOUBLE_EQ(seconds(8 * kPage), 8 + 4);  // one hop after the other
  EXPECT_DOUBLE_EQ(seconds(2 * kPage), 8 + 1);  // the last piece alone is copied after the last read
  EXPECT_DOUBLE_EQ(seconds(3 * kPage), 8 + 1);  // pieces of 3, 3 and 2 pages
}

TEST(MoveGraph, ALargeSegmentIsWrittenBackInPieces) {
  const TensorTable table = equal_table(1, 1, 8 * kPage);
  using Kind = Action::Kind;
  const auto seconds = [&](std::int64_t piece) {
    MoveClock clock(table, {.budgets = {8 * kPage, 8 * kPage},
                            .bytes_per_second = pages_a_second(2, 2, 1, 1),
                            .piece_bytes = piece});
    std::vector<Action> actions{{Kind::kAlloc, Tier::kDevice, Tier::kDevice, Access::kOverwrite, 0},
                                {Kind::kAlloc, Tier::kHost, Tier::kHost, Access::kOverwrite, 0},
                                {Kind::kCopy, Tier::kHost, Tier::kDevice, Access::kRead, 0},
                                {Kind::kFree, Tier::kDevice, Tier::kDevice, Access::kRead, 0},
                                {Kind::kCopy, Tier::kNvme, Tier::kHost, Access::kRead, 0},
                                {Kind::kFree, Tier::kHost, Tier::kHost, Access::kRead, 0}};
    clock.graph.decided(actions, Urgency::kWriteBack);
    const double end = clock.drain();
    EXPECT_FALSE(clock.graph.moves(0));
    EXPECT_EQ(clock.used, (std::array<std::int64_t, 2>{}));
    return end;
  };
  EXPECT_DOUBLE_EQ(seconds(8 * kPage), 4 + 8);
  EXPECT_DOUBLE_EQ(seconds(2 * kPage), 1 + 8);
}

// The most urgent go first among those that wait; the eight that the drives were given keep their places.
TEST(MoveGraph, ALinkStartsTheMostUrgentFirst) {
  const TensorTable table = equal_table(1, 16, 8 << 20);
  MoveClock clock(table, {.budgets = {0, 16 << 23}, .bytes_per_second = pages_a_second(1, 1, 1, 1)});
  const auto fetch = [&](SegmentId id, Urgency urgency) {
    std::vector<Action> actions{{Action::Kind::kAlloc, Tier::kHost, Tier::kHost, Access::kOverwrite, id},
                                {Action::Kind::kCopy, Tier::kHost, Tier::kNvme, Access::kRead, id}};
    clock.graph.decided(actions, urgency);
  };
  for (SegmentId id = 0; id < 10; ++id) fetch(id, Urgency::kPrefetch);
  fetch(10, Urgency::kWriteBack);
  fetch(11, Urgency::kProgram);
  fetch(12, Urgency::kDemand);
  fetch(13, Urgency::kPrefetch);
  clock.graph.demand(13);
  clock.drain();
  std::vector<SegmentId> order;
  for (const auto& start : clock.started) order.push_back(start.action.segment);
  EXPECT_EQ(order, (std::vector<SegmentId>{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 11, 8, 9, 10}));
}

// Random programs under tight budgets: each ends, at the same moments in each run, within the budgets, with
// the bytes that were decided; also where the system gives memory late, and large segments move in pieces.
TEST(MoveGraph, RandomProgramsEndWithinTheirBudgets) {
  const std::uint64_t seed = test_seed(311);
  SCOPED_TRACE(seed);
  Random random(seed);
  int fitted = 0, in_pieces = 0, with_drives = 0;
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t granule = some_granule(random);
    const TensorTable table = random_table(random, 1, 4 + below(random, 14), granule);
    const std::vector<bool> none(static_cast<std::size_t>(table.segment_count()));
    const Program p = random_program(random, "p", table, none, {.ops = 20});
    const Program q = random_program(random, "q", table, none, {.ops = 12});
    const auto some_of = [&](Tier tier, std::int64_t step) {
      return std::max(table.total_charge(tier) * (2 + below(random, 7)) / 8 / step * step, 8 * step);
    };
    const MoveClock::Machine machine{
        .budgets = {some_of(Tier::kDevice, granule), some_of(Tier::kHost, kPage), below(random, 2) == 1},
        .bytes_per_second = pages_a_second(7, 5, 2, 1),
        .piece_bytes = below(random, 2) == 1 ? 3000 : std::int64_t{1} << 30,
        .memory_seconds = below(random, 2) == 1 ? 0.25 : 0.0};
    std::vector<MoveClock::Start> first;
    for (int again = 0; again < 2; ++again) {
      MoveClock clock(table, machine);
      if (clock.run({&p, &q, &p, &q}, trial % 9, 0.5) < 0) break;
      clock.drain();
      fitted += again;
      EXPECT_TRUE(clock.graph.idle());
      EXPECT_FALSE(clock.graph.has_moves());
      EXPECT_LE(clock.peak[0], machine.budgets.device);
      EXPECT_LE(clock.peak[1], machine.budgets.host);
      EXPECT_EQ(clock.used[0], clock.residency.copies().used(Tier::kDevice));
      EXPECT_EQ(clock.used[1], clock.residency.copies().used(Tier::kHost));
      EXPECT_EQ(clock.graph.bytes(), clock.residency.copies().traffic());
      const LinkBytes bytes = clock.graph.bytes();
      in_pieces += bytes[kToHost] > 0 && machine.piece_bytes == 3000;
      with_drives += bytes[kNvmeRead] > 0 && bytes[kNvmeWrite] > 0;
      if (again == 0) first = clock.started;
      EXPECT_EQ(first, clock.started);
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GE(fitted, 100) << "budgets too small for the test to mean anything";
  EXPECT_GE(in_pieces, 20);
  EXPECT_GE(with_drives, 20);
}

}  // namespace
}  // namespace zg::test
