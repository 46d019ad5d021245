// The store with a program: random programs against a sequential model, at any prefetch depth and budget,
// with exactly the traffic that a dry run predicts.
#include <gtest/gtest.h>

#include "store/program_mode.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

void check(const Scenario& scenario, const Budgets& budgets, int depth, Nvme nvme, std::uint64_t seed) {
  const auto expected = dry_run(scenario, budgets);
  ASSERT_TRUE(expected.has_value());
  SCOPED_TRACE(fmt::format("depth {}, device {}, host {}{}", depth, budgets.device, budgets.host,
                           budgets.direct ? ", direct" : ""));
  Rig rig(scenario.table, budgets, nvme, depth);
  ModelRun(rig, scenario, seed)();
  EXPECT_EQ(rig.store->traffic(), *expected)
      << "nvme read " << rig.store->traffic().nvme_read() << " for " << expected->nvme_read() << ", written "
      << rig.store->traffic().nvme_write() << " for " << expected->nvme_write() << ", to device "
      << rig.store->traffic()[kToDevice] << " for " << (*expected)[kToDevice] << ", from device "
      << rig.store->traffic()[kToHost] << " for " << (*expected)[kToHost] << ", directly "
      << rig.store->traffic()[kDirectRead] << " for " << (*expected)[kDirectRead] << " and "
      << rig.store->traffic()[kDirectWrite] << " for " << (*expected)[kDirectWrite];
}

bool some_direct(Random& random) {
  return test_device() == TestDevice::kHost && below(random, 2) == 0;
}

constexpr int kDepths[] = {0, 1, 8, 1000};
// The emulation has half of the host device's.
const int kTrials = test_device() == TestDevice::kEmulated ? 10 : 20;

TEST(StoreProgram, RandomProgramsMatchTheModelAndTheDryRun) {
  const std::uint64_t seed = test_seed(303);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const Scenario s = random_scenario(random, below(random, 4), 6 + below(random, 12), {.ops = 25});
    const Budgets least = smallest_budgets(s, some_direct(random));
    const Budgets budgets{least.device + s.table.device_granule() * below(random, 12),
                          least.host + 4096 * below(random, 12), least.direct};
    for (const int depth : kDepths) check(s, budgets, depth, Nvme::kMemory, random());
    if (HasFailure()) return;
  }
}

TEST(StoreProgram, TheSmallestBudgetsSuffice) {
  const std::uint64_t seed = test_seed(404);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const Scenario s = random_scenario(random, 1 + below(random, 2), 6 + below(random, 8), {.ops = 25});
    const Budgets budgets = smallest_budgets(s, some_direct(random));
    for (const int depth : kDepths) check(s, budgets, depth, Nvme::kMemory, random());
    if (HasFailure()) return;
  }
}

TEST(StoreProgram, OneBelowTheSmallestBudgetSaysSo) {
  Random random(505);
  int refused = 0;
  for (int trial = 0; trial < 10; ++trial) {
    const Scenario s = random_scenario(random, 1, 8, {.ops = 15});
    Budgets budgets = smallest_budgets(s, some_direct(random));
    budgets.host -= 4096;
    Rig rig(s.table, budgets, Nvme::kMemory, 4);
    const Error e = error_of([&] { ModelRun(rig, s, 1)(); });
    EXPECT_EQ(e.code(), Errc::kMemory);
    // What cannot leave the device for want of host memory is the device's want of room, too.
    EXPECT_TRUE(e.where() == "host tier" || e.where() == "device tier") << e.where();
    ++refused;
  }
  EXPECT_EQ(refused, 10);
}

// The memory of an access that is the last one may not serve another access of the same operation.
TEST(StoreProgram, LastAccessesAreHeldWithTheRestOfTheirOperation) {
  TensorTable table = equal_table(0, 3, 5000);
  Program program("p");
  const auto step = [](SegmentId id, Access access, bool last) {
    return AccessStep{id, Tier::kHost, access, last};
  };
  program.add_op(
      std::vector<AccessStep>{step(0, Access::kOverwrite, true), step(1, Access::kOverwrite, true)});
  program.add_op(
      std::vector<AccessStep>{step(1, Access::kOverwrite, true), step(2, Access::kOverwrite, true)});
  program.finish(3);
  Rig rig(table, {0, 4 * 4096}, nullptr, 0);
  const Deadline deadline(30, [&] { return rig.store->state(); });
  rig.store->run(&program, nullptr);
  std::vector<Lease> leases;
  for (int op = 0; op < 2; ++op) {
    rig.store->acquire_op(nullptr, leases);
    EXPECT_NE(leases[0].data(), leases[1].data());
    leases.clear();
  }
}

// Two uses on one stream: the second is granted before the first has run.
TEST(StoreProgram, AStreamDoesNotWaitForItself) {
  TensorTable table = equal_table(0, 1);
  Program program("p");
  for (int i = 0; i < 3; ++i) {
    program.add_op(
        std::vector<AccessStep>{{0, Tier::kDevice, i == 0 ? Access::kOverwrite : Access::kWrite, false}});
  }
  program.finish(1);
  Rig rig(table, {4096, 0}, nullptr, 8);
  WorkStream stream(*rig.device);
  const Deadline deadline(30, [&] { return rig.store->state(); });
  rig.store->run(&program, nullptr);
  const Event gate = Event::pending();
  stream.wait(gate);
  std::vector<Lease> leases;
  for (int i = 0; i < 3; ++i) {
    rig.store->acquire_op(stream.get(), leases);
    stream.enqueue({program.op(i)[0], leases[0]}, [i](void* data) {
      int& count = *static_cast<int*>(data);
      count = i == 0 ? 1 : count + 1;
    });
    stream.release(leases[0]);
  }
  gate.set();
  rig.store->run(nullptr, nullptr);
  const Lease lease = rig.store->acquire(0, Tier::kDevice, Access::kRead);
  work_on(*rig.device, {Tier::kDevice, Access::kRead, lease},
          [](const void* data) { EXPECT_EQ(*static_cast<const int*>(data), 3); });
}

class StoreProgramOnEngine : public testing::TestWithParam<Nvme> {};

TEST_P(StoreProgramOnEngine, RandomProgramsMatchTheModelAndTheDryRun) {
  const std::uint64_t seed = test_seed(606);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 4; ++trial) {
    SCOPED_TRACE(trial);
    const Scenario s = random_scenario(random, 1 + below(random, 2), 12, {.ops = 25});
    const Budgets budgets = smallest_budgets(s, test_device() == TestDevice::kHost && trial % 2 == 1);
    for (const int depth : {0, 8}) check(s, budgets, depth, GetParam(), random());
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, StoreProgramOnEngine,
                         testing::Values(Nvme::kUring, Nvme::kThreads, Nvme::kRam),
                         [](const auto& test) -> std::string {
                           return test.param == Nvme::kUring     ? "uring"
                                  : test.param == Nvme::kThreads ? "threads"
                                                                 : "ram";
                         });

}  // namespace
}  // namespace zg::test
