#include "ziggurat/train/record_trace.hpp"

#include <algorithm>
#include <array>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

[[noreturn]] void too_long(std::int64_t steps) {
  throw Error(Errc::kUsage, "--steps",
              fmt::format("found {}, which run programs more than {} times, expected at most that", steps,
                          kMostTraceRuns),
              "record fewer steps: those of a long run are alike");
}

}  // namespace

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
  if (steps > kMostTraceRuns) too_long(steps);
  const auto known = programs.all();
  std::array<std::int32_t, known.size()>
      numbers;  // each program's number in the trace, in the order of all(); -1: it does not run
  numbers.fill(-1);
  std::vector<std::size_t> ran;  // indices into all()
  for (const auto& [activity, times] : plan.history(steps)) {
    for (std::int64_t i = 0; i < times; ++i) {
      sequence.begin(activity);
      while (const auto start = sequence.next()) {
        const auto found = std::find(known.begin(), known.end(), start->program);
        ZG_ASSERT(found != known.end(), "a program that StepPrograms::all() does not name");
        ran.push_back(static_cast<std::size_t>(found - known.begin()));
        numbers[ran.back()] = 0;
      }
      if (static_cast<std::int64_t>(ran.size()) > kMostTraceRuns) too_long(steps);
    }
  }
  for (std::size_t p = 0; p < known.size(); ++p) {
    if (numbers[p] < 0) continue;
    numbers[p] = static_cast<std::int32_t>(trace.programs.size());
    trace.programs.push_back(known[p]->program);
  }
  for (const std::size_t p : ran) trace.sequence.push_back(numbers[p]);
  return trace;
}

}  // namespace zg
