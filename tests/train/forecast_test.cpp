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
    return load_model(model_path(model), machine, std::move(overrides));
  }
  // The same of a model with other sizes, which a plan takes less time for.
  RunConfig load_smaller(const std::string& model, const nlohmann::json& sizes, const MachineFile& machine,
                         std::vector<std::string> overrides = {}) {
    nlohmann::json config = nlohmann::json::parse(test::read_file(model_path(model)));
    config.update(sizes);
    return load_model(write("smaller.json", config.dump()), machine, std::move(overrides));
  }
  RunConfig load_model(const std::string& path, const MachineFile& machine,
                       std::vector<std::string> overrides) {
    write("usual.json", usual_run(path, machine));
    return load_config({{directory_ + "/usual.json"}, std::move(overrides)}, facts_of(machine));
  }
  static std::string model_path(const std::string& model) {
    return test::in_source("tests/reference/configs/") + model + ".json";
  }
};

// Llama 3.1 with an eighth of the layers, and Qwen3 with few experts.
const nlohmann::json kFewLayers = {{"num_hidden_layers", 4}};
const nlohmann::json kFewExperts = {{"num_hidden_layers", 3}, {"num_experts", 16}};

// All rates of the machine times a power of two.
MachineFile faster(const MachineFile& m) {
  return what_if(m, "compute*4,dram*4,pcie*4,nvme*4,nvlink*4");
}

TEST_F(ForecastTest, SaysOfEveryRankWhatItsPlanSays) {
  const MachineFile machine = find_machine("h100-8");
  for (const char* stages : {"1", "4"}) {
    const RunConfig run =
        load_smaller("llama-3.1-8b", kFewLayers, machine,
                     {"parallel.pipeline=" + std::string(stages), "tiers.host=8GiB", "tiers.device=8GiB"});
    const ModelConfig model = model_on_paper(run);
    const Forecast f = make_forecast(run, model, machine, {.sensitivities = false});
    ASSERT_TRUE(f.fits) << f.missing;
    EXPECT_EQ(f.rank_count(), 8);
    EXPECT_NEAR(f.parameters / 1e9, 8.03 - 28 * 0.218, 0.01);
    const Hardware hardware = hardware_on_paper(run, machine);
    std::int64_t read = 0;
    for (const RankForecast& r : f.ranks) {
      // Ranks of one stage make the choices of rank 0; with stages all agree on them.
      const RunPlan plan = make_run_plan(run, model, 0, hardware, r.first, RankChoices{.gather_ahead = 0});
      const RunPlan ahead = make_run_plan(run, model, 0, hardware, r.first, RankChoices{.gather_ahead = 1});
      const auto same = [&](const RunPlan& p) {
        return p.dry_run.per_step.of == r.per_step.of && p.dry_run.peak.host == r.peak.host &&
               p.dry_run.peak.device + p.layout->workspace_bytes() == r.peak.device;
      };
      EXPECT_TRUE(same(plan) || same(ahead)) << "rank " << r.first;
      read += r.per_step.nvme_read();
      for (const StepTime& t : r.times) {
        // Some of a step's reads are issued in the step before it, so the clock may show a little less.
        EXPECT_GE(t.between_ends, 0.99 * t.bound);
        EXPECT_LE(t.between_ends, t.sum);
        EXPECT_LT(t.bound, t.sum);
        EXPECT_GE(t.seconds, t.bound);
        EXPECT_GE(t.seconds, t.between_ends);
        EXPECT_LE(t.seconds, t.sum);
      }
      EXPECT_GT(r.times[0].between_ends, r.times[1].between_ends);
      EXPECT_GT(r.times[1].between_ends, r.times[2].between_ends);
    }
    EXPECT_GT(read, 0);
  }
}

