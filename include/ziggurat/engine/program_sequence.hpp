// Which program follows which, in one place: the engine runs what this says, the plan tries all of it on paper,
// a recorded trace and the forecast repeat it.
//
// A run is a series of activities. An activity is one program or several; next() names them one after another, each
// with the program that is announced to follow it, if that is certain. Deferred updates belong to the program of
// the step after theirs, or run alone where something else follows.
//
// Copies are independent; not thread-safe.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ziggurat/engine/step_program.hpp"

namespace zg {

enum class Activity : std::uint8_t {
  kInitialize,     // once, first
  kStep,           // a training step; another one follows for certain
  kStepThenPause,  // a training step; anything may follow
  kFlush,          // the updates that wait, if any: before anybody looks at weights or state
  kEvaluate,       // one group of micro-batches, after the updates that wait
  kEvaluateMore,   // the same, and another one follows for certain
};

enum class Then { kTrain, kPause };  // what follows a step: another one for certain, or anything

struct ProgramStart {
  bool operator==(const ProgramStart&) const = default;
  const StepProgram* program = nullptr;
  const StepProgram* next = nullptr;  // null: not known
};

class ProgramSequence {
 public:
  // `programs` outlives it.
  explicit ProgramSequence(const StepPrograms& programs) : programs_(&programs) {}

  // Ends the activity before, which may have failed. After kStep only a step may come, after kEvaluateMore an
  // evaluation.
  void begin(Activity activity);
  // The activity's next program, which is taken to run; nothing at its end.
  std::optional<ProgramStart> next();

  // Gradients wait for their update.
  bool pending() const { return pending_; }
  // What may begin now, as far as decisions about memory can tell one from the other.
  std::vector<Activity> followers() const;
  // Equal ones have the same future.
  bool operator==(const ProgramSequence&) const = default;
  auto operator<=>(const ProgramSequence&) const = default;

 private:
  ProgramStart start(const StepProgram& program, const StepProgram* next);
  bool is_step() const { return activity_ == Activity::kStep || activity_ == Activity::kStepThenPause; }

  const StepPrograms* programs_;
  Activity activity_ = Activity::kInitialize;
  bool main_done_ = true;  // of the activity's programs, the one that is not the updates of an earlier step
  bool pending_ = false;
  const StepProgram* announced_ = nullptr;
};

// What a run has done, in order; grows with the variety of what was done, not with its length.
struct ActivityRun {
  Activity activity = Activity::kStep;
  std::int64_t times = 0;  // in a row
};
using History = std::vector<ActivityRun>;
void note(History& history, Activity activity);

}  // namespace zg
