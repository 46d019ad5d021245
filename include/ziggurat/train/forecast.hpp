// What a run would need and how fast it would be on a machine that is described by a file. Made with the
// run's own plan (make_run_plan), without its data, its weights or the machine.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/plan/machine_file.hpp"
#include "ziggurat/plan/timed_step.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// The model of a run that need not be trained here. Where model.from names a file, that is the config.json.
// Throws Error(kUsage) as model_of() does, and for a model that is to be quantised first or whose vocabulary
// only the data tell.
ModelConfig model_on_paper(const RunConfig& config);

// The facts that resolve "auto" in a configuration, and what a plan must know, of a machine on paper.
Machine facts_of(const MachineFile& machine);
// The scratch of GPU ops as our own kernels need it (cuDNN's attention may take another amount).
const OpSizes& gpu_sizes_on_paper();
// Throws Error(kUsage) where the configuration names GPUs or drives that the machine does not have.
Hardware hardware_on_paper(const RunConfig& config, const MachineFile& machine);

// Ranks that do the same: they have the same plan, and are counted `ranks` times.
struct RankForecast {
  int first = 0, ranks = 1;
  Budgets budgets, peak;  // bytes; the device's with its workspace
  std::int64_t nvme = 0;  // bytes
  LinkBytes per_step;
  CommTraffics comm;
  std::array<StepTime, 3> times;  // by Outlook
  const StepTime& expected() const { return times[static_cast<std::size_t>(Outlook::kExpected)]; }
};

// Changes of the configuration with which a run fits.
struct FitSearch {
  bool made = false;                 // false: nobody searched
  std::vector<std::string> changes;  // as --set takes them; empty: none was found
  int tries = 0;                     // plans that were made
  bool gave_up = false;              // a limit ended the search before all changes were tried
};
// Limits are counts and not seconds, so that every machine gives the same answer.
struct FitLimits {
  int tries = 16;               // plans
  std::int64_t units = 48'000;  // of all these plans: layers, experts and tables of their model, which a plan
                                // takes as long as there are many
};

struct Forecast {
  bool fits = false;
  std::string missing, hint;  // where it does not fit: what is missing where, and what would mend it
  FitSearch search;           // for the fewest changes with which it fits
  std::string model, machine, caution;  // caution: what the plan leaves out, if anything
  int drives = 0;                       // that the run uses
  double parameters = 0, trained = 0;
  double tokens_per_step = 0, flops_per_step = 0, bubble = 0;
  std::vector<RankForecast> ranks;
  int rank_count() const;
  // Seconds of a step, of the slowest rank, with the waits for other stages; by Outlook.
  std::array<double, 3> step_seconds{};
  double expected() const { return step_seconds[static_cast<std::size_t>(Outlook::kExpected)]; }
  double bound_seconds = 0;
  std::string bound_by;
  struct Sensitivity {
    std::string change;  // as --what-if takes it
    double seconds = 0;  // of a step
  };
  std::vector<Sensitivity> sensitivities;  // the most helpful first
  std::optional<double> price_per_hour;    // USD
  std::optional<double> drive_usd;         // of the drives' price, that a step wears off
  std::optional<double> drive_years;       // of steps without a pause, until the drives' endurance is used up
  std::string text(double tokens) const;   // for people; tokens: to train on, 0: not asked
  std::string json(double tokens) const;
};

// Whether the path is a model (a directory, or a config.json) and no run's configuration.
bool is_model(const std::string& path);
// The text of a usual configuration for a model alone: all of its parameters are trained in bf16, with all
// that the machine has. Throws Error(kUsage) for a model that cannot be read.
std::string usual_run(const std::string& model, const MachineFile& machine);

struct ForecastOptions {
  bool sensitivities = true;
  const Hardware* hardware = nullptr;  // of this machine, as train finds it; null: the one on paper
};

// Throws Error(kUsage) for a run that makes no sense on the machine. A run that does not fit is no error.
Forecast make_forecast(const RunConfig& config, const ModelConfig& model, const MachineFile& machine,
                       const ForecastOptions& options = {});

// What train would find on this machine if it were changed from `before` to `after` (what_if()): more or less
// memory, and other drives. `before` has as many GPUs as `after`.
Hardware changed_hardware(Hardware hardware, const MachineFile& before, const MachineFile& after);
// A run that names drives gains or loses as many as the machine does.
void change_drives(RunConfig& config, const MachineFile& before, const MachineFile& after);

using Reload = std::function<RunConfig(const std::vector<std::string>& overrides)>;
// Tries changes of a run that does not fit, one at a time and then two, until it fits. Changes with which the
// optimizer state alone is larger than all memory and drives cost no plan. `trained`: its parameters.
// `load`: the configuration with these overrides. `here`: as ForecastOptions::hardware.
FitSearch changes_that_fit(const RunConfig& config, const ModelConfig& model, const MachineFile& machine,
                           double trained, const Reload& load, const Hardware* here = nullptr,
                           const FitLimits& limits = {});

}  // namespace zg
