// What a run prints when it ends.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "train/metrics.hpp"
#include "ziggurat/train/session.hpp"

namespace zg {

// Median of a field over the steady steps (all but the first two, where there are more).
struct RunSummary {
  std::int64_t steps = 0;
  double seconds = 0, median_step = 0;
  double step_seconds = 0;  // of all steps
  StallTimes stall;         // of them
  double tokens_per_second = 0;
  double first_loss = 0, last_loss = 0;
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // at the end; with fp16
  std::int64_t skipped = 0;          // of the steps: left out
  Roofs roofs;                       // at the end
  bool raised = false;               // a step was faster than the roofs that were measured at first
  Traffic measured, formula;  // of the whole run, once all moves are done; and what the plan foretells for it
};

std::string final_report(const RunSummary& summary, Session& session);
// "reads 4.0, write-backs 2.1, ...": of so many seconds, in percent; those that come to `least` of it.
std::string stall_text(const StallTimes& stall, double seconds, int decimals, double least);
// "step 12/300  loss 2.345 ..." for the progress line.
std::string progress_line(const StepRecord& record, std::int64_t steps, double eta_seconds,
                          double tokens_per_second);

}  // namespace zg
