// What residency decides where NVMe and the device have a link of their own.
#include "store/residency_support.hpp"

namespace zg::test {
namespace {

TEST(ResidencyDirect, ADirectLinkNeedsNoHostMemory) {
  const TensorTable table = equal_table(1, 3, 9000);
  const auto all_at_device = [&](Access access) {
    std::vector<AccessStep> op;
    for (SegmentId id = 0; id < 3; ++id) op.push_back({id, Tier::kDevice, access, false});
    return op;
  };
  for (const Access access : {Access::kRead, Access::kWrite}) {
    EXPECT_TRUE(fits(table, {9 * kPage, 2 * kPage}, all_at_device(access), Tier::kNvme));
    EXPECT_FALSE(fits(table, {9 * kPage, 0, true}, all_at_device(access), Tier::kNvme));
    const auto failure = fits(table, {9 * kPage - 1, 1 << 20, true}, all_at_device(access), Tier::kNvme);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->tier, Tier::kDevice);
  }
  // Down and up again, with a device for one of them, and for those that may be demoted to NVMe alone.
  for (const Tier lowest : {Tier::kNvme, Tier::kHost}) {
    const TensorTable demotable = equal_table(1, 2, 9000, lowest);
    const auto step = [](SegmentId id, Access access) {
      return AccessStep{id, Tier::kDevice, access, false};
    };
    const Program program =
        trace_of({step(0, Access::kOverwrite), step(1, Access::kOverwrite), step(0, Access::kRead)}, 2);
    const Budgets budgets{3 * kPage, 0, true};
    Residency residency(demotable, budgets);
    Replay replay(demotable, budgets);
    residency.set_future(&program, nullptr);
    for (std::int32_t op = 0; op < 3; ++op) {
      std::vector<Action> actions;
      const auto failure = residency.decide(0, op, actions);
      ASSERT_EQ(failure.has_value(), lowest == Tier::kHost && op == 1);
      if (failure) break;
      residency.copies().check();
      replay(actions);
    }
    if (lowest == Tier::kHost) continue;
    const LinkBytes expected{0, 0, 0, 0, 3 * kPage, 2 * 3 * kPage};
    EXPECT_EQ(residency.copies().traffic(), expected);
    EXPECT_EQ(replay.traffic(), expected);
  }
}

// Two of them want the host's only page: H is used there, D passes by on its way to the device. Who is needed
// first has it; of other priorities, who has more.
TEST(ResidencyDirect, WhatTheHostNeedsSoonerStaysThere) {
  const auto moved = [](bool host_first, int priority, const PolicyFactory& policy) {
    TensorTable table(1);
    table.add({.name = "h", .dtype = DType::kU8, .count = kPage, .priority = 0});
    table.add({.name = "d", .dtype = DType::kU8, .count = kPage, .priority = priority});
    table.add({.name = "other", .dtype = DType::kU8, .count = kPage});
    const AccessStep h{0, Tier::kHost, Access::kRead, false}, d{1, Tier::kDevice, Access::kRead, false},
        other{2, Tier::kDevice, Access::kOverwrite, true};
    const Program program =
        trace_of(host_first ? std::vector{h, d, other, h, d} : std::vector{h, d, other, d, h}, 3);
    const Budgets budgets{kPage, kPage, true};
    Residency residency(table, budgets, policy);
    Replay replay(table, budgets);
    for (SegmentId id = 0; id < 2; ++id) {
      residency.assume_content(id, Tier::kNvme);
      replay.content(id, Tier::kNvme);
    }
    residency.set_future(&program, nullptr);
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      std::vector<Action> actions;
      EXPECT_FALSE(residency.decide(0, op, actions));
      replay(actions);
    }
    EXPECT_EQ(replay.traffic(), residency.copies().traffic());
    return residency.copies().traffic();
  };
  for (const auto& policy : {default_policy(), next_use_policy()}) {
    // H is read once; D comes directly, twice.
    EXPECT_EQ(moved(true, 0, policy), (LinkBytes{0, 0, kPage, 0, 2 * kPage}));
    // D takes H's place, and comes from there the second time; H is read again.
    EXPECT_EQ(moved(false, 0, policy), (LinkBytes{2 * kPage, 0, 3 * kPage}));
    // The same in either order.
    EXPECT_EQ(moved(false, -1, policy)[kDirectRead], 2 * kPage);
    EXPECT_EQ(moved(true, 1, policy)[kDirectRead], 0);
  }
  // A policy that knows no future keeps the copy that passes the host.
  EXPECT_EQ(moved(true, 0, lru_policy())[kDirectRead], 0);
}

