// What stays of a program that repeats, and that what does not is spread over it.
#include "ziggurat/store/retention_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "store/trace_support.hpp"

namespace zg::test {
namespace {

// Which accesses of the round find no copy at the host, in the third round.
std::vector<bool> misses(const TensorTable& table, const Program& program, const Budgets& budgets,
                         const PolicyFactory& policy) {
  Residency residency(table, budgets, policy);
  for (SegmentId id = 0; id < table.segment_count(); ++id) residency.assume_content(id, Tier::kNvme);
  std::vector<bool> missed;
  for (int round = 0; round < 3; ++round) {
    missed.clear();
    residency.set_future(&program, &program);
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      std::vector<Action> moves;
      EXPECT_FALSE(residency.decide(0, op, moves));
      for (const AccessStep& a : program.op(op)) {
        missed.push_back(std::any_of(moves.begin(), moves.end(), [&](const Action& m) {
          return m.kind == Action::Kind::kCopy && m.from == Tier::kNvme && m.segment == a.segment;
        }));
      }
    }
  }
  return missed;
}

// The most transfers that are behind a link which does all of a round in a round, at any moment of two
// rounds.
double backlog(const std::vector<bool>& missed) {
  const auto n = static_cast<double>(missed.size());
  const double rate = static_cast<double>(std::count(missed.begin(), missed.end(), true)) / n;
  double behind = 0, most = 0;
  for (std::size_t i = 0; i < 2 * missed.size(); ++i) {
    behind = std::max(0.0, behind + (missed[i % missed.size()] ? 1 : 0) - rate);
    most = std::max(most, behind);
  }
  return most;
}

TEST(RetentionOrder, MissesAreEvenWhereTheFarthestUseAloneMakesThemComeInRuns) {
  constexpr int kSegments = 96;
  const TensorTable table = equal_table(1, kSegments);
  for (const Access access : {Access::kRead, Access::kWrite}) {
    const Program program = program_of(scan(kSegments, access), kSegments);
    for (const int room : {9, 17, 25, 33, 49, 65, 81}) {
      SCOPED_TRACE(room);
      const Budgets budgets{0, room * kPage};
      const double even = backlog(misses(table, program, budgets, default_policy()));
      const double runs = backlog(misses(table, program, budgets, next_use_policy()));
      // A sequence of van der Corput is log2(n) / 3 + 1 away from even at most.
      EXPECT_LE(even, 3.2);
      EXPECT_GE(runs, 2 * even);
    }
  }
}

// Devices and hosts keep parts of the same order, and not the same parts.
TEST(RetentionOrder, HoldsOverTwoTiers) {
  constexpr int kSegments = 96, kAtDevice = 12, kAtHost = 25;
  const TensorTable table = equal_table(1, kSegments);
  std::vector<AccessStep> accesses;
  for (SegmentId id = 0; id < kSegments; ++id) accesses.push_back(at_device(id));
  const auto missed =
      misses(table, program_of(accesses, kSegments), {kAtDevice * kPage, kAtHost * kPage}, default_policy());
  EXPECT_LE(backlog(missed), 3.2);
  // A place of each tier is for what comes and goes.
  EXPECT_LE(std::count(missed.begin(), missed.end(), true), kSegments - (kAtDevice - 1) - (kAtHost - 1));
}

// An operation that takes no time needs what it needs at the moment of the next one that takes some.
TEST(RetentionOrder, OfWhatOneMomentNeedsTheMostStays) {
  // Twelve moments that need two segments each, and one that needs 24 more.
  constexpr int kMoments = 12, kBurst = 24, kSegments = 2 * kMoments + kBurst + 1;
  const TensorTable table = equal_table(1, kSegments);
  const SegmentId other = kSegments - 1;
  Program program;
  SegmentId next = 0;
  const auto beside = [&](int count) {
    for (int i = 0; i < count; ++i, ++next)
      program.add_op(std::vector<AccessStep>{at_host(next, Access::kWrite)}, 0);
  };
  for (int m = 0; m < kMoments; ++m) {
    beside(m == 5 ? 2 + kBurst : 2);
    program.add_op(std::vector<AccessStep>{at_host(other)}, 10);
  }
  program.finish(kSegments);
  // Room for three quarters: if each of the others keeps one of two, there is room for all of the burst but
  // its share.
  const auto missed = misses(table, program, {0, (kBurst + kMoments + 2) * kPage}, default_policy());
  int in_burst = 0, elsewhere = 0;
  for (std::int32_t i = 0; i < program.access_count(); ++i) {
    if (!missed[static_cast<std::size_t>(i)]) continue;
    const SegmentId id = program.access(i).segment;
    (id >= 10 && id < 10 + 2 + kBurst ? in_burst : elsewhere) += 1;
  }
  EXPECT_LE(in_burst, 2);
  EXPECT_GE(elsewhere, kMoments - 2);
}

TEST(RetentionOrder, OrdersOnlyWhatIsNeededOnceAndMaySink) {
  TensorTable table(1);
  const auto add = [&](const char* name, Tier lowest) {
    table.add({.name = name, .dtype = DType::kU8, .count = 4096, .lowest = lowest});
  };
  add("once", Tier::kNvme);
  add("often", Tier::kNvme);
  add("stays", Tier::kHost);
  add("made anew", Tier::kNvme);
  add("unused", Tier::kNvme);
  Program program;
  for (int i = 0; i < 8; ++i) {
    program.add_op(std::vector<AccessStep>{at_host(1)});
    if (i != 2) continue;
    program.add_op(std::vector<AccessStep>{at_host(0), at_host(2), at_host(3, Access::kOverwrite)});
  }
  program.finish(table.segment_count());
  RetentionOrder retention;
  retention.plan(table, program);
  EXPECT_GT(retention.order(0), 0u);
  for (const SegmentId id : {1, 2, 3, 4, 5, 1000}) EXPECT_EQ(retention.order(id), 0u) << id;
}

// Segments of one moment leave one after the other; those of moments with more time around them first.
TEST(RetentionOrder, MoreTimeMeansMoreLeaves) {
  const TensorTable table = equal_table(1, 6);
  Program program;
  const auto op = [&](SegmentId id, std::int64_t time) {
    program.add_op(std::vector<AccessStep>{at_host(id)}, time);
  };
  op(0, 0), op(1, 10), op(2, 0), op(3, 40), op(4, 0), op(5, 40);
  program.finish(6);
  RetentionOrder retention;
  retention.plan(table, program);
  // Moments 0 (10 after it), 10 (10 before it), 50 (40 on both sides).
  for (const SegmentId id : {0, 2, 4}) EXPECT_LT(retention.order(id), retention.order(id + 1));
  for (const SegmentId id : {0, 1, 2, 3}) EXPECT_LT(retention.order(5), retention.order(id));
}

}  // namespace
}  // namespace zg::test
