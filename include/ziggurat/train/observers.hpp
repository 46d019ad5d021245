// What a run tells people and programs: its log, its progress line, its report.
#pragma once
#include <cstdio>
#include <memory>
#include <string>

#include "ziggurat/train/trainer.hpp"

namespace zg {

// log.jsonl: one JSON object a step; docs/training.md has the schema. Lines are written through: a run that
// is killed keeps what it logged.
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
  explicit ProgressLine(Trainer& trainer);  // which has been started, and outlives it
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
// "reads 4.0, write-backs 2.1, ...": of so many seconds, in percent; those that come to `least` of it.
std::string stall_text(const StallTimes& stall, double seconds, int decimals, double least);

// What a plan takes and moves, before anything is taken.
std::string plan_report(const Trainer& trainer);
// At the end of a run: peaks against budgets, bytes against the forecast, stall by cause, time against its
// bound.
std::string final_report(const RunSummary& summary, Trainer& trainer);

}  // namespace zg
