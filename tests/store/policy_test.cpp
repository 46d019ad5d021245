// Policies against plain references, and what all of them must respect.
#include "ziggurat/store/policy.hpp"

#include <gtest/gtest.h>

#include <list>
#include <map>
#include <set>

#include "store/trace_support.hpp"
#include "support/errors.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg::test {
namespace {

// A policy of a user's: first in, first out.
class Fifo final : public Policy {
 public:
  void insert(SegmentId id, const PolicyView&) override { queue_.push_back(id); }
  void remove(SegmentId id) override { queue_.remove(id); }
  void update(SegmentId, const PolicyView&) override {}
  void future_changed(const PolicyView&) override {}
  SegmentId victim(const PolicyView& view) override {
    for (const SegmentId id : queue_) {
      if (view.may_evict(id)) return id;
    }
    return -1;
  }
  bool uses_future() const override { return false; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<Fifo>(*this); }

 private:
  std::list<SegmentId> queue_;
};

// Evicts any copy that it may, and checks what it is told.
class AnyOne final : public Policy {
 public:
  void insert(SegmentId id, const PolicyView& view) override {
    EXPECT_TRUE(here_.insert(id).second);
    EXPECT_GT(view.bytes(id), 0);
  }
  void remove(SegmentId id) override { EXPECT_EQ(here_.erase(id), 1u); }
  void update(SegmentId id, const PolicyView&) override { EXPECT_TRUE(here_.contains(id)); }
  void future_changed(const PolicyView& view) override {
    for (const SegmentId id : here_) (void)view.next_use(id);
  }
  SegmentId victim(const PolicyView& view) override {
    std::vector<SegmentId> may;
    for (const SegmentId id : here_) {
      if (view.may_evict(id)) may.push_back(id);
    }
    return may.empty() ? -1 : may[random_() % may.size()];
  }
  bool uses_future() const override { return true; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<AnyOne>(*this); }

 private:
  std::set<SegmentId> here_;
  Random random_{7};
};

struct Named {
  const char* name;
  PolicyFactory policy;
};
std::vector<Named> all_policies() {
  return {{"next-use", next_use_policy()},
          {"next-use, spread", default_policy()},
          {"next-use, writes cost", next_use_policy({.write_cost = 2})},
          {"lru", lru_policy()},
          {"clock", clock_policy()},
          {"fifo", [] { return std::make_unique<Fifo>(); }},
          {"any", [] { return std::make_unique<AnyOne>(); }}};
}

// One access without a program; the segment has content afterwards.
std::optional<NoRoom> touch(Residency& residency, SegmentId id, Access access = Access::kRead,
                            Tier tier = Tier::kHost) {
  std::vector<Action> actions;
  if (!residency.copies().has_content(id)) access = Access::kOverwrite;
  return residency.decide_free({id, tier, access, false}, actions);
}

std::set<SegmentId> at(const Residency& residency, Tier tier, std::int32_t segments) {
  std::set<SegmentId> ids;
  for (SegmentId id = 0; id < segments; ++id) {
    if (residency.copies().present(id, tier)) ids.insert(id);
  }
  return ids;
}

TEST(Policy, LruIsAListOfLastUses) {
  const std::uint64_t seed = test_seed(4401);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 40; ++trial) {
    const std::int32_t n = 3 + below(random, 12), room = 1 + below(random, n);
    const TensorTable table = equal_table(1, n);
    Residency residency(table, {0, room * kPage}, lru_policy());
    std::list<SegmentId> list;  // the most recent first
    for (int i = 0; i < 300; ++i) {
      const SegmentId id = below(random, n);
      ASSERT_FALSE(touch(residency, id));
      list.remove(id);
      if (static_cast<std::int32_t>(list.size()) == room) list.pop_back();
      list.push_front(id);
      ASSERT_EQ(at(residency, Tier::kHost, n), std::set<SegmentId>(list.begin(), list.end()))
          << trial << ", " << i;
    }
  }
}

