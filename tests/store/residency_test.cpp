// Residency alone: what it decides, with nothing moving.
#include "store/residency_support.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

struct Misses {
  std::int64_t reads = 0, writes = 0;
};

// Belady's MIN by brute force on the unrolled trace: throw out what is used farthest in the future.
std::vector<Misses> belady(const std::vector<AccessStep>& period, int rounds, int room) {
  std::vector<AccessStep> all;
  for (int r = 0; r < rounds + 3; ++r) all.insert(all.end(), period.begin(), period.end());
  std::map<SegmentId, bool> held;  // dirty?
  std::vector<Misses> per_round(static_cast<std::size_t>(rounds));
  for (std::size_t i = 0; i < period.size() * static_cast<std::size_t>(rounds); ++i) {
    Misses& misses = per_round[i / period.size()];
    if (!held.contains(all[i].segment)) {
      ++misses.reads;
      if (static_cast<int>(held.size()) == room) {
        SegmentId victim = -1;
        std::size_t farthest = 0;
        for (const auto& [id, dirty] : held) {
          std::size_t j = i;
          while (j < all.size() && all[j].segment != id) ++j;
          if (j >= farthest) farthest = j, victim = id;
        }
        if (held[victim]) ++misses.writes;
        held.erase(victim);
      }
      held[all[i].segment] = false;
    }
    if (all[i].access == Access::kWrite) held[all[i].segment] = true;
  }
  return per_round;
}

std::vector<Misses> decided(const std::vector<AccessStep>& period, int segments, int rounds, int room,
                            const PolicyFactory& policy = next_use_policy()) {
  const TensorTable table = equal_table(1, segments);
  const Program program = trace_of(period, segments);
  const Budgets budgets{0, room * kPage};
  Residency residency(table, budgets, policy);
  Replay replay(table, budgets);
  for (SegmentId id = 0; id < segments; ++id) {
    residency.assume_content(id, Tier::kNvme);
    replay.content(id, Tier::kNvme);
  }
  std::vector<Misses> per_round;
  for (int r = 0; r < rounds; ++r) {
    const LinkBytes before = residency.copies().traffic();
    residency.set_future(&program, &program);
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      std::vector<Action> actions;
      EXPECT_FALSE(residency.decide(0, op, actions).has_value());
      residency.copies().check();
      replay(actions);
      EXPECT_EQ(replay.used(Tier::kHost), residency.copies().used(Tier::kHost));
    }
    const LinkBytes moved = residency.copies().traffic() - before;
    per_round.push_back({moved.nvme_read() / kPage, moved.nvme_write() / kPage});
  }
  return per_round;
}

TEST(Residency, ReadsAndWritesAsOftenAsTheOfflineOptimum) {
  const std::uint64_t seed = test_seed(101);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 150; ++trial) {
    const int segments = 2 + below(random, 9);
    const int write_percent = trial % 2 == 0 ? 0 : 30;
    std::vector<AccessStep> period;
    for (int i = 0, n = segments + below(random, 30); i < n; ++i) {
      const auto access = below(random, 100) < write_percent ? Access::kWrite : Access::kRead;
      period.push_back({below(random, segments), Tier::kHost, access, false});
    }
    for (int room = 1; room <= segments; ++room) {
      const auto expected = belady(period, 6, room);
      const auto found = decided(period, segments, 6, room);
      for (std::size_t r = 0; r < expected.size(); ++r) {
        ASSERT_EQ(found[r].reads, expected[r].reads)
            << "trial " << trial << ", room " << room << ", round " << r;
        ASSERT_EQ(found[r].writes, expected[r].writes)
            << "trial " << trial << ", room " << room << ", round " << r;
      }
    }
  }
}

