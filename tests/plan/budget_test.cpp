// The smallest budgets suffice, a page (at the device, a granule) less does not, and the plan's peaks are
// those of the run.
#include <algorithm>

#include "engine/tiny_run.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

struct Case {
  std::string name;
  TinySetup setup;
};
// All of block 0 and of the head, and a parameter of block 1.
std::vector<std::vector<int>> some_frozen(const TinySetup& s) {
  std::vector<std::vector<int>> groups;
  const Model model(s.model, s.dtype, host_ops());
  for (const Unit& unit : model.units()) groups.emplace_back(unit.params.size(), 0);
  std::ranges::fill(groups[1], kFrozen);
  std::ranges::fill(groups.back(), kFrozen);
  groups[2][1] = kFrozen;
  return groups;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, auto&& change) {
    for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
      TinySetup s;
      s.model = model;
      s.dtype = DType::kBF16;
      s.layout.drives = 1;
      s.room = Room::kSmallest;
      change(s);
      all.push_back({name + (model.tied ? "_gpt2" : "_llama"), s});
    }
  };
  add("nvme", [](TinySetup&) {});
  add("no_drive", [](TinySetup& s) { s.layout.drives = 0; });
  add("early", [](TinySetup& s) { s.timing = UpdateTiming::kEarly, s.clip = 0; });
  add("micro_batches", [](TinySetup& s) { s.layout.accumulation = Accumulation::kMicroBatchMajor; });
  add("keep", [](TinySetup& s) { s.layout.recompute = false; });
  add("update_on_device", [](TinySetup& s) { s.layout.device_updates = kAllUnits; });
  add("update_of_two_on_device", [](TinySetup& s) { s.layout.device_updates = 2; });
  add("update_of_one_on_device_early",
      [](TinySetup& s) { s.layout.device_updates = 1, s.timing = UpdateTiming::kEarly, s.clip = 0; });
  add("separate", [](TinySetup& s) { s.timing = UpdateTiming::kSeparate; });
  add("separate_no_drive", [](TinySetup& s) { s.timing = UpdateTiming::kSeparate, s.layout.drives = 0; });
  add("separate_update_of_two_on_device",
      [](TinySetup& s) { s.timing = UpdateTiming::kSeparate, s.layout.device_updates = 2; });
  add("split_int8", [](TinySetup& s) {
    s.layout.state = {.master = MasterFormat::kSplit, .moments = MomentFormat::kInt8};
  });
  add("sgd", [](TinySetup& s) { s.layout.state = {.kind = OptimizerKind::kSgd, .moment_count = 0}; });
  add("frozen", [](TinySetup& s) { s.layout.groups = some_frozen(s); });
  add("frozen_separate",
      [](TinySetup& s) { s.layout.groups = some_frozen(s), s.timing = UpdateTiming::kSeparate; });
  add("granules", [](TinySetup& s) { s.layout.device_granule = 64 << 10; });
  add("granules_update_of_two_on_device",
      [](TinySetup& s) { s.layout.device_granule = 64 << 10, s.layout.device_updates = 2; });
  add("weights_in_device", [](TinySetup& s) { s.layout.weights = OffloadTarget::kDevice; });
  add("optimizer_at_host", [](TinySetup& s) { s.layout.optimizer = OffloadTarget::kHost; });
  add("activations_in_device", [](TinySetup& s) { s.layout.activations = OffloadTarget::kDevice; });
  return all;
}

class SmallestBudgets : public testing::TestWithParam<Case> {};

TEST_P(SmallestBudgets, SufficeAndNotAPageLess) {
  TinyRun run(GetParam().setup);
  const Layout& layout = run.layout();
  const Budgets least = run.budgets();
  const Plan plan = make_plan(layout, run.programs(), least);
  ASSERT_TRUE(plan.fits);
  const std::int64_t granule = layout.table.device_granule();
  EXPECT_EQ(least.device % granule, 0);
  EXPECT_EQ(least.host % 4096, 0);

  const Plan less_device = make_plan(layout, run.programs(), {least.device - granule, run.everything()});
  EXPECT_FALSE(less_device.fits);
  ASSERT_TRUE(less_device.obstacle.has_value());
  EXPECT_GT(less_device.obstacle->needed, 0);
  if (least.host > 0) {
    const Plan less_host = make_plan(layout, run.programs(), {least.device, least.host - 4096});
    EXPECT_FALSE(less_host.fits);
    ASSERT_TRUE(less_host.obstacle.has_value());
  }

  // A run that sees every program, at the budgets themselves.
  const TinyResult result = run.train(6, {1, 4});
  EXPECT_EQ(result.losses.size(), 6u);
  run.expect_within_budgets();
  // The least budget is no overestimate: of the device's, every page is needed.
  EXPECT_EQ(plan.peak.device, least.device);
  EXPECT_LE(plan.peak.host, least.host);
  EXPECT_EQ(run.peak().device, plan.peak.device);
  EXPECT_LE(run.peak().host, least.host);
}

