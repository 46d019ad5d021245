#include "ziggurat/step/program_sequence.hpp"

#include "ziggurat/base/error.hpp"

namespace zg {

void ProgramSequence::begin(Activity activity) {
  activity_ = activity;
  main_done_ = false;
}

ProgramStart ProgramSequence::start(const StepProgram& program, const StepProgram* next) {
  announced_ = next;
  return {&program, next};
}

std::optional<ProgramStart> ProgramSequence::next() {
  const StepPrograms& p = *programs_;
  // With deferred updates, a step's program contains the updates of the step before, unless it was announced
  // that they run as a program of their own.
  const bool rides_along =
      is_step() && p.timing == UpdateTiming::kDeferred && (main_done_ || announced_ == &p.step);
  if (pending_ && !rides_along) {
    pending_ = false;
    const bool first_follows = is_step() && (!main_done_ || activity_ == Activity::kStep);
    if (is_flush()) main_done_ = true;
    return start(p.flush, first_follows ? &p.first : nullptr);
  }
  if (main_done_ || is_flush()) {
    main_done_ = true;
    return std::nullopt;
  }
  main_done_ = true;
  switch (activity_) {
    case Activity::kInitialize:
      return start(p.initialize, nullptr);
    case Activity::kAdopt:
      return start(p.adopt, nullptr);
    case Activity::kEvaluate:
      return start(p.evaluate, nullptr);
    case Activity::kEvaluateMore:
      return start(p.evaluate, &p.evaluate);
    case Activity::kSave:
      return start(p.save, nullptr);
    case Activity::kStep:
    case Activity::kStepThenPause:
    case Activity::kFlush:
    case Activity::kPin:
      break;
  }
  const bool another = activity_ == Activity::kStep;
  if (p.timing == UpdateTiming::kEarly) return start(p.step, another ? &p.step : nullptr);
  const StepProgram& program = pending_ ? p.step : p.first;
  pending_ = true;
  return start(program, another && p.timing == UpdateTiming::kDeferred ? &p.step : &p.flush);
}

std::vector<Activity> ProgramSequence::followers() const {
  ZG_ASSERT(main_done_, "an activity is under way");
  if (announced_ == &programs_->step || announced_ == &programs_->first)
    return {Activity::kStep, Activity::kStepThenPause};
  std::vector<Activity> all{Activity::kStep, Activity::kStepThenPause, Activity::kEvaluate};
  if (programs_->save.program.op_count() > 0) all.push_back(Activity::kSave);
  if (programs_->pins) all.push_back(Activity::kPin);
  return all;
}

void note(History& history, Activity activity) {
  if (history.empty() || history.back().activity != activity) history.push_back({activity, 0});
  ++history.back().times;
}

}  // namespace zg