// MIN keeps k - 1 segments and walks the last place over the rest: in n - 1 rounds, n (n - k) misses.
TEST(Residency, CyclicScanHasTheMissesOfTheClosedForm) {
  for (int n = 2; n <= 12; ++n) {
    std::vector<AccessStep> period;
    for (SegmentId id = 0; id < n; ++id) period.push_back({id, Tier::kHost, Access::kRead, false});
    for (int room = 1; room <= n; ++room) {
      const auto found = decided(period, n, 3 * (n - 1), room);
      std::int64_t reads = 0;
      for (int r = n - 1; r < 3 * (n - 1); ++r) reads += found[static_cast<std::size_t>(r)].reads;
      EXPECT_EQ(reads, 2 * n * (n - room)) << n << " segments, room for " << room;
    }
  }
}

// What stays is spread: that costs less than a segment a round more.
TEST(Residency, SpreadReadsAtMostOneSegmentMoreInARound) {
  for (int n = 2; n <= 40; n += 1 + n / 8) {
    std::vector<AccessStep> period;
    for (SegmentId id = 0; id < n; ++id) period.push_back({id, Tier::kHost, Access::kWrite, false});
    for (int room = 1; room <= n; ++room) {
      const auto found = decided(period, n, 6, room, default_policy());
      const int most = room == n ? 0 : n - room + 1;
      for (std::size_t r = 3; r < found.size(); ++r) {
        EXPECT_LE(found[r].reads, most) << n << " segments, room for " << room;
        EXPECT_EQ(found[r].writes, found[r].reads) << n << " segments, room for " << room;
      }
    }
  }
}

// Everything a run of programs decides, as one list; nothing when it does not fit.
std::optional<std::vector<Action>> decisions(const TensorTable& table, const Budgets& budgets,
                                             const std::vector<bool>& given,
                                             const std::vector<const Program*>& programs,
                                             std::int64_t depth) {
  Residency residency(table, budgets);
  Replay replay(table, budgets);
  const auto never_held = [](SegmentId, Tier) { return false; };
  for (SegmentId id = 0; id < table.segment_count(); ++id) {
    if (!given[static_cast<std::size_t>(id)]) continue;
    const Tier tier = table.segment(id).lowest == Tier::kDevice ? Tier::kDevice : Tier::kHost;
    std::vector<Action> actions;
    if (residency.decide_free({id, tier, Access::kOverwrite, false}, never_held, actions))
      return std::nullopt;
    actions.push_back({Action::Kind::kUse, tier, tier, Access::kOverwrite, id});  // as a program's has it
    replay(actions);
  }
  std::vector<Action> all;
  const auto failure =
      decide_all(residency, programs, depth, [&](const Program&, std::int32_t, const auto& actions) {
        residency.copies().check();
        replay(actions);
        all.insert(all.end(), actions.begin(), actions.end());
      });
  if (failure) return std::nullopt;
  EXPECT_EQ(replay.traffic(), residency.copies().traffic());
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    EXPECT_EQ(replay.used(tier), residency.copies().used(tier));
    EXPECT_LE(residency.copies().peak(tier), tier == Tier::kDevice ? budgets.device : budgets.host);
  }
  return all;
}

bool same(const std::vector<Action>& a, const std::vector<Action>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Action& x, const Action& y) {
    return x.kind == y.kind && x.tier == y.tier && x.from == y.from && x.access == y.access &&
           x.segment == y.segment;
  });
}