// Bits in a ring: a newcomer enters behind the hand without its bit; a use sets the bit; the hand clears bits
// until it finds one that is not set.
TEST(Policy, ClockIsARingOfBits) {
  const std::uint64_t seed = test_seed(4402);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 40; ++trial) {
    const std::int32_t n = 3 + below(random, 12), room = 1 + below(random, n);
    const TensorTable table = equal_table(1, n);
    Residency residency(table, {0, room * kPage}, clock_policy());
    std::list<std::pair<SegmentId, bool>> ring;
    auto hand = ring.end();
    const auto step = [&] {
      if (++hand == ring.end()) hand = ring.begin();
    };
    for (int i = 0; i < 300; ++i) {
      const SegmentId id = below(random, n);
      ASSERT_FALSE(touch(residency, id));
      const auto found = std::find_if(ring.begin(), ring.end(), [&](const auto& e) { return e.first == id; });
      if (found != ring.end()) {
        found->second = true;
      } else {
        if (static_cast<std::int32_t>(ring.size()) == room) {
          while (hand->second) {
            hand->second = false;
            step();
          }
          hand = ring.erase(hand);
          if (hand == ring.end()) hand = ring.begin();
        }
        ring.insert(hand, {id, false});
        if (ring.size() == 1) hand = ring.begin();
      }
      std::set<SegmentId> expected;
      for (const auto& [e, bit] : ring) expected.insert(e);
      ASSERT_EQ(at(residency, Tier::kHost, n), expected) << trial << ", " << i;
    }
  }
}

TEST(Policy, LowerPrioritiesLeaveFirst) {
  for (const Named& p : all_policies()) {
    SCOPED_TRACE(p.name);
    TensorTable table(1);
    for (int i = 0; i < 9; ++i) {
      table.add({.name = fmt::format("{}", i), .dtype = DType::kU8, .count = kPage, .priority = i % 3 - 1});
    }
    // All nine, then newcomers: those of priority -1 leave, then those of 0, then those of 1.
    for (int i = 0; i < 9; ++i)
      table.add({.name = fmt::format("new{}", i), .dtype = DType::kU8, .count = kPage, .priority = 7});
    auto accesses = scan(18, Access::kOverwrite);
    const auto reads = scan(9, Access::kRead);
    accesses.insert(accesses.begin() + 9, reads.begin(), reads.end());
    const Program program = program_of(accesses, 18);
    Residency residency(table, {0, 9 * kPage}, p.policy);
    residency.set_future(&program, nullptr);
    std::vector<Action> actions;
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      ASSERT_FALSE(residency.decide(0, op, actions));
      residency.copies().check();
      const int newcomers = std::max(0, op - 17);
      int left[3] = {0, 0, 0};
      for (SegmentId id = 0; id < 9; ++id)
        left[id % 3] += residency.copies().present(id, Tier::kHost) ? 0 : 1;
      if (op < 18) continue;
      EXPECT_EQ(left[0], std::min(newcomers, 3));
      EXPECT_EQ(left[1], std::clamp(newcomers - 3, 0, 3));
      EXPECT_EQ(left[2], std::clamp(newcomers - 6, 0, 3));
    }
  }
}

TEST(Policy, PinnedCopiesStay) {
  for (const Named& p : all_policies()) {
    SCOPED_TRACE(p.name);
    Random random(11);
    const TensorTable table = equal_table(1, 8);
    Residency residency(table, {0, 3 * kPage}, p.policy);
    for (const SegmentId id : {2, 5}) {
      ASSERT_FALSE(touch(residency, id));
      residency.pin(id, Tier::kHost);
    }
    for (int i = 0; i < 100; ++i) {
      ASSERT_FALSE(touch(residency, below(random, 8)));
      EXPECT_TRUE(residency.copies().present(2, Tier::kHost) && residency.copies().present(5, Tier::kHost));
    }
    residency.unpin(5, Tier::kHost);
    residency.pin(2, Tier::kHost);
    residency.unpin(2, Tier::kHost);  // pins are counted, so one is left
    bool left = false;
    for (int i = 0; i < 100; ++i) {
      ASSERT_FALSE(touch(residency, below(random, 8)));
      EXPECT_TRUE(residency.copies().present(2, Tier::kHost));
      left = left || !residency.copies().present(5, Tier::kHost);
    }
    EXPECT_TRUE(left);
  }
}

