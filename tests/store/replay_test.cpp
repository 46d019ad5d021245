// Replays of traces: the next-use policy against the offline optimum, the others beside it.
#include "ziggurat/store/replay.hpp"

#include <gtest/gtest.h>

#include <map>

#include "store/trace_support.hpp"
#include "support/errors.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {
namespace {

struct Moves {
  std::int64_t reads = 0, writes = 0;
};

// The least reads by Belady's rule over the unrolled trace, looking ahead for every victim: what is needed
// farthest in the future leaves. Content that is overwritten before it is read is never needed.
std::vector<Moves> belady(const std::vector<AccessStep>& period, std::size_t rounds, std::size_t room) {
  const std::size_t n = period.size(), end = n * (rounds + 2);
  const auto needed = [&](SegmentId id, std::size_t from) {
    for (std::size_t i = from; i < end; ++i) {
      const AccessStep& a = period[i % n];
      if (a.segment == id) return a.access == Access::kOverwrite ? end : i;
    }
    return end;
  };
  std::map<SegmentId, bool> held;  // modified?
  std::vector<Moves> moves(rounds);
  for (std::size_t i = 0; i < n * rounds; ++i) {
    const AccessStep& a = period[i % n];
    if (!held.contains(a.segment)) {
      if (a.access != Access::kOverwrite) ++moves[i / n].reads;
      if (held.size() == room) {
        SegmentId victim = -1;
        std::size_t farthest = 0;
        for (const auto& [id, modified] : held) {
          const std::size_t use = needed(id, i);
          if (victim < 0 || use > farthest) farthest = use, victim = id;
        }
        if (held[victim]) ++moves[i / n].writes;
        held.erase(victim);
      }
      held[a.segment] = false;
    }
    if (a.access != Access::kRead) held[a.segment] = true;
  }
  return moves;
}

TEST(Replay, NextUseReadsAsLittleAsTheOfflineOptimumOnAThousandPeriodicTraces) {
  const std::uint64_t seed = test_seed(4001);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 1000; ++trial) {
    SCOPED_TRACE(trial);
    const std::int32_t segments = 2 + below(random, 10);
    // Where something is overwritten, several copies may be needed never, and any of them may be the victim:
    // reads are the same, writes need not be.
    const bool overwrites = trial % 2 == 1;
    const auto period = random_accesses(random, segments, segments + below(random, 30),
                                        {.write_percent = 30, .overwrite_percent = overwrites ? 25 : 0});
    const auto room = static_cast<std::size_t>(1 + below(random, segments));
    const AccessTrace trace = equal_trace(segments, period);
    const ReplayResult r =
        replay(trace, {0, static_cast<std::int64_t>(room) * kPage}, next_use_policy(), {.rounds = 8});
    ASSERT_FALSE(r.obstacle);
    const auto expected = belady(period, r.rounds.size(), room);
    for (std::size_t i = 0; i < r.rounds.size(); ++i) {
      ASSERT_EQ(r.rounds[i].nvme_read(), expected[i].reads * kPage) << "round " << i;
      if (!overwrites) {
        ASSERT_EQ(r.rounds[i].nvme_write(), expected[i].writes * kPage) << "round " << i;
      }
    }
  }
}

// MIN keeps k - 1 segments and walks the last place over the rest: n (n - k) misses in n - 1 rounds. To keep
// k for good and stream through no room at all would miss n - k a round, k - 1 and the last place for the
// rest n - k + 1: it saves what pinning saves, but for the place through which the rest must pass.
TEST(Replay, ACyclicScanSavesWhatPinningSaves) {
  for (std::int32_t n = 2; n <= 10; ++n) {
    for (const Access access : {Access::kRead, Access::kWrite}) {
      const AccessTrace trace = equal_trace(n, scan(n, access));
      for (std::int32_t k = 1; k <= n; ++k) {
        SCOPED_TRACE(fmt::format("{} segments, room for {}", n, k));
        const Budgets budgets{0, k * kPage};
        const ReplayResult best = replay(trace, budgets, next_use_policy(), {.rounds = 4 * n});
        ASSERT_GT(best.cycle, 0);
        EXPECT_EQ((n - 1) % best.cycle, 0);
        LinkBytes sum;
        for (std::size_t i = 0; i < static_cast<std::size_t>(n - 1); ++i) {
          // The last n - 1 rounds, as far as they were carried out; those before repeat them.
          sum += best.rounds[best.rounds.size() - 1 - i % static_cast<std::size_t>(best.cycle)];
        }
        const std::int64_t misses = std::int64_t{n} * (n - k);
        EXPECT_EQ(sum.nvme_read(), misses * kPage);
        EXPECT_EQ(sum.nvme_write(), access == Access::kWrite ? misses * kPage : 0);

        std::vector<SegmentId> pinned;
        for (SegmentId id = 0; id < k - 1; ++id) pinned.push_back(id);
        const ReplayResult pins = replay(trace, budgets, next_use_policy(), {.keep = pinned});
        const std::int64_t streamed = (k == n ? 0 : n - k + 1) * kPage;
        EXPECT_EQ(pins.per_round.nvme_read(), streamed);
        EXPECT_EQ(pins.per_round.nvme_write(), access == Access::kWrite ? streamed : 0);
        EXPECT_LE(best.per_round.nvme_read(), pins.per_round.nvme_read());
        EXPECT_GE(best.per_round.nvme_read(), (n - k) * kPage);

        const ReplayResult lru = replay(trace, budgets, lru_policy());
        const ReplayResult clock = replay(trace, budgets, clock_policy());
        EXPECT_EQ(lru.counts_per_round.hits, k < n ? 0 : n) << "each leaves just before it is needed";
        EXPECT_EQ(lru.per_round.nvme_read(), k < n ? n * kPage : 0);
        EXPECT_GE(clock.per_round.nvme_read(), best.per_round.nvme_read());
        EXPECT_LE(clock.per_round.nvme_read(), lru.per_round.nvme_read());
      }
    }
  }
}