// With more room the run needs no more of it than the plan says.
TEST_P(SmallestBudgets, PeaksAreWhatThePlanSays) {
  TinySetup s = GetParam().setup;
  {
    const TinyRun least(s);
    s.room = Room::kGiven;
    s.budgets = {least.budgets().device + 100 * s.layout.device_granule, least.everything()};
  }
  TinyRun run(s);
  const Plan plan = make_plan(run.layout(), run.programs(), s.budgets);
  ASSERT_TRUE(plan.fits);
  (void)run.train(6, {1, 4});
  EXPECT_LE(plan.peak.device, s.budgets.device);
  run.expect_within_budgets();
}

INSTANTIATE_TEST_SUITE_P(Variants, SmallestBudgets, testing::ValuesIn(cases()),
                         [](const auto& one) { return one.param.name; });

TEST(SmallestBudgetsOf, GivenDevicesNeedNoMoreHostThanSmallOnes) {
  TinySetup s;
  s.layout.drives = 1;
  const TinyRun run(s);
  const auto tight = smallest_budgets(run.layout(), run.programs(), 0);
  const auto ample = smallest_budgets(run.layout(), run.programs(), run.everything());
  ASSERT_TRUE(tight && ample);
  EXPECT_EQ(tight->device, ample->device);
  EXPECT_LE(ample->host, tight->host);
  EXPECT_TRUE(make_plan(run.layout(), run.programs(), {run.everything(), ample->host}).fits);
}

TEST(SmallestBudgetsOf, FewerBytesThanARunThatMayNotSinkNeedsAreTheWholeOfIt) {
  TinySetup s;
  s.layout.weights = s.layout.optimizer = OffloadTarget::kHost;
  const TinyRun run(s);
  const auto least = smallest_budgets(run.layout(), run.programs(), 0);
  ASSERT_TRUE(least.has_value());
  std::int64_t state = 0;
  for (const auto& u : run.layout().tiles) {
    for (const TensorId id : {u.weight, u.state}) {
      const Tensor& t = run.layout().table.tensor(id);
      for (std::int32_t i = 0; i < t.segments; ++i)
        state += run.layout().table.segment(t.first_segment + i).charge;
    }
  }
  EXPECT_GE(least->host + least->device, state);
}