// Random holds: what is held stays, and there is no room only when all that is there is held.
TEST(Policy, WhatIsHeldDoesNotLeave) {
  const std::uint64_t seed = test_seed(4403);
  SCOPED_TRACE(seed);
  for (const Named& p : all_policies()) {
    SCOPED_TRACE(p.name);
    Random random(seed);
    int refused = 0;
    for (int trial = 0; trial < 20; ++trial) {
      const std::int32_t n = 4 + below(random, 10), room = 1 + below(random, n - 1);
      const TensorTable table = equal_table(1, n);
      const Program guess = program_of(random_accesses(random, n, 20, {}), n);
      Residency residency(table, {0, room * kPage}, p.policy);
      residency.guess(&guess, -1);
      for (int i = 0; i < 150; ++i) {
        std::set<SegmentId> held;
        for (const SegmentId id : at(residency, Tier::kHost, n)) {
          if (below(random, 3) > 0) held.insert(id);
        }
        const SegmentId id = below(random, n);
        std::vector<Action> actions;
        const Access access = !residency.copies().has_content(id) ? Access::kOverwrite
                              : below(random, 2) == 0             ? Access::kWrite
                                                                  : Access::kRead;
        const bool was_there = residency.copies().present(id, Tier::kHost);
        const auto failure = residency.decide_free(
            {id, Tier::kHost, access, false}, [&](SegmentId other, Tier) { return held.contains(other); },
            actions);
        EXPECT_EQ(failure.has_value(), !was_there && static_cast<std::int32_t>(held.size()) == room);
        refused += failure.has_value();
        for (const SegmentId other : held) EXPECT_TRUE(residency.copies().present(other, Tier::kHost));
        residency.copies().check();
        if (testing::Test::HasFailure()) return;
      }
    }
    EXPECT_GT(refused, 0);
  }
}

// Every policy, two tiers, operations that hold several segments at both: legal after every operation,
// whatever it chooses, and no budget is passed.
TEST(Policy, AnyChoiceKeepsTheTableLegalOnTwoTiers) {
  const std::uint64_t seed = test_seed(4404);
  SCOPED_TRACE(seed);
  for (const Named& p : all_policies()) {
    SCOPED_TRACE(p.name);
    Random random(seed);
    int fitted = 0;
    for (int trial = 0; trial < 60; ++trial) {
      const TensorTable table = random_table(random, 1, 4 + below(random, 14), some_granule(random));
      const std::int32_t n = table.segment_count();
      const auto given = random_given(random, n);
      const Program program = random_program(random, "p", table, given, {.ops = 25});
      const auto some_of = [&](Tier tier, std::int64_t step) {
        return std::max(table.total_charge(tier) * (2 + below(random, 7)) / 8, 8 * step);
      };
      const std::int64_t device = some_of(Tier::kDevice, table.device_granule());
      const Budgets budgets{device, some_of(Tier::kHost, kPage)};
      Residency residency(table, budgets, p.policy);
      bool fits = true;
      for (SegmentId id = 0; id < n && fits; ++id) {
        const Tier tier = table.segment(id).lowest == Tier::kDevice ? Tier::kDevice : Tier::kHost;
        if (given[static_cast<std::size_t>(id)]) fits = !touch(residency, id, Access::kOverwrite, tier);
      }
      for (int round = 0; round < 3 && fits; ++round) {
        residency.set_future(&program, nullptr);
        for (std::int32_t op = 0; op < program.op_count() && fits; ++op) {
          std::vector<Action> actions;
          fits = !residency.decide(0, op, actions);
          residency.copies().check();
          for (const AccessStep& a : program.op(op)) {
            EXPECT_TRUE(!fits || a.last || residency.copies().present(a.segment, a.tier));
          }
        }
        Residency copy(residency);  // policies are cloned with their state
        copy.copies().check();
        EXPECT_EQ(copy.copies().fingerprint(), residency.copies().fingerprint());
      }
      EXPECT_LE(residency.copies().peak(Tier::kDevice), budgets.device);
      EXPECT_LE(residency.copies().peak(Tier::kHost), budgets.host);
      fitted += fits;
    }
    EXPECT_GE(fitted, 15);
  }
}

