// The outputs of a run for people and programs: log, progress line, report.
#pragma once
#include <cstdio>
#include <memory>
#include <string>

#include "ziggurat/train/trainer.hpp"

namespace zg {

// Writes log.jsonl, one JSON object for each step; docs/training.md has the schema. Each line is flushed, so
// a run that is killed keeps its log.
class StepLog final : public TrainObserver {
 public:
  explicit StepLog(const std::string& path);  // replaces the file; throws Error(kIo)
  void on_step(const StepRecord& record) override;

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// The log's progress line: after each step, and about once a second while a step takes long.
class ProgressLine final : public TrainObserver {
 public:
  explicit ProgressLine(Trainer& trainer);  // the trainer has been started, and outlives this
  ~ProgressLine() override;                 // clears the line
  void on_step_begin(std::int64_t step) override;
  void on_step_computed(std::int64_t step) override;
  void on_step(const StepRecord& record) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "step 12/300  loss 2.345 ..."
std::string progress_line(const StepRecord& record, std::int64_t steps, double eta_seconds,
                          double tokens_per_second);
// "reads 4.0, write-backs 2.1, ...": in percent of `seconds`, those causes with at least `least` percent.
// Waits for other ranks only if there were any.
std::string stall_text(const StallTimes& stall, double seconds, int decimals, double least);

// Memory, traffic and bounds of a plan.
std::string plan_report(const Trainer& trainer);
// At the end of a run: peaks compared with budgets, traffic with the forecast, step time with its bound, and
// the stalls by cause.
std::string final_report(const RunSummary& summary, Trainer& trainer);

}  // namespace zg