TEST_F(ForecastTest, ProductsOfOperationsAreThoseOfTheFormula) {
  const MachineFile machine = find_machine("h100-8");
  for (const auto& [name, sizes] : {std::pair{"llama-3.1-8b", kFewLayers}, {"qwen3-30b-a3b", kFewExperts}}) {
    for (const char* recompute : {"true", "false"}) {
      SCOPED_TRACE(name);
      const RunConfig run = load_smaller(name, sizes, machine,
                                         {std::string("activation_checkpointing.recompute=") + recompute});
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

TEST_F(ForecastTest, EachPartTakesItsBytesAtItsRate) {
  const MachineFile machine = find_machine("h100-8");
  const RunConfig run = load_usual("llama-3.1-8b", machine, {"tiers.host=40GiB", "tiers.device=12GiB"});
  const RunPlan plan = make_run_plan(run, model_on_paper(run), 0, hardware_on_paper(run, machine), 0);
  const StepTimer timer(*plan.layout, *plan.programs,
                        {.resident = plan.resident, .memory = plan.budgets, .prefetch_depth = 32});
  const LinkBytes& bytes = plan.dry_run.per_step;
  const auto read = static_cast<double>(bytes.nvme_read()), write = static_cast<double>(bytes.nvme_write());
  ASSERT_TRUE(read > 0 && write > 0);
  RankRates rates = rates_of(machine, 8, 8, Outlook::kExpected);
  // Drives that take turns, drives that read and write at once, and some in between.
  rates.drive_read = 4e9, rates.drive_write = 2e9, rates.drive_mixed = 0;
  EXPECT_NEAR(timer.time(rates)[TimedPart::kDrives], read / 4e9 + write / 2e9, 1e-6);
  rates.drive_write = 4e9, rates.drive_mixed = 8e9;
  EXPECT_NEAR(timer.time(rates)[TimedPart::kDrives], std::max(read, write) / 4e9, 1e-6);
  rates.drive_mixed = 6e9;
  const double more = std::max(read, write), less = std::min(read, write);
  EXPECT_NEAR(timer.time(rates)[TimedPart::kDrives], more / 4e9 + less * (1 / 3e9 - 1 / 4e9), 1e-6);
  // A part that is far slower than all others decides the step.
  const auto slow = [&](double RankRates::*rate, TimedPart part, Link link) {
    RankRates one = rates_of(machine, 8, 8, Outlook::kExpected);
    one.*rate /= 100;
    const StepTime t = timer.time(one);
    EXPECT_NEAR(t[part], static_cast<double>(bytes[link]) / (one.*rate), 1e-6) << name_of(part);
    EXPECT_EQ(t.bound_by, part) << name_of(part);
    EXPECT_GE(t.between_ends, 0.99 * t.bound) << name_of(part);
    EXPECT_LE(t.between_ends, t.sum) << name_of(part);
  };
  slow(&RankRates::to_device, TimedPart::kToDevice, kToDevice);
  slow(&RankRates::to_host, TimedPart::kToHost, kToHost);
}

// A machine of a processor and two drives, for a model of 120,000 parameters.
MachineFile small_machine(double bytes) {
  MachineFile m;
  const auto figure = [](double value, const char* unit) {
    return Figure{.value = value, .unit = unit, .source = "a test"};
  };
  m.name = "small";
  m.host.memory = figure(bytes, "B"), m.host.memory_rate = figure(1e10, "B/s");
  m.host.products = figure(1e10, "FLOP/s");
  m.drives = MachineFile::Drives{.count = 2,
                                 .bytes = figure(1e9, "B"),
                                 .read = figure(1e9, "B/s"),
                                 .write = figure(1e9, "B/s"),
                                 .mixed = {},
                                 .endurance = {},
                                 .price = {}};
  return m;
}

TEST_F(ForecastTest, ChangesThatAreFoundMakeTheRunFitAndNoneIsTooMany) {
  std::set<std::size_t> sizes;
  for (const double memory : {2.2e6, 3e6, 100e6}) {
    // Drives of 1.2 MB hold what the run puts there only if its state is small.
    for (const double drives : {1e9, 1.2e6, 0.0}) {
      MachineFile machine = small_machine(memory);
      machine.drives->bytes.value = drives;
      if (drives == 0) machine.drives.reset();
      const Reload load = [&](const std::vector<std::string>& more) {
        std::vector<std::string> all = {"data.tokenizer=bytes", "tiers.device=900KiB", "tiers.host=900KiB"};
        all.insert(all.end(), more.begin(), more.end());
        return load_config({{base_}, all}, facts_of(machine));
      };
      const auto fits = [&](const std::vector<std::string>& more) {
        const RunConfig run = load(more);
        return make_forecast(run, model_on_paper(run), machine, {.sensitivities = false}).fits;
      };
      const RunConfig run = load({});
      ASSERT_FALSE(fits({}));
      const FitSearch search = changes_that_fit(run, model_on_paper(run), machine, 120'000, load);
      EXPECT_FALSE(search.gave_up);
      EXPECT_LE(search.tries, FitLimits{}.tries);
      sizes.insert(search.changes.size());
      EXPECT_EQ(fits(search.changes), !search.changes.empty());
      if (search.changes.size() == 2) {
        for (const std::string& one : search.changes) EXPECT_FALSE(fits({one})) << one;
      }
    }
  }
  EXPECT_TRUE(sizes.contains(0) && sizes.contains(1)) << "the cases differ in the number of changes";
}

TEST_F(ForecastTest, TheSearchForChangesEndsAfterItsPlans) {
  MachineFile machine = small_machine(2.2e6);
  machine.drives.reset();
  const Reload load = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"data.tokenizer=bytes", "tiers.device=16KiB", "tiers.host=16KiB"};
    all.insert(all.end(), more.begin(), more.end());
    return load_config({{base_}, all}, facts_of(machine));
  };
  const RunConfig run = load({});
  const ModelConfig model = model_on_paper(run);
  const auto search = [&](const FitLimits& limits) {
    return changes_that_fit(run, model, machine, 120'000, load, nullptr, limits);
  };
  const FitSearch two = search({.tries = 2});
  EXPECT_TRUE(two.gave_up);
  EXPECT_TRUE(two.changes.empty());
  EXPECT_EQ(two.tries, 2);
  // The embedding, two layers and the head are four units.
  EXPECT_EQ(search({.units = 3 * 4}).tries, 3);
  EXPECT_EQ(search({.units = 3 * 4 + 3}).tries, 3);
  EXPECT_EQ(search({.units = 3}).tries, 0);
  EXPECT_TRUE(search({.units = 3}).gave_up);
  // State that no part of the machine could hold costs no plan.
  const FitSearch never = changes_that_fit(run, model, machine, 1e12, load);
  EXPECT_EQ(never.tries, 0);
  EXPECT_FALSE(never.gave_up);
  EXPECT_TRUE(never.changes.empty());
}

TEST_F(ForecastTest, WhatIfChangesTheHardwareThatWasFoundOnce) {
  const MachineFile was = small_machine(64e6);
  Hardware found;
  found.memory.available = 50'000'000;
  found.drives = {{.numa_node = 0, .space = {.free_bytes = 700, .file_system = 1}},
                  {.numa_node = 0, .space = {.free_bytes = 800, .file_system = 1}}};
  const Hardware same = changed_hardware(found, was, what_if(was, "dram*2,nvme*2"));
  EXPECT_EQ(same.memory.available, 50'000'000);
  EXPECT_EQ(same.memory.cgroup.limit, MemoryLimits::kNone);
  ASSERT_EQ(same.drives.size(), 2u);
  EXPECT_EQ(same.drives[0].space.free_bytes, 700);
  const Hardware more = changed_hardware(found, was, what_if(was, "nvme+2,host+1MB"));
  EXPECT_EQ(more.memory.available, 51'000'000);
  ASSERT_EQ(more.drives.size(), 4u);
  EXPECT_EQ(more.drives[1].space.free_bytes, 800);
  EXPECT_EQ(more.drives[2].space.free_bytes, 1'000'000'000);
  EXPECT_NE(more.drives[2].space.file_system, more.drives[3].space.file_system);
  EXPECT_EQ(changed_hardware(found, was, what_if(was, "nvme-1")).drives.size(), 1u);
}

TEST_F(ForecastTest, HoursMoneyAndWearFollowFromTheStep) {
  MachineFile machine = find_machine("rtx4090-1");
  machine.drives->price = Figure{.value = 300, .unit = "USD", .source = "a test"};
  const RunConfig run = load_smaller("llama-3.1-8b", kFewLayers, machine, {"tiers.host=8GiB"});
  const Forecast f = make_forecast(run, model_on_paper(run), machine, {.sensitivities = false});
  ASSERT_TRUE(f.fits) << f.missing;
  const auto said = nlohmann::json::parse(f.json(1e9));
  const double seconds = said.at("step_seconds");
  EXPECT_DOUBLE_EQ(said.at("hours").get<double>(), 1e9 / (8 * 4096) * seconds / 3600);
  EXPECT_DOUBLE_EQ(said.at("usd").get<double>(), said.at("hours").get<double>() * 0.31);
  EXPECT_DOUBLE_EQ(said.at("tokens_per_second").get<double>(), 8 * 4096 / seconds);
  EXPECT_EQ(said.at("drives"), 2);
  const double written = static_cast<double>(f.ranks.front().per_step.nvme_write());
  ASSERT_GT(written, 0);
  EXPECT_NEAR(said.at("drive_years").get<double>(), 2 * 2.4e15 / written * seconds / (365.25 * 86400), 1e-9);
  // A drive of 300 USD takes 2.4 PB.
  EXPECT_NEAR(said.at("drive_usd").get<double>(), 1e9 / (8 * 4096) * written / 2.4e15 * 300, 1e-6);
  // What a machine file does not tell is not told.
  machine.price_per_hour.reset(), machine.drives->endurance.reset();
  const auto less = nlohmann::json::parse(
      make_forecast(run, model_on_paper(run), machine, {.sensitivities = false}).json(1e9));
  EXPECT_FALSE(less.contains("usd") || less.contains("drive_usd") || less.contains("drive_years"));
  EXPECT_DOUBLE_EQ(less.at("step_seconds").get<double>(), seconds);
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
