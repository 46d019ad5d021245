// The outputs of a run for people and programs: log, progress line, report.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "ziggurat/train/trainer.hpp"

namespace zg {

// Cuts log.jsonl behind the record of a step, at once or not at all, and returns how many records it has
// then. A record that was written only in part is cut off, too. The last record loses its val_loss unless
// `evaluated`: a run that ends there evaluates, one that goes on does not. Throws Error(kIo).
std::int64_t cut_log(const std::string& path, std::int64_t step, bool evaluated);

// A step as an object of JSON, as log.jsonl has it.
std::string step_json(const StepRecord& record);

// Writes log.jsonl, one JSON object for each step; docs/report.md has the schema. Each line is written at
// once, so a run that is killed keeps its log; before a checkpoint all lines are brought to the drive. A full
// disk does not end the training: records wait in memory, are written with the next one that can be, and a
// warning says so. The file has whole lines alone.
class StepLog final : public TrainObserver {
 public:
  // Replaces the file, or goes on behind the records of the steps that were done. Throws Error(kIo).
  explicit StepLog(const std::string& path, std::int64_t steps_done = 0);
  ~StepLog() override;  // says which records are lost, if any
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;
  void on_step(const StepRecord& record) override;
  void on_checkpoint(std::int64_t step) override;
  // At the end of a run: records that still find no room here go to DIRECTORY/log.jsonl, and the log says so.
  void write_rest_to(const std::string& directory);

 private:
  int write_waiting();                                                // 0, or an errno
  static constexpr std::size_t kMostWaiting = std::size_t{64} << 20;  // bytes
  const std::string path_;
  int fd_ = -1;
  std::int64_t end_ = 0;      // of the whole lines in the file
  std::string waiting_;       // lines that could not be written yet
  std::int64_t since_ = 0;    // step of the first of them; 0: there is none
  std::int64_t dropped_ = 0;  // records that did not fit into memory either
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