TEST(BoundOf, IsTheSlowestLink) {
  Roofs r;
  r.flops = 1e9;
  r.host_to_device = 2e9, r.device_to_host = 1e9;
  r.nvme_read = 4e8, r.nvme_write = 2e8;
  const LinkBytes t{1'000'000'000, 250'000'000, 400'000'000, 100'000'000};
  const Bound half = bound_of(r, 1e9, t);
  EXPECT_DOUBLE_EQ(half.compute, 1);
  EXPECT_DOUBLE_EQ(half.nvme, 1.5);
  EXPECT_DOUBLE_EQ(half.host_to_device, 0.5);
  EXPECT_DOUBLE_EQ(half.device_to_host, 0.25);
  EXPECT_DOUBLE_EQ(half.seconds, 1.5);
  EXPECT_EQ(half.by, "nvme");
  // Each way undisturbed by the other: of 400 and 100 MB, the mixture of one to one holds 200, which take 0.5
  // s, and reads the rest.
  r.nvme_mixed = 4e8;
  EXPECT_DOUBLE_EQ(bound_of(r, 2e9, t).nvme, 0.5 + 0.75);
  r.nvme_mixed_reads = 0.8;  // the step's own mixture
  r.nvme_mixed = 5e8;
  EXPECT_DOUBLE_EQ(bound_of(r, 2e9, t).nvme, 1);
  EXPECT_EQ(bound_of(r, 2e9, t).by, "compute");
  EXPECT_DOUBLE_EQ(bound_of(r, 2e9, t).seconds, 2);
  EXPECT_EQ(bound_of(Roofs{}, 1e9, t).seconds, 0);
}

// Two tensors read at the host by one operation, one that passes it on its way to the device, one that may
// not be demoted.
TEST(ReadAhead, IsWhatTheLinksAndTheLargestOperationTake) {
  TensorTable table(1);
  const auto add = [&](const char* name, std::int64_t bytes, Tier lowest) {
    const TensorId id = table.add({.name = name, .dtype = DType::kU8, .count = bytes, .lowest = lowest});
    return table.tensor(id).first_segment;
  };
  const SegmentId a = add("a", 3 * kMiB, Tier::kNvme), b = add("b", 5 * kMiB, Tier::kNvme),
                  c = add("c", 7 * kMiB, Tier::kDevice);
  const auto program = [&](std::initializer_list<std::vector<AccessStep>> ops) {
    Program p("p");
    for (const auto& op : ops) p.add_op(op);
    p.finish(table.segment_count());
    return StepProgram{std::move(p), {}};
  };
  const AccessStep host_a{a, Tier::kHost, Access::kRead, false},
      host_b{b, Tier::kHost, Access::kWrite, false}, device_b{b, Tier::kDevice, Access::kRead, false},
      device_c{c, Tier::kDevice, Access::kRead, false};
  const TinyRun run(TinySetup{});
  StepPrograms programs(run.layout(), UpdateTiming::kDeferred);
  programs.first = programs.flush = programs.evaluate = program({{device_c}});
  programs.step = program({{host_a}, {host_a, host_b}, {device_b, device_c}});
  const Budgets in_flight{kMiB, 2 * kMiB};
  Budgets ahead = read_ahead_of(table, programs, {kGiB, kGiB}, in_flight);
  EXPECT_EQ(ahead.device, (1 + 5 + 7) * kMiB);
  EXPECT_EQ(ahead.host, (2 + 3 + 5) * kMiB);
  programs.step = program({{host_a}, {device_b, device_c}});
  ahead = read_ahead_of(table, programs, {kGiB, kGiB}, in_flight);
  EXPECT_EQ(ahead.host, (2 + 5) * kMiB) << "b passes the host";
  ahead = read_ahead_of(table, programs, {kGiB, kGiB, true}, in_flight);
  EXPECT_EQ(ahead.host, (2 + 3) * kMiB) << "b goes past it";
  ahead = read_ahead_of(table, programs, {16 * kMiB, 8 * kMiB}, in_flight);
  EXPECT_EQ(ahead.device, 4 * kMiB);
  EXPECT_EQ(ahead.host, 2 * kMiB);
}

TEST(NvmeSeconds, UseTheMixtureAndWhatIsLeftOneWay) {
  Roofs r{.nvme_read = 4e9, .nvme_write = 2e9};
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 8'000'000'000, 2'000'000'000, 0), 3) << "half duplex: one after the other";
  r.nvme_mixed = 4e9;
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 8'000'000'000, 2'000'000'000, 0), 1 + 1.5);
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 2'000'000'000, 8'000'000'000, 0), 1 + 3);
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 8'000'000'000, 0, 0), 2);
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 0, 8'000'000'000, 0), 4);
  r.nvme_first_write = 1e9;
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 0, 8'000'000'000, 1'000'000'000), 4 + 0.5);
  r.nvme_first_write = 3e9;
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 0, 8'000'000'000, 1'000'000'000), 4) << "no faster than other writes";
  EXPECT_EQ(nvme_seconds({}, 1, 1, 1), 0);
}

// A mixture faster than its parts are possible (measured under other conditions) hides neither of them.
TEST(NvmeSeconds, AreNoLessThanEachWayAlone) {
  const Roofs r{.nvme_read = 1e9, .nvme_write = 1e9, .nvme_mixed = 1e10};
  EXPECT_DOUBLE_EQ(nvme_seconds(r, 1'000'000'000, 1'000'000'000, 0), 1);
}

TEST(RaiseTo, MeetsTheStepThatWasFaster) {
  Roofs r{.flops = 1e9,
          .host_to_device = 1e9,
          .device_to_host = 1e9,
          .nvme_read = 2e9,
          .nvme_write = 1e9,
          .nvme_mixed = 1e9,
          .nvme_mixed_reads = 0.25,
          .nvme_first_write = 5e8};
  const LinkBytes t{500'000'000, 500'000'000, 3'000'000'000, 4'000'000'000};
  EXPECT_FALSE(raise_to(r, bound_of(r, 1e8, t, 1'000'000), 10));
  EXPECT_EQ(r.nvme_read, 2e9);
  ASSERT_TRUE(raise_to(r, bound_of(r, 1e8, t, 1'000'000), 2));
  const Bound raised = bound_of(r, 1e8, t, 1'000'000);
  EXPECT_NEAR(raised.nvme, 2, 1e-12);
  EXPECT_NEAR(raised.seconds, 2, 1e-12);
  EXPECT_EQ(r.flops, 1e9) << "its time is within the step";
  EXPECT_EQ(r.host_to_device, 1e9);
  EXPECT_NEAR(r.nvme_read / r.nvme_write, 2, 1e-12);
  ASSERT_TRUE(raise_to(r, bound_of(r, 1e8, t, 0), 0.25));
  EXPECT_NEAR(r.host_to_device, 2e9, 1);
}

}  // namespace
}  // namespace zg::test