TEST(Residency, TwoTierProgramsAreLegalDeterministicAndIndependentOfPrefetchDepth) {
  const std::uint64_t seed = test_seed(202);
  SCOPED_TRACE(seed);
  Random random(seed);
  int fitted = 0;
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t granule = some_granule(random);
    const TensorTable table = random_table(random, below(random, 3), 4 + below(random, 14), granule);
    const auto given = random_given(random, table.segment_count());
    const Program p = random_program(random, "p", table, given, {.ops = 20});
    const Program q = random_program(random, "q", table, given, {.ops = 12});
    const auto some_of = [&](Tier tier, std::int64_t step) {
      return std::max(table.total_charge(tier) * (2 + below(random, 7)) / 8 / step * step, 8 * step);
    };
    const std::int64_t device = some_of(Tier::kDevice, granule);
    const Budgets budgets{device, some_of(Tier::kHost, kPage), trial % 2 == 1};
    const std::vector<const Program*> programs{&p, &p, &q, &p, &q, &q};
    const auto first = decisions(table, budgets, given, programs, 0);
    if (!first) continue;
    ++fitted;
    for (const std::int64_t depth : {0, 1, 8, 1000}) {
      const auto again = decisions(table, budgets, given, programs, depth);
      ASSERT_TRUE(again.has_value());
      EXPECT_TRUE(same(*first, *again)) << "depth " << depth;
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GE(fitted, 100) << "budgets too small for the test to mean anything";
}

TEST(Residency, NoRoomIsReportedExactlyBelowTheMinimum) {
  TensorTable table(1);
  for (const std::int64_t bytes : {4096, 9000, 20480, 5}) {
    table.add({.name = fmt::format("b{}", bytes), .dtype = DType::kU8, .count = bytes});
  }
  const std::int64_t sum = 4096 + 12288 + 20480 + 4096;
  const auto all_at = [&](Tier tier, Access access) {
    std::vector<AccessStep> op;
    for (SegmentId id = 0; id < 4; ++id) op.push_back({id, tier, access, false});
    return op;
  };
  // The host needs room for the whole working set.
  for (const Access access : {Access::kRead, Access::kWrite}) {
    EXPECT_FALSE(fits(table, {0, sum}, all_at(Tier::kHost, access), Tier::kNvme));
    const auto failure = fits(table, {0, sum - kPage}, all_at(Tier::kHost, access), Tier::kNvme);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->tier, Tier::kHost);
  }
  // A segment without content at the device takes no host memory.
  EXPECT_FALSE(fits(table, {sum, 0}, all_at(Tier::kDevice, Access::kOverwrite), std::nullopt));
  auto failure = fits(table, {sum - kPage, 1 << 20}, all_at(Tier::kDevice, Access::kOverwrite), std::nullopt);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->tier, Tier::kDevice);
  EXPECT_EQ(failure->needed, 4096);
  EXPECT_EQ(failure->segment, 3);
  // On the way from NVMe to the device, the host need hold only the largest segment that is passing through.
  for (const Access access : {Access::kRead, Access::kWrite}) {
    EXPECT_FALSE(fits(table, {sum, 20480}, all_at(Tier::kDevice, access), Tier::kNvme));
    failure = fits(table, {sum, 20480 - kPage}, all_at(Tier::kDevice, access), Tier::kNvme);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->tier, Tier::kHost);
    EXPECT_EQ(failure->segment, 2);
    EXPECT_TRUE(fits(table, {sum - kPage, 1 << 20}, all_at(Tier::kDevice, access), Tier::kNvme));
  }
}

// The device charges a granule for each segment, however small; the host charges pages.
TEST(Residency, TheDeviceIsFilledByGranules) {
  constexpr std::int64_t kGranule = 65536;
  TensorTable table(1, kGranule);
  for (const std::int64_t bytes : {std::int64_t{4096}, std::int64_t{5}, kGranule, kGranule + 1}) {
    table.add({.name = fmt::format("b{}", bytes), .dtype = DType::kU8, .count = bytes});
  }
  constexpr std::int64_t kDevice = 5 * kGranule;
  const auto all_at = [&](Tier tier, Access access) {
    std::vector<AccessStep> op;
    for (SegmentId id = 0; id < 4; ++id) op.push_back({id, tier, access, false});
    return op;
  };
  EXPECT_FALSE(fits(table, {kDevice, 0}, all_at(Tier::kDevice, Access::kOverwrite), std::nullopt));
  const auto failure =
      fits(table, {kDevice - 1, 1 << 20}, all_at(Tier::kDevice, Access::kOverwrite), std::nullopt);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->tier, Tier::kDevice);
  EXPECT_EQ(failure->needed, 2 * kGranule);
  EXPECT_EQ(failure->segment, 3);
  // From NVMe, by the pages of the largest at the host.
  const std::int64_t largest = kGranule + kPage;
  EXPECT_FALSE(fits(table, {kDevice, largest}, all_at(Tier::kDevice, Access::kRead), Tier::kNvme));
  EXPECT_TRUE(fits(table, {kDevice, largest - kPage}, all_at(Tier::kDevice, Access::kRead), Tier::kNvme));
  const std::int64_t pages = 3 * kPage + 2 * kGranule;
  EXPECT_FALSE(fits(table, {0, pages}, all_at(Tier::kHost, Access::kRead), Tier::kNvme));
  EXPECT_TRUE(fits(table, {0, pages - kPage}, all_at(Tier::kHost, Access::kRead), Tier::kNvme));
}

