#include "ziggurat/train/record_trace.hpp"

#include <algorithm>

#include "ziggurat/engine/step_program.hpp"
#include "ziggurat/train/session.hpp"

namespace zg {
namespace {

// What the run of this configuration does in so many steps (Trainer's loop).
History history_of(const RunConfig& config, const Session& session, std::int64_t steps) {
  const std::int64_t windows =
      std::max<std::int64_t>(1, (session.data().validation_tokens() - 1) / config.data.seq_len);
  const std::int64_t batches =
      std::min(config.eval_batches, (windows + config.micro_batch - 1) / config.micro_batch);
  const std::int64_t group = session.layout().live_micro_batches();
  History history;
  for (std::int64_t step = 0; step < steps; ++step) {
    const bool last = step + 1 == steps;
    const bool evaluate = session.data().validation_tokens() > 0 &&
                          (last || (config.eval_every > 0 && (step + 1) % config.eval_every == 0));
    note(history, last || evaluate ? Activity::kStepThenPause : Activity::kStep);
    for (std::int64_t first = 0; evaluate && first < batches; first += group)
      note(history, first + group < batches ? Activity::kEvaluateMore : Activity::kEvaluate);
  }
  note(history, Activity::kFlush);
  return history;
}

}  // namespace

AccessTrace record_trace(const RunConfig& config, std::int64_t steps) {
  const Session session(config, nullptr);
  const StepPrograms& programs = session.programs();
  AccessTrace trace;
  trace.table = session.layout().table;
  trace.budgets = session.budgets();
  trace.budgets.device -= session.layout().workspace_charge();
  if (steps == 0) {  // the step of a run that is under way
    ProgramSequence sequence(programs);
    for (int i = 0; i < 2; ++i) {
      trace.programs.clear();
      sequence.begin(Activity::kStep);
      while (const auto start = sequence.next()) trace.programs.push_back(start->program->program);
    }
    for (std::size_t i = 0; i < trace.programs.size(); ++i)
      trace.sequence.push_back(static_cast<std::int32_t>(i));
    return trace;
  }
  std::vector<const StepProgram*> known{&programs.first, &programs.step, &programs.flush, &programs.evaluate};
  for (const StepProgram* program : known) trace.programs.push_back(program->program);
  ProgramSequence sequence(programs);
  for (const auto& [activity, times] : history_of(config, session, steps)) {
    for (std::int64_t i = 0; i < times; ++i) {
      sequence.begin(activity);
      while (const auto start = sequence.next()) {
        const auto found = std::find(known.begin(), known.end(), start->program);
        trace.sequence.push_back(static_cast<std::int32_t>(found - known.begin()));
      }
    }
  }
  return trace;
}

}  // namespace zg