// A copy decides as the original would, from its state on.
TEST(Policy, ClonesGoOnAlike) {
  for (const Named& p : all_policies()) {
    SCOPED_TRACE(p.name);
    Random random(17);
    const TensorTable table = equal_table(1, 10);
    Residency residency(table, {0, 4 * kPage}, p.policy);
    for (int i = 0; i < 50; ++i) ASSERT_FALSE(touch(residency, below(random, 10)));
    Residency copy(residency);
    for (int i = 0; i < 50; ++i) {
      const SegmentId id = below(random, 10);
      ASSERT_FALSE(touch(residency, id));
      ASSERT_FALSE(touch(copy, id));
      EXPECT_EQ(at(residency, Tier::kHost, 10), at(copy, Tier::kHost, 10));
    }
  }
}

// 0 is clean and needed in 2 accesses, 1 is modified and needed `later` accesses after that of the newcomer.
TEST(Policy, WriteCostTradesDistanceForWrites) {
  const auto leaves = [](double write_cost, int later) {
    std::vector<AccessStep> accesses{at_host(0), at_host(1, Access::kWrite), at_host(2), at_host(2),
                                     at_host(0)};
    while (static_cast<int>(accesses.size()) < 2 + later) accesses.push_back(at_host(2));
    accesses.push_back(at_host(1));
    const Program program = program_of(accesses, 3);
    const TensorTable table = equal_table(1, 3);
    Residency residency(table, {0, 2 * kPage}, next_use_policy({.write_cost = write_cost}));
    for (SegmentId id = 0; id < 3; ++id) residency.assume_content(id, Tier::kNvme);
    residency.set_future(&program, nullptr);
    std::vector<Action> actions;
    for (std::int32_t op = 0; op < 3; ++op) EXPECT_FALSE(residency.decide(0, op, actions));
    EXPECT_EQ(residency.copies().present(0, Tier::kHost) + residency.copies().present(1, Tier::kHost), 1);
    EXPECT_EQ(residency.copies().traffic().nvme_write(),
              residency.copies().present(1, Tier::kHost) ? 0 : kPage);
    return residency.copies().present(1, Tier::kHost) ? 0 : 1;
  };
  // Distances from the newcomer's access: 2 and `later`. The clean one leaves if 2 (1 + cost) >= later.
  EXPECT_EQ(leaves(0, 3), 1) << "the farthest leaves, whatever it costs";
  EXPECT_EQ(leaves(0.5, 3), 0);
  EXPECT_EQ(leaves(0.4, 3), 1);
  EXPECT_EQ(leaves(1, 4), 0);
  EXPECT_EQ(leaves(1, 5), 1);
  EXPECT_EQ(leaves(4, 10), 0);
  EXPECT_EQ(leaves(4, 11), 1);
}

TEST(Policy, WriteCostSavesWritesAndCostsReads) {
  const std::uint64_t seed = test_seed(4405);
  SCOPED_TRACE(seed);
  Random random(seed);
  std::map<double, LinkBytes> sums;
  for (int trial = 0; trial < 200; ++trial) {
    const std::int32_t n = 6 + below(random, 8);
    const AccessTrace trace = equal_trace(n, random_accesses(random, n, 60, {.write_percent = 25}));
    for (const double cost : {0.0, 1.0, 8.0}) {
      sums[cost] += replay(trace, {0, (2 + n / 3) * kPage}, next_use_policy({.write_cost = cost})).per_round;
    }
  }
  EXPECT_LT(sums[1].nvme_write(), sums[0].nvme_write());
  EXPECT_LT(sums[8].nvme_write(), sums[1].nvme_write());
  EXPECT_GT(sums[1].nvme_read(), sums[0].nvme_read());
  EXPECT_GT(sums[8].nvme_read(), sums[1].nvme_read());
}

TEST(Policy, IsFoundByName) {
  EXPECT_TRUE(policy_by_name("next-use")()->uses_future());
  EXPECT_FALSE(policy_by_name("lru")()->uses_future());
  EXPECT_FALSE(policy_by_name("clock")()->uses_future());
  const Error e = error_of([&] { policy_by_name("belady"); });
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.what(), "next-use, lru or clock");
}

}  // namespace
}  // namespace zg::test