TEST(Residency, WhatMayNotSinkStays) {
  TensorTable table(1);
  table.add({.name = "stays", .dtype = DType::kU8, .count = kPage, .lowest = Tier::kHost});
  table.add({.name = "sinks", .dtype = DType::kU8, .count = kPage});
  table.add({.name = "on device", .dtype = DType::kU8, .count = kPage, .lowest = Tier::kDevice});
  std::vector<AccessStep> write;
  for (SegmentId id = 0; id < 2; ++id) write.push_back({id, Tier::kHost, Access::kOverwrite, false});
  const Program ok = trace_of(write, 3);
  Residency residency(table, {kPage, kPage});
  residency.set_future(&ok, nullptr);
  std::vector<Action> actions;
  EXPECT_FALSE(residency.decide(0, 0, actions));
  const auto failure = residency.decide(0, 1, actions);
  ASSERT_TRUE(failure) << "the host's only page belongs to what may not be demoted";
  EXPECT_EQ(failure->segment, 1);

  const Program device = trace_of(
      {{2, Tier::kDevice, Access::kOverwrite, false}, {1, Tier::kDevice, Access::kOverwrite, false}}, 3);
  Residency other(table, {kPage, 8 * kPage});
  other.set_future(&device, nullptr);
  EXPECT_FALSE(other.decide(0, 0, actions));
  EXPECT_TRUE(other.decide(0, 1, actions));
}

TEST(Residency, DeadContentIsDroppedWithoutWriteBack) {
  const TensorTable table = equal_table(1, 3);
  const auto w = [](SegmentId id, bool last = false) {
    return AccessStep{id, Tier::kHost, Access::kOverwrite, last};
  };
  const auto r = [](SegmentId id, bool last = false) {
    return AccessStep{id, Tier::kHost, Access::kRead, last};
  };
  const auto run = [&](const std::vector<AccessStep>& accesses) {
    const Program program = trace_of(accesses, 3);
    Residency residency(table, {0, kPage});
    residency.set_future(&program, nullptr);
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      std::vector<Action> actions;
      EXPECT_FALSE(residency.decide(0, op, actions));
    }
    return residency.copies().traffic();
  };
  // 0 is overwritten before it is read again: its first content never leaves.
  EXPECT_EQ(run({w(0), w(1, true), w(0), r(0)}), (LinkBytes{}));
  // For comparison: where 0 is read again, it is written.
  EXPECT_EQ(run({w(0), w(1, true), r(0)}), (LinkBytes{0, 0, kPage, kPage}));
  // The program declares the use to be the last.
  EXPECT_EQ(run({w(0, true), w(1, true), w(2, true), w(0)}), (LinkBytes{}));
  // A clean copy is evicted for free, however often.
  EXPECT_EQ(run({w(0), w(1), r(0), r(1), r(0)}), (LinkBytes{0, 0, 3 * kPage, 2 * kPage}));
}

