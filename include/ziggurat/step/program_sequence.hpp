// The order in which the programs of a run follow each other. The engine runs this order, the plan dry-runs
// all possible orders, and a recorded trace and the forecast repeat it.
//
// A run is a series of activities. An activity consists of one or more programs. next() returns them one
// after another, each with the program that follows it, if that is certain. The deferred updates of a step
// are part of the next step's program; if anything else follows, they run as a program of their own.
//
// Copies of a sequence are independent of each other. Not thread-safe.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ziggurat/step/step_program.hpp"

namespace zg {

enum class Activity : std::uint8_t {
  kInitialize,     // once, first
  kAdopt,          // once, first, instead of kInitialize if the state lies on NVMe already
  kStep,           // a training step; another step is certain to follow
  kStepThenPause,  // a training step; anything may follow
  kFlush,          // the deferred updates, if any wait: before weights or state are read
  kEvaluate,       // one group of micro-batches, after the deferred updates, if any wait
  kEvaluateMore,   // like kEvaluate; another evaluation is certain to follow
  kSave,           // weights and state are read for a checkpoint, after the deferred updates, if any wait
  kPin,            // state that NVMe lacks is written there for a checkpoint, after the deferred updates
};

enum class Then { kTrain, kPause };  // what follows a step: kTrain: certainly another step; kPause: anything

struct ProgramStart {
  bool operator==(const ProgramStart&) const = default;
  const StepProgram* program = nullptr;
  const StepProgram* next = nullptr;  // null: not certain
};

class ProgramSequence {
 public:
  // `programs` must outlive the sequence.
  explicit ProgramSequence(const StepPrograms& programs) : programs_(&programs) {}

  // Begins an activity and ends the activity before, which may have failed. After kStep only a step may
  // begin, and after kEvaluateMore only an evaluation.
  void begin(Activity activity);
  // The activity's next program, which the caller must run; empty at the activity's end.
  std::optional<ProgramStart> next();

  // Whether gradients wait for a deferred update.
  bool pending() const { return pending_; }
  // The activities that may begin next. Of activities that look the same to the store, only one is included.
  std::vector<Activity> followers() const;
  // Sequences that compare equal return the same programs from here on.
  bool operator==(const ProgramSequence&) const = default;
  auto operator<=>(const ProgramSequence&) const = default;

 private:
  ProgramStart start(const StepProgram& program, const StepProgram* next);
  bool is_flush() const { return activity_ == Activity::kFlush || activity_ == Activity::kPin; }
  bool is_step() const { return activity_ == Activity::kStep || activity_ == Activity::kStepThenPause; }

  const StepPrograms* programs_;
  Activity activity_ = Activity::kInitialize;
  bool main_done_ = true;  // next() has returned the activity's own program (not only a flush before it)
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
