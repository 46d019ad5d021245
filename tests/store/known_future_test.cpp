// What is known to follow, beside a plain walk over the accesses; and the smallest budgets where asking is
// dear.
#include "ziggurat/store/known_future.hpp"

#include <gtest/gtest.h>

#include "store/programs.hpp"
#include "support/seed.hpp"
#include "ziggurat/store/dry_run.hpp"

namespace zg::test {
namespace {

// The definition of next_use(), one access of all after the other.
std::uint64_t walked(const Program& p, std::int32_t at, SegmentId id, Tier tier, bool on_device) {
  for (std::int32_t distance = 1; distance <= p.access_count(); ++distance) {
    const AccessStep& a = p.access((at + distance) % p.access_count());
    if (a.segment != id) continue;
    if (a.access == Access::kOverwrite) return kNever;
    if (a.tier == tier || (tier == Tier::kHost && !on_device)) return static_cast<std::uint64_t>(distance);
    if (a.access == Access::kWrite || a.last) return kNever;
  }
  return kNever;
}

// Few segments and mostly reads, so that there are rows of reads at one tier, long ones and at either end.
Program reads_of_few(Random& random) {
  Program p("reads");
  const int segments = 1 + below(random, 4), ops = 1 + below(random, 60);
  for (int op = 0; op < ops; ++op) {
    AccessStep a{below(random, segments), below(random, 5) == 0 ? Tier::kHost : Tier::kDevice, Access::kRead,
                 false};
    if (const int kind = below(random, 20); kind < 2)
      a.access = kind == 0 ? Access::kWrite : Access::kOverwrite;
    a.last = below(random, 25) == 0;
    p.add_op(std::vector<AccessStep>{a});
  }
  p.finish(segments);
  return p;
}

TEST(KnownFuture, NextUsesAreThoseOfAWalk) {
  const std::uint64_t seed = test_seed(7070);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 300; ++trial) {
    const Program p = reads_of_few(random);
    KnownFuture future;
    for (std::int32_t at = -1; at < p.access_count(); ++at) {
      future.follow(&p, at);
      for (SegmentId id = 0; p.knows(id); ++id) {
        for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
          for (const bool on_device : {false, true}) {
            ASSERT_EQ(future.next_use(id, tier, on_device), walked(p, at, id, tier, on_device))
                << "trial " << trial << ", position " << at << ", segment " << id << ", tier "
                << static_cast<int>(tier) << (on_device ? ", on the device" : "");
          }
        }
      }
    }
  }
}

// Where budgets fit from `device` and `host` on, and the cheap test says so a little too early.
struct Asked {
  std::int64_t device, host;
  int full = 0;

  FitTests tests(std::int64_t early) {
    FitTests t;
    t.fits = [this](const Budgets& b) { return ++full, b.device >= device && b.host >= host; };
    t.may_fit = [this, early](const Budgets& b) {
      return b.device >= device - early && b.host >= host - early;
    };
    return t;
  }
};

TEST(SmallestBudgets, AreExactAndSeldomAskedForNearTheCheapTestsAnswer) {
  const TensorTable table = equal_table(1, 64, 1 << 20);
  const std::int64_t page = 4096;
  for (const std::int64_t early : {0, 1, 5, 700}) {
    Asked asked{.device = 3000 * page, .host = 9000 * page};
    const auto found = smallest_budgets(table, {}, 0, false, asked.tests(early * page));
    ASSERT_TRUE(found);
    EXPECT_EQ(found->device, asked.device);
    EXPECT_EQ(found->host, asked.host);
    EXPECT_LE(asked.full, early == 0 ? 2 : early == 1 ? 4 : 48) << early;
  }
  Asked never{.device = 1 << 30, .host = 0};
  EXPECT_FALSE(smallest_budgets(table, {}, 0, false, never.tests(5 * page)));
}

TEST(SmallestBudgets, WithALimitFitAndAreALittleAboveTheSmallest) {
  const TensorTable table = equal_table(1, 64, 1 << 20);
  const std::int64_t page = 4096;
  for (const std::int64_t early : {0, 1, 5, 60, 700}) {
    for (const int most : {1, 2, 4, 30}) {
      Asked asked{.device = 3000 * page, .host = 9000 * page};
      FitTests tests = asked.tests(early * page);
      tests.most = most;
      const auto found = smallest_budgets(table, {}, 0, false, tests);
      ASSERT_TRUE(found);
      EXPECT_GE(found->device, asked.device);
      EXPECT_GE(found->host, asked.host);
      const auto above = [&](std::int64_t bytes) { return bytes + 2 * early * page + bytes / 30 + page; };
      EXPECT_LE(found->device, above(asked.device)) << early << " " << most;
      EXPECT_LE(found->host, above(asked.host)) << early << " " << most;
      // Once at the cheap test's answer, then doublings, each tier alone.
      EXPECT_LE(asked.full, 2 * (most + 6)) << early << " " << most;
    }
  }
}

}  // namespace
}  // namespace zg::test
