// Moving allocates nothing once it is under way. On the host device: CUDA allocates as it likes.
#include <gtest/gtest.h>

#include <vector>

#include "store/programs.hpp"
#include "store/rig.hpp"
#include "support/count_allocations.hpp"

namespace zg::test {
namespace {

// Both ways of use, through all tiers, with everything evicted all the time.
class StoreSteadyState : public ::testing::TestWithParam<Nvme> {};

TEST_P(StoreSteadyState, MovesWithoutAllocating) {
  constexpr int kSegments = 24;
  const TensorTable table = equal_table(1, kSegments, 64 * 1024);
  const std::int64_t charge = table.segment(0).charge;
  Rig rig(table, {6 * charge, 9 * charge}, GetParam());
  const auto pass = [&](Access access) {
    for (SegmentId id = 0; id < kSegments; ++id) rig.store->acquire(id, Tier::kDevice, access).release();
  };
  pass(Access::kOverwrite);
  const auto count = [&](auto&& round) {
    std::int64_t least = 1000000;
    for (int i = 0; i < 12; ++i) {
      const std::int64_t before = allocations_of_all_threads();
      round();
      rig.store->drain();
      least = std::min(least, allocations_of_all_threads() - before);
    }
    return least;
  };
  EXPECT_EQ(count([&] { pass(Access::kWrite); }), 0) << "without a program";
  // A step builds its record when it ends: some allocations for all of it, none for each move.
  const std::int64_t step = count([&] {
    rig.store->step_begin();
    pass(Access::kWrite);
    rig.store->step_end();
  });
  EXPECT_LE(step, 40) << "in a step";
  Program program("steady");
  for (SegmentId id = 0; id < kSegments; ++id) {
    program.add_op(std::vector<AccessStep>{{id, Tier::kDevice, Access::kWrite, false}});
  }
  program.finish(kSegments);
  rig.store->run(&program, &program);
  std::vector<Lease> leases;
  EXPECT_EQ(count([&] {
              for (SegmentId id = 0; id < kSegments; ++id) {
                rig.store->acquire_op(nullptr, leases);
                leases.clear();
              }
              rig.store->run(&program, &program);
            }),
            0)
      << "with a program";
  for (SegmentId id = 0; id < kSegments; ++id) rig.store->acquire_op(nullptr, leases), leases.clear();
  rig.store->run(&program, nullptr);
  for (SegmentId id = 0; id < kSegments; ++id) rig.store->acquire_op(nullptr, leases), leases.clear();
  rig.store->run(nullptr, nullptr);
}

INSTANTIATE_TEST_SUITE_P(Engines, StoreSteadyState,
                         ::testing::Values(Nvme::kUring, Nvme::kThreads, Nvme::kRam), [](const auto& kind) {
                           return kind.param == Nvme::kUring     ? "uring"
                                  : kind.param == Nvme::kThreads ? "threads"
                                                                 : "ram";
                         });

}  // namespace
}  // namespace zg::test
