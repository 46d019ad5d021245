// The training loop: steps, evaluation, progress, metrics, the final report.
#pragma once
#include <string>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/config/run_config.hpp"

namespace zg {

struct TrainOptions {
  std::string trace_file;  // Chrome trace of the whole run; empty: none
  // Watches the run from when it opens its drives, and has its dumps in output.dir/state.txt. May be null.
  Watchdog* watchdog = nullptr;
  enum class Mode { kTrain, kPlanOnly } mode = Mode::kTrain;
};

// Runs to the end, or to the end of the step after an interruption, and leaves in the output directory
// log.jsonl, config.json (as resolved) and model/. Prints the report to stdout. Returns the process's exit
// code.
int train(const RunConfig& config, const TrainOptions& options);

}  // namespace zg
