#include "ziggurat/train/record_trace.hpp"

#include <algorithm>

namespace zg {

AccessTrace record_trace(const RunPlan& plan, std::int64_t steps) {
  const StepPrograms& programs = *plan.programs;
  AccessTrace trace;
  trace.table = plan.layout->table;
  trace.budgets = plan.budgets;
  trace.budgets.device -= plan.layout->workspace_charge();
  ProgramSequence sequence(programs);
  if (steps == 0) {  // one step of the steady state
    for (int i = 0; i < 2; ++i) {
      trace.programs.clear();
      sequence.begin(Activity::kStep);
      while (const auto start = sequence.next()) trace.programs.push_back(start->program->program);
    }
    for (std::size_t i = 0; i < trace.programs.size(); ++i)
      trace.sequence.push_back(static_cast<std::int32_t>(i));
    return trace;
  }
  const std::vector<const StepProgram*> known{&programs.first, &programs.step, &programs.flush,
                                              &programs.evaluate};
  for (const StepProgram* program : known) trace.programs.push_back(program->program);
  for (const auto& [activity, times] : plan.history(steps)) {
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
