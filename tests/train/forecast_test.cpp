// Forecasts on paper against the plans of runs, their formulas, and rates that are all alike.
#include "ziggurat/train/forecast.hpp"

#include <nlohmann/json.hpp>

#include "config/config_fixture.hpp"
#include "support/places.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

class ForecastTest : public ConfigTest {
 protected:
  RunConfig load_usual(const std::string& model, const MachineFile& machine,
                       std::vector<std::string> overrides = {}) {
    write("usual.json", usual_run(model_path(model), machine));
    return load_config({{directory_ + "/usual.json"}, std::move(overrides)}, facts_of(machine));
  }
  static std::string model_path(const std::string& model) {
    return test::in_source("tests/reference/configs/") + model + ".json";
  }
};

// All rates of the machine times a power of two.
MachineFile faster(const MachineFile& m) {
  return what_if(m, "compute*4,dram*4,pcie*4,nvme*4,nvlink*4");
}

TEST_F(ForecastTest, SaysOfEveryRankWhatItsPlanSays) {
  const MachineFile machine = find_machine("h100-8");
  for (const char* stages : {"1", "4"}) {
    const RunConfig run =
        load_usual("llama-3.1-8b", machine,
             {"parallel.pipeline=" + std::string(stages), "tiers.host=40GiB", "tiers.device=12GiB"});
    const ModelConfig model = model_on_paper(run);
    const Forecast f = make_forecast(run, model, machine, {.sensitivities = false});
    ASSERT_TRUE(f.fits) << f.missing;
    EXPECT_EQ(f.rank_count(), 8);
    EXPECT_NEAR(f.parameters / 1e9, 8.03, 0.01);
    const Hardware hardware = hardware_on_paper(run, machine);
    for (const RankForecast& r : f.ranks) {
      // Ranks of one stage make the choices of rank 0; with stages all agree on them.
      const RunPlan plan = make_run_plan(run, model, 0, hardware, r.first, RankChoices{.gather_ahead = 0});
      const RunPlan ahead = make_run_plan(run, model, 0, hardware, r.first, RankChoices{.gather_ahead = 1});
      const auto same = [&](const RunPlan& p) {
        return p.dry_run.per_step.of == r.per_step.of && p.dry_run.peak.host == r.peak.host &&
               p.dry_run.peak.device + p.layout->workspace_bytes() == r.peak.device;
      };
      EXPECT_TRUE(same(plan) || same(ahead)) << "rank " << r.first;
      EXPECT_GT(r.per_step.nvme_read(), 0);
      for (const StepTime& t : r.times) {
        EXPECT_GE(t.seconds, t.bound);
        EXPECT_LE(t.seconds, t.sum);
      }
    }
    EXPECT_GE(f.step_seconds[0], f.step_seconds[1]);
    EXPECT_GE(f.step_seconds[1], f.step_seconds[2]);
  }
}

TEST_F(ForecastTest, ProductsOfOperationsAreThoseOfTheFormula) {
  const MachineFile machine = find_machine("h100-8");
  for (const char* name : {"llama-3.1-8b", "qwen3-30b-a3b"}) {
    for (const char* recompute : {"true", "false"}) {
      SCOPED_TRACE(name);
      const RunConfig run =
          load_usual(name, machine, {std::string("activation_checkpointing.recompute=") + recompute});
      const RunPlan plan = make_run_plan(run, model_on_paper(run), 0, hardware_on_paper(run, machine), 0);
      double flops = 0;
      for (const double one : op_flops(*plan.layout, plan.programs->step)) flops += one;
      EXPECT_NEAR(8 * flops / plan.flops_per_step(), 1, 1e-9);
    }
  }
}

TEST_F(ForecastTest, AMachineThatIsFasterInAllTakesThatMuchLess) {
  const MachineFile machine = find_machine("h100-8");
  const RunConfig run = load_usual("llama-3.1-8b", machine, {"tiers.host=40GiB", "tiers.device=12GiB"});
  const ModelConfig model = model_on_paper(run);
  const RunPlan plan = make_run_plan(run, model, 0, hardware_on_paper(run, machine), 0);
  const StepTimer timer(*plan.layout, *plan.programs,
                        {.resident = plan.resident, .memory = plan.budgets, .prefetch_depth = 32});
  RankRates rates = rates_of(machine, 8, 8, Outlook::kExpected),
            quick = rates_of(faster(machine), 8, 8, Outlook::kExpected);
  // GPUs' memory has no --what-if, and calls take a time that no rate shortens.
  quick.device_memory *= 4, quick.call_seconds /= 4;
  EXPECT_DOUBLE_EQ(4 * timer.time(quick).seconds, timer.time(rates).seconds);
  // The drives bind this run, so half of them take longer, and none of the other rates matters as much.
  const double seconds = timer.time(rates).seconds;
  rates.drive_read /= 2, rates.drive_write /= 2;
  EXPECT_GT(timer.time(rates).seconds, 1.2 * seconds);
}

TEST_F(ForecastTest, ImpossibleWishesAreRefused) {
  const MachineFile machine = find_machine("h100-1");
  const RunConfig eight = load_usual("llama-3.1-8b", find_machine("h100-8"));
  const ModelConfig model = model_on_paper(eight);
  Error error = test::error_of([&] { return make_forecast(eight, model, machine); });
  EXPECT_EQ(error.where(), "devices");
  EXPECT_HAS(error.message(), "names 8 GPUs");
  const RunConfig one = load_usual("llama-3.1-8b", machine);
  error = test::error_of([&] { return make_forecast(one, model, what_if(machine, "nvme=2")); });
  EXPECT_EQ(error.where(), "tiers.nvme");
  const RunConfig host = load_usual("llama-3.1-8b", machine, {"devices=host"});
  EXPECT_HAS(test::error_of([&] { return make_forecast(host, model, machine); }).hint(), "host.products");
}

}  // namespace
}  // namespace zg
