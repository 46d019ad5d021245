// The bound of NVMe traffic against every possible decision, and against what policies do.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "store/trace_support.hpp"
#include "support/seed.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg::test {
namespace {

// The least cost of `rounds` rounds of one access after the other, by search over all states: each segment is
// not there, there, or there and modified. Whatever is there at the start: the first use of each is free.
// Nothing need be written at the end.
class Search {
 public:
  Search(const TensorTable& table, const std::vector<AccessStep>& period, std::int64_t memory)
      : table_(table), period_(period), memory_(memory), segments_(table.segment_count()) {}

  // read_cost, write_cost: per byte.
  std::int64_t least(int rounds, std::int64_t read_cost, std::int64_t write_cost) const {
    int states = 1;
    for (std::int32_t i = 0; i < segments_; ++i) states *= 3;
    std::vector<std::int64_t> cost(static_cast<std::size_t>(states), kFar);
    cost[0] = 0;
    std::vector<bool> seen(static_cast<std::size_t>(segments_));
    for (std::size_t i = 0; i < period_.size() * static_cast<std::size_t>(rounds); ++i) {
      const AccessStep& a = period_[i % period_.size()];
      std::vector<std::int64_t> after(cost.size(), kFar);
      const bool first = !seen[static_cast<std::size_t>(a.segment)];
      seen[static_cast<std::size_t>(a.segment)] = true;
      for (int state = 0; state < states; ++state) {
        const std::int64_t before = cost[static_cast<std::size_t>(state)];
        if (before >= kFar) continue;
        // Every set of the others may leave.
        for (int leave = 0; leave < (1 << segments_); ++leave) {
          if ((leave >> a.segment & 1) != 0) continue;
          std::int64_t spent = before;
          int left = state;
          for (SegmentId id = 0; id < segments_; ++id) {
            if ((leave >> id & 1) == 0) continue;
            if (digit(left, id) == 2 && needed(id, i)) spent += write_cost * table_.segment(id).charge;
            left = with_digit(left, id, 0);
          }
          const int there = digit(left, a.segment);
          if (there == 0 && a.access != Access::kOverwrite && !first)
            spent += read_cost * table_.segment(a.segment).charge;
          left = with_digit(left, a.segment, a.access == Access::kRead ? std::max(there, 1) : 2);
          if (bytes_of(left) > memory_) continue;
          if (a.last) left = with_digit(left, a.segment, 0);
          auto& best = after[static_cast<std::size_t>(left)];
          best = std::min(best, spent);
        }
      }
      cost = std::move(after);
    }
    return *std::min_element(cost.begin(), cost.end());
  }

 private:
  static constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max() / 2;

  int power(SegmentId id) const {
    int p = 1;
    for (SegmentId i = 0; i < id; ++i) p *= 3;
    return p;
  }
  int digit(int state, SegmentId id) const { return state / power(id) % 3; }
  int with_digit(int state, SegmentId id, int value) const {
    return state + (value - digit(state, id)) * power(id);
  }
  std::int64_t bytes_of(int state) const {
    std::int64_t sum = 0;
    for (SegmentId id = 0; id < segments_; ++id) sum += digit(state, id) > 0 ? table_.segment(id).charge : 0;
    return sum;
  }
  // Whether the content is read before it is overwritten, from access i on.
  bool needed(SegmentId id, std::size_t i) const {
    for (std::size_t k = 0; k < period_.size(); ++k) {
      const AccessStep& a = period_[(i + k) % period_.size()];
      if (a.segment == id) return a.access != Access::kOverwrite;
    }
    return false;
  }