TEST(Replay, FindsTheCycleAndItsMean) {
  // Four segments, room for three: 4 misses in 3 rounds.
  const AccessTrace trace = equal_trace(4, scan(4, Access::kRead));
  const ReplayResult r = replay(trace, {0, 3 * kPage}, next_use_policy());
  EXPECT_EQ(r.cycle, 3);
  EXPECT_EQ(r.per_round.nvme_read(), 4 * kPage / 3);
  EXPECT_LT(r.rounds.size(), 8u) << "it stops when it repeats itself";
  EXPECT_EQ(r.runs.size(), r.rounds.size());
  EXPECT_EQ(r.counts_per_round.accesses, 4);
  // Too short to see it: the mean of the second half.
  const ReplayResult brief = replay(trace, {0, 3 * kPage}, next_use_policy(), {.rounds = 2});
  EXPECT_EQ(brief.cycle, 0);
  EXPECT_EQ(brief.per_round, brief.rounds.back());
}

// A cycle that replay() finds goes on: the rounds behind it move the bytes of the rounds in it.
TEST(Replay, ACycleThatIsFoundGoesOn) {
  const std::uint64_t seed = test_seed(4004);
  SCOPED_TRACE(seed);
  Random random(seed);
  int found_cycles = 0;
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const std::int32_t n = 3 + below(random, 10);
    const AccessTrace trace =
        equal_trace(n, random_accesses(random, n, n + below(random, 25), {.write_percent = 30}));
    const Budgets budgets{0, (1 + below(random, n)) * kPage};
    for (const PolicyFactory& policy :
         {next_use_policy(), next_use_policy({.write_cost = 1}), lru_policy(), clock_policy()}) {
      const ReplayResult r = replay(trace, budgets, policy, {.rounds = 40});
      if (r.cycle == 0) continue;
      ++found_cycles;
      Residency residency(trace.table, budgets, policy);
      for (SegmentId id = 0; id < n; ++id) residency.assume_content(id, Tier::kNvme);
      const auto found = static_cast<std::size_t>(r.cycle);
      std::vector<LinkBytes> rounds;
      for (std::size_t i = 0; i < r.rounds.size() + 2 * found; ++i) {
        const LinkBytes before = residency.copies().traffic();
        residency.set_future(&trace.programs[0], nullptr);
        std::vector<Action> actions;
        for (std::int32_t op = 0; op < trace.programs[0].op_count(); ++op)
          ASSERT_FALSE(residency.decide(0, op, actions));
        rounds.push_back(residency.copies().traffic() - before);
        const LinkBytes expected = i < r.rounds.size() ? r.rounds[i] : rounds[i - found];
        ASSERT_EQ(rounds.back(), expected) << "round " << i << ", cycle " << found;
      }
    }
  }
  EXPECT_GE(found_cycles, 1000);
}

TEST(Replay, CountsHitsAndEvictionsAtBothTiers) {
  // 0 and 1 take turns on the device, which has room for one; the host keeps both.
  const AccessTrace trace = equal_trace(2, {at_device(0), at_device(0), at_device(1)});
  const ReplayResult r = replay(trace, {kPage, 2 * kPage}, next_use_policy());
  EXPECT_EQ(r.counts_per_round, (ReplayCounts{3, 1, 2, 2, 0}));
  EXPECT_EQ(r.per_round, (LinkBytes{2 * kPage}));
  EXPECT_EQ(r.peak.device, kPage);
  EXPECT_EQ(r.peak.host, 2 * kPage);
  // A write at the device makes the host's copy useless: it was not evicted.
  const AccessTrace writes = equal_trace(1, {at_device(0, Access::kWrite), at_host(0)});
  const ReplayResult w = replay(writes, {kPage, kPage}, next_use_policy());
  EXPECT_EQ(w.counts_per_round.host_evictions, 0);
  EXPECT_EQ(w.counts_per_round.device_evictions, 0);
}

