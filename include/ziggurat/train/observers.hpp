// The outputs of a run for users and programs: log, progress line, report.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "ziggurat/train/trainer.hpp"

namespace zg {

// Truncates log.jsonl after the record of a step, atomically, and returns the number of records that are
// left. An incomplete record is cut off, too. Unless `evaluated`, the last record loses its val_loss: a run
// that ends with that step evaluates, a run that continues does not. Throws Error(kIo).
std::int64_t cut_log(const std::string& path, std::int64_t step, bool evaluated);

// A step's record as a JSON object, in the form of log.jsonl.
std::string step_json(const StepRecord& record);

// Writes log.jsonl, one JSON object for each step; docs/report.md has the schema. Each line is written
// immediately, so a killed run keeps its log. Before a checkpoint all lines are synced to the drive. A full
// disk does not end the training: a warning is logged, and records wait in memory until they can be written.
// The file never has incomplete lines.
class StepLog final : public TrainObserver {
 public:
  // Replaces the file or, if `steps_done` is above 0, appends to the records in it. Throws Error(kIo).
  explicit StepLog(const std::string& path, std::int64_t steps_done = 0);
  ~StepLog() override;  // logs which records are lost, if any
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;
  void on_step(const StepRecord& record) override;
  void on_checkpoint(std::int64_t step) override;
  // At the end of a run: writes records that the file has no room for to DIRECTORY/log.jsonl, and logs that.
  void write_rest_to(const std::string& directory);

 private:
  int write_waiting();                                                // 0, or an errno
  static constexpr std::size_t kMostWaiting = std::size_t{64} << 20;  // bytes
  const std::string path_;
  int fd_ = -1;
  std::int64_t end_ = 0;      // offset after the last complete line in the file
  std::string waiting_;       // lines that could not be written yet
  std::int64_t since_ = 0;    // step of the first waiting line; 0: none
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
// "reads 4.0, write-backs 2.1, ...": the stall causes that took at least `least` percent, in percent of
// `seconds`. Waits for other ranks are listed only if there were any.
std::string stall_text(const StallTimes& stall, double seconds, int decimals, double least);

// Text about a plan's memory, traffic and bounds.
std::string plan_report(const Trainer& trainer);
// Text for the end of a run: compares peaks with budgets, traffic with the forecast and step time with its
// bound, and lists the stalls by cause.
std::string final_report(const RunSummary& summary, Trainer& trainer);

}  // namespace zg