  const TensorTable& table_;
  const std::vector<AccessStep>& period_;
  std::int64_t memory_;
  std::int32_t segments_;
};

TensorTable sized_table(Random& random, std::int32_t segments, bool equal) {
  TensorTable table(1);
  for (std::int32_t i = 0; i < segments; ++i) {
    table.add({.name = fmt::format("t{}", i),
               .dtype = DType::kU8,
               .count = kPage * (equal ? 1 : 1 + below(random, 4))});
  }
  return table;
}

std::int64_t sum_of(const std::vector<std::int64_t>& values, int rounds) {
  std::int64_t sum = 0;
  for (int i = 0; i < rounds; ++i) sum += values[std::min(static_cast<std::size_t>(i), values.size() - 1)];
  return sum;
}

TEST(NvmeBound, IsNoMoreThanTheBestOfAllDecisionsAndReachesItForReadsOfEqualSegments) {
  const std::uint64_t seed = test_seed(4101);
  SCOPED_TRACE(seed);
  Random random(seed);
  constexpr int kRounds = 3;
  int tight_writes = 0, equals = 0;
  for (int trial = 0; trial < 150; ++trial) {
    SCOPED_TRACE(trial);
    const bool equal = trial % 2 == 0;
    const std::int32_t segments = 2 + below(random, 3);
    const auto period = random_accesses(random, segments, 3 + below(random, 7),
                                        {.write_percent = 35, .overwrite_percent = 15});
    const TensorTable table = sized_table(random, segments, equal);
    std::int64_t largest = 0;
    for (SegmentId id = 0; id < segments; ++id) largest = std::max(largest, table.segment(id).charge);
    const std::int64_t memory =
        largest +
        below(random, static_cast<int>((table.total_charge(Tier::kHost) - largest) / kPage) + 1) * kPage;
    const AccessTrace trace = trace_of(table, period);
    // The bound does not depend on how the memory is split between the tiers.
    const NvmeBound bound =
        nvme_bound(trace, {memory / 2 / kPage * kPage, memory - memory / 2 / kPage * kPage});
    ASSERT_GE(bound.round_reads.size(), 2u);
    const Search search(table, period, memory);
    // The pass stops when it repeats itself, which may be before kRounds.
    const int rounds = std::min<int>(kRounds, static_cast<int>(bound.round_reads.size()));
    const std::int64_t reads = search.least(rounds, 1, 0);
    if (equal) {
      EXPECT_EQ(sum_of(bound.round_reads, rounds), reads);
    } else {
      EXPECT_LE(sum_of(bound.round_reads, rounds), reads);
    }
    const int write_rounds = std::min<int>(kRounds, static_cast<int>(bound.round_writes.size()));
    const std::int64_t writes = search.least(write_rounds, 0, 1);
    EXPECT_LE(sum_of(bound.round_writes, write_rounds), writes);
    equals += equal;
    tight_writes += equal && sum_of(bound.round_writes, write_rounds) == writes;
    const int both = std::min(rounds, write_rounds);
    EXPECT_LE(sum_of(bound.round_reads, both) + sum_of(bound.round_writes, both), search.least(both, 1, 1));
    // In the limit: no more than what the best decisions cost over many rounds, of which the free first uses
    // are a small part.
    EXPECT_LE(bound.read * 24, search.least(24, 1, 0) + table.total_charge(Tier::kHost));
    EXPECT_LE(bound.write * 24, search.least(24, 0, 1) + table.total_charge(Tier::kHost));
  }
  // The bound is tight: most often the writes are the fewest possible, too.
  EXPECT_GE(tight_writes * 10, equals * 6);
}

TEST(NvmeBound, NoPolicyIsBelowItAndNextUseReadsThatMuchOfEqualSegments) {
  const std::uint64_t seed = test_seed(4102);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    const bool equal = trial % 2 == 0;
    const std::int32_t segments = 3 + below(random, 8);
    const auto period = random_accesses(random, segments, segments + below(random, 25),
                                        {.write_percent = 30, .overwrite_percent = 15});
    const AccessTrace trace = trace_of(sized_table(random, segments, equal), period);
    const std::int64_t all = trace.table.total_charge(Tier::kHost);
    const Budgets budgets{0, std::max<std::int64_t>(4 * kPage, all * (1 + below(random, 10)) / 10)};
    const NvmeBound bound = nvme_bound(trace, budgets);
    for (const PolicyFactory& policy :
         {next_use_policy(), next_use_policy({.write_cost = 1}), lru_policy(), clock_policy()}) {
      const ReplayResult r = replay(trace, budgets, policy, {.rounds = 64});
      ASSERT_FALSE(r.obstacle);
      if (r.cycle == 0) continue;  // the mean of some rounds may lie below that of all
      EXPECT_GE(r.per_round.nvme_read(), bound.read);
      EXPECT_GE(r.per_round.nvme_write(), bound.write);
    }
    if (!equal) continue;
    const ReplayResult r = replay(trace, budgets, next_use_policy(), {.rounds = 200});
    ASSERT_GT(r.cycle, 0);
    EXPECT_LE(r.per_round.nvme_read() - bound.read, 1) << "rounded up, and down";
  }
}

TEST(NvmeBound, OfTwoTiersAndOperationsThatHoldSeveralSegments) {
  const std::uint64_t seed = test_seed(4103);
  SCOPED_TRACE(seed);
  Random random(seed);
  int compared = 0;
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    AccessTrace trace;
    trace.table = random_table(random, 1, 4 + below(random, 10), some_granule(random));
    const auto given = random_given(random, trace.table.segment_count());
    trace.programs.push_back(random_program(random, "p", trace.table, given, {.ops = 20}));
    trace.programs.push_back(random_program(random, "q", trace.table, given, {.ops = 10}));
    trace.sequence = {0, 0, 1};
    const auto some_of = [&](Tier tier, std::int64_t step) {
      return std::max(trace.table.total_charge(tier) * (2 + below(random, 7)) / 10, 8 * step);
    };
    const std::int64_t device = some_of(Tier::kDevice, trace.table.device_granule());
    const Budgets budgets{device, some_of(Tier::kHost, kPage)};
    const NvmeBound bound = nvme_bound(trace, budgets);
    for (const PolicyFactory& policy : {next_use_policy(), lru_policy(), clock_policy()}) {
      const ReplayResult r = replay(trace, budgets, policy, {.rounds = 64});
      if (r.obstacle || r.cycle == 0) continue;
      ++compared;
      EXPECT_GE(r.per_round.nvme_read(), bound.read);
      EXPECT_GE(r.per_round.nvme_write(), bound.write);
    }
  }
  EXPECT_GE(compared, 200);
}

TEST(NvmeBound, IsNothingWhereEverythingFits) {
  const AccessTrace trace = equal_trace(5, scan(5, Access::kWrite));
  const NvmeBound bound = nvme_bound(trace, {2 * kPage, 3 * kPage});
  EXPECT_EQ(bound.read, 0);
  EXPECT_EQ(bound.write, 0);
  // A scan of 5 with room for 3: 5 (5 - 3) / 4 segments a round.
  const NvmeBound less = nvme_bound(trace, {kPage, 2 * kPage});
  EXPECT_EQ(less.read, 5 * 2 * kPage / 4);
  EXPECT_EQ(less.write, 5 * 2 * kPage / 4);
}

}  // namespace
}  // namespace zg::test