// To evict past the host a segment that only the device has, it must be written to NVMe. So a clean copy at
// the host makes room for it there instead, though that copy is needed sooner.
TEST(ResidencyDirect, WhatIsFreeMakesWayForWhatIsNot) {
  const TensorTable table = equal_table(1, 4);
  const auto read = [](SegmentId id, bool last = false) {
    return AccessStep{id, Tier::kHost, Access::kRead, last};
  };
  const AccessStep made{2, Tier::kDevice, Access::kOverwrite, false},
      other{3, Tier::kDevice, Access::kOverwrite, true};
  const Program program = trace_of({read(0), read(1), made, other, read(1), read(0), read(2, true)}, 4);
  for (const bool direct : {false, true}) {
    Residency residency(table, {kPage, 2 * kPage, direct}, next_use_policy());
    for (SegmentId id = 0; id < 2; ++id) residency.assume_content(id, Tier::kNvme);
    residency.set_future(&program, nullptr);
    for (std::int32_t op = 0; op < program.op_count(); ++op) {
      std::vector<Action> actions;
      EXPECT_FALSE(residency.decide(0, op, actions));
    }
    EXPECT_EQ(residency.copies().traffic(), (LinkBytes{0, kPage, 3 * kPage})) << direct;
  }
}

// Segments that the device needs one after the other, once a round or there and back, under any budgets: what
// goes past the host leaves room there, so that drives move no more, and mostly less. (With 20 segments, read
// there and back, 2 of 361 budgets cost a segment more.)
TEST(ResidencyDirect, ADirectLinkCostsTheDrivesNothing) {
  constexpr int kSegments = 12;
  const TensorTable table = equal_table(1, kSegments);
  std::map<std::pair<Access, bool>, std::pair<std::int64_t, std::int64_t>> moved;  // NVMe bytes without, with
  for (const Access access : {Access::kRead, Access::kWrite}) {
    for (const bool and_back : {false, true}) {
      std::vector<AccessStep> accesses;
      for (SegmentId id = 0; id < kSegments; ++id) accesses.push_back({id, Tier::kDevice, access, false});
      for (SegmentId id = kSegments; and_back && id-- > 0;)
        accesses.push_back({id, Tier::kDevice, access, false});
      const Program program = trace_of(accesses, kSegments);
      for (int device = 1; device <= kSegments; ++device) {
        for (int host = 2; host <= kSegments; ++host) {
          SCOPED_TRACE(
              fmt::format("{}, room for {} and {}", and_back ? "there and back" : "once", device, host));
          const auto in_four_rounds = [&](bool direct) {
            Residency residency(table, {device * kPage, host * kPage, direct});
            for (SegmentId id = 0; id < kSegments; ++id) residency.assume_content(id, Tier::kNvme);
            LinkBytes before;
            for (int round = 0; round < 8; ++round) {
              if (round == 4) before = residency.copies().traffic();
              residency.set_future(&program, &program);
              for (std::int32_t op = 0; op < program.op_count(); ++op) {
                std::vector<Action> actions;
                EXPECT_FALSE(residency.decide(0, op, actions));
              }
              residency.copies().check();
            }
            return residency.copies().traffic() - before;
          };
          const LinkBytes without = in_four_rounds(false), with = in_four_rounds(true);
          EXPECT_LE(with.nvme_read(), without.nvme_read());
          EXPECT_LE(with.nvme_write(), without.nvme_write());
          EXPECT_LE(with[kToDevice], without[kToDevice]);
          moved[{access, and_back}].first += without.nvme_read() + without.nvme_write();
          moved[{access, and_back}].second += with.nvme_read() + with.nvme_write();
          if (access == Access::kWrite) {
            EXPECT_EQ(with[kDirectRead], with.nvme_read()) << "a copy at the host would be old at once";
          }
        }
      }
    }
  }
  // Read and written once a round: a quarter less, over all budgets.
  const auto& [without, with] = moved[{Access::kWrite, false}];
  EXPECT_LT(4 * with, 3 * without) << with / kPage << " segments, " << without / kPage << " without";
  const auto& [read_without, read_with] = moved[{Access::kRead, false}];
  EXPECT_LT(10 * read_with, 9 * read_without) << read_with / kPage << " of " << read_without / kPage;
}

}  // namespace
}  // namespace zg::test