TEST(Residency, AmongEquallyFarTheFreeOneGoes) {
  // One of 0 and 1 is clean, the other dirty, neither is used again; whichever came first, and whatever its
  // number.
  for (int variant = 0; variant < 4; ++variant) {
    const SegmentId clean = variant % 2, dirty = 1 - clean;
    const TensorTable table = equal_table(1, 3);
    std::vector<AccessStep> first{{clean, Tier::kHost, Access::kRead, false},
                                  {dirty, Tier::kHost, Access::kOverwrite, false}};
    if (variant / 2 == 1) std::swap(first[0], first[1]);
    const Program before = trace_of(first, 3);
    const Program program = trace_of({{2, Tier::kHost, Access::kOverwrite, false}}, 3);
    Residency residency(table, {0, 2 * kPage});
    residency.assume_content(clean, Tier::kNvme);
    std::vector<Action> actions;
    residency.set_future(&before, &program);
    EXPECT_FALSE(residency.decide(0, 0, actions));
    EXPECT_FALSE(residency.decide(0, 1, actions));
    EXPECT_FALSE(residency.decide(1, 0, actions));
    EXPECT_EQ(residency.copies().traffic().nvme_write(), 0) << "variant " << variant;
    EXPECT_FALSE(residency.copies().present(clean, Tier::kHost));
    EXPECT_TRUE(residency.copies().present(dirty, Tier::kHost));
  }
}

// p overwrites 0 at its start, so p after p need not keep it; but q may follow, and read it.
TEST(Residency, AnotherProgramFindsWhatTheOneBeforeLeft) {
  const TensorTable table = equal_table(1, 3);
  const auto at_host = [](SegmentId id, Access access) { return AccessStep{id, Tier::kHost, access, false}; };
  const Program p = trace_of(
      {at_host(0, Access::kOverwrite), at_host(1, Access::kOverwrite), at_host(2, Access::kOverwrite)}, 3,
      "p");
  const Program q =
      trace_of({at_host(0, Access::kRead), at_host(1, Access::kRead), at_host(2, Access::kRead)}, 3, "q");
  for (const std::int64_t depth : {0, 1, 1000}) {
    Residency residency(table, {0, kPage});
    EXPECT_FALSE(decide_all(residency, {&p, &p, &q}, depth, [](const auto&...) {}));
  }
}

TEST(Residency, WithoutAProgramTheLeastRecentlyUsedGoesAndTheHeldStays) {
  const TensorTable table = equal_table(1, 5);
  Residency residency(table, {0, 3 * kPage});
  SegmentId held = -1;
  std::vector<Action> actions;
  const auto touch = [&](SegmentId id) {
    return residency.decide_free(
        {id, Tier::kHost, residency.copies().has_content(id) ? Access::kRead : Access::kOverwrite, false},
        [&](SegmentId other, Tier) { return other == held; }, actions);
  };
  for (const SegmentId id : {0, 1, 2, 0, 3}) EXPECT_FALSE(touch(id));
  EXPECT_FALSE(residency.copies().present(1, Tier::kHost)) << "1 was used longest ago";
  EXPECT_TRUE(residency.copies().present(0, Tier::kHost));
  held = 2;
  EXPECT_FALSE(touch(4));
  EXPECT_TRUE(residency.copies().present(2, Tier::kHost)) << "held";
  EXPECT_FALSE(residency.copies().present(0, Tier::kHost));
}

// A read from the drive takes longest, so a program begins it before it makes room at the device.
TEST(Residency, AlongAProgramAFetchIsDecidedBeforeTheDevicesRoom) {
  const TensorTable table = equal_table(1, 2);
  const Program program = trace_of({{0, Tier::kDevice, Access::kOverwrite, false},
                                    {1, Tier::kDevice, Access::kRead, false},
                                    {0, Tier::kDevice, Access::kRead, false}},
                                   2);
  Residency residency(table, {kPage, 2 * kPage});
  residency.assume_content(1, Tier::kNvme);
  residency.set_future(&program, &program);
  std::vector<Action> actions;
  ASSERT_FALSE(residency.decide(0, 0, actions));
  actions.clear();
  ASSERT_FALSE(residency.decide(0, 1, actions));
  const auto at = [&](SegmentId id, Tier from) {
    return std::find_if(actions.begin(), actions.end(), [&](const Action& a) {
      return a.kind == Action::Kind::kCopy && a.segment == id && a.from == from;
    });
  };
  ASSERT_NE(at(1, Tier::kNvme), actions.end());
  ASSERT_NE(at(0, Tier::kDevice), actions.end());
  EXPECT_LT(at(1, Tier::kNvme), at(0, Tier::kDevice));
}

}  // namespace
}  // namespace zg::test