TEST(Replay, ContentThatNobodyWroteLiesAsLowAsItMay) {
  TensorTable table(1);
  table.add({.name = "nvme", .dtype = DType::kU8, .count = kPage});
  table.add({.name = "host", .dtype = DType::kU8, .count = kPage, .lowest = Tier::kHost});
  table.add({.name = "device", .dtype = DType::kU8, .count = kPage, .lowest = Tier::kDevice});
  const auto run = [&](const std::vector<AccessStep>& accesses, const Budgets& budgets) {
    return replay(trace_of(table, accesses), budgets, next_use_policy(), {.rounds = 3});
  };
  const ReplayResult r = run({at_host(0), at_host(1), at_device(2)}, {kPage, 2 * kPage});
  ASSERT_FALSE(r.obstacle);
  EXPECT_EQ(r.rounds[0], (LinkBytes{0, 0, kPage}));
  // A segment that ends a round without content has content again in the next.
  const ReplayResult dead =
      run({at_host(0, Access::kRead, true), at_host(1, Access::kRead, true)}, {0, 2 * kPage});
  ASSERT_FALSE(dead.obstacle);
  EXPECT_EQ(dead.per_round, (LinkBytes{0, 0, kPage}));
  // No room for segments that may not be demoted.
  const ReplayResult none = run({at_host(0), at_host(1)}, {0, kPage});
  ASSERT_TRUE(none.obstacle);
  EXPECT_EQ(none.obstacle->tier, Tier::kHost);
  EXPECT_EQ(none.obstacle->segment, 0);
}

TEST(Replay, SaysWhereItDoesNotFitAndWhatWould) {
  const std::uint64_t seed = test_seed(4002);
  SCOPED_TRACE(seed);
  Random random(seed);
  int found = 0, exact = 0;
  for (int trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(trial);
    AccessTrace trace;
    const std::int64_t granule = some_granule(random);
    trace.table = random_table(random, 1, 3 + below(random, 8), granule);
    const auto given = random_given(random, trace.table.segment_count());
    for (const char* name : {"p", "q"}) {
      trace.programs.push_back(random_program(random, name, trace.table, given, {.ops = 12}));
    }
    trace.sequence = {0, 1, 1};
    const auto least = smallest_budgets(trace, 0);
    if (!least) continue;
    ++found;
    const auto fits = [&](const Budgets& b) {
      return !replay(trace, b, default_policy(), {.rounds = 2}).obstacle;
    };
    EXPECT_TRUE(fits(*least));
    EXPECT_EQ(least->device % granule, 0);
    EXPECT_FALSE(fits({least->device - granule, trace.table.total_charge(Tier::kHost)}));
    const ReplayResult r =
        replay(trace, {least->device, least->host - kPage}, default_policy(), {.rounds = 2});
    if (!r.obstacle) continue;
    ++exact;
    EXPECT_GE(r.obstacle_op, 0);
    EXPECT_EQ(r.runs.size(), static_cast<std::size_t>(r.obstacle_run));
  }
  EXPECT_GE(found, 40);
  EXPECT_GE(exact * 10, found * 9) << "more memory made a run fail too often";
}

TEST(Replay, TellsItsProgressAndStopsWhenAsked) {
  const AccessTrace trace = equal_trace(4, scan(4, Access::kRead));
  double last = -1;
  replay(trace, {0, kPage}, lru_policy(), {.progress = [&](double share) { return last = share, true; }});
  EXPECT_GE(last, 0);
  EXPECT_LE(last, 1);
  const auto told_to_stop = [&] {
    return replay(trace, {0, kPage}, lru_policy(), {.progress = [](double) { return false; }});
  };
  EXPECT_EQ(error_of(told_to_stop).code(), Errc::kInterrupted);
}

TEST(ReuseDistances, AgreeWithASetThatIsWalkedThrough) {
  const std::uint64_t seed = test_seed(4003);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 50; ++trial) {
    const TensorTable table = random_table(random, 1, 2 + below(random, 8));
    const std::int32_t n = table.segment_count();
    const Program a = program_of(random_accesses(random, n, 1 + below(random, 20), {}), n);
    const Program b = program_of(random_accesses(random, n, 1 + below(random, 20), {}), n);
    const Program* const sequence[] = {&a, &b, &a};
    std::vector<SegmentId> all;
    for (const Program* p : sequence) {
      for (std::int32_t i = 0; i < p->access_count(); ++i) all.push_back(p->access(i).segment);
    }
    const auto found = reuse_distances(table, sequence);
    ASSERT_EQ(found.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::map<SegmentId, std::int64_t> between;
      for (std::size_t back = 1; all[(i + all.size() - back) % all.size()] != all[i]; ++back) {
        const SegmentId id = all[(i + all.size() - back) % all.size()];
        between[id] = table.segment(id).charge;
      }
      std::int64_t expected = 0;
      for (const auto& [id, bytes] : between) expected += bytes;
      EXPECT_EQ(found[i], expected) << i;
    }
  }
}

}  // namespace
}  // namespace zg::test
