// The order in which the programs of a run follow each other. The engine runs this order, the plan dry-runs
// all orders that are possible, a recorded trace and the forecast repeat it.
//
// A run is a series of activities. An activity consists of one or more programs; next() names them one after
// another, each with the program that is announced to follow it, if that one is certain. The deferred updates
// of a step are part of the next step's program, or run as a program of their own where something else
// follows.
//
// Copies are independent of each other. Not thread-safe.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ziggurat/step/step_program.hpp"

namespace zg {

enum class Activity : std::uint8_t {
  kInitialize,     // once, first
  kAdopt,          // the same, of a run whose state lies on NVMe already
  kStep,           // a training step; another step is certain to follow
  kStepThenPause,  // a training step; anything may follow
  kFlush,          // the deferred updates, if any wait: before weights or state are read
  kEvaluate,       // one group of micro-batches, after the deferred updates, if any wait
  kEvaluateMore,   // the same; another evaluation is certain to follow
  kSave,           // weights and state are read for a checkpoint, after the deferred updates, if any wait
  kPin,            // state that NVMe lacks is written there for a checkpoint, after the deferred updates
};

enum class Then { kTrain, kPause };  // what follows a step: certainly another step, or anything

struct ProgramStart {
  bool operator==(const ProgramStart&) const = default;
  const StepProgram* program = nullptr;
  const StepProgram* next = nullptr;  // null: not known
};

class ProgramSequence {
 public:
  // `programs` outlives it.
  explicit ProgramSequence(const StepPrograms& programs) : programs_(&programs) {}

  // Begins an activity, and ends the one before, which may have failed. After kStep only a step may begin,
  // after kEvaluateMore only an evaluation.
  void begin(Activity activity);
  // The activity's next program, which is assumed to run; nothing at the activity's end.
  std::optional<ProgramStart> next();

  // Whether gradients wait for a deferred update.
  bool pending() const { return pending_; }
  // The activities that may begin now, without those that differ in nothing that the store sees.
  std::vector<Activity> followers() const;
  // Equal sequences have the same future.
  bool operator==(const ProgramSequence&) const = default;
  auto operator<=>(const ProgramSequence&) const = default;

 private:
  ProgramStart start(const StepProgram& program, const StepProgram* next);
  bool is_flush() const { return activity_ == Activity::kFlush || activity_ == Activity::kPin; }
  bool is_step() const { return activity_ == Activity::kStep || activity_ == Activity::kStepThenPause; }

  const StepPrograms* programs_;
  Activity activity_ = Activity::kInitialize;
  bool main_done_ = true;  // the activity's own program, after a flush that may precede it, has been named
  bool pending_ = false;
  const StepProgram* announced_ = nullptr;
};

// The activities of a run in order, run-length encoded.
struct ActivityRun {
  Activity activity = Activity::kStep;
  std::int64_t times = 0;  // in succession
};
using History = std::vector<ActivityRun>;
void note(History& history, Activity activity);

}  // namespace zg
