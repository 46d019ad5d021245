// The accesses of a training run as a trace, from its plan: no device, no drive, no step taken.
#pragma once
#include <cstdint>

#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// steps 0: one step of the steady state, which a replay repeats. Else as many steps as given, from the first,
// with the evaluations that the configuration asks for between them and at the end. The trace's budgets are
// those of the run, without the workspace.
AccessTrace record_trace(const RunPlan& plan, std::int64_t steps);

}  // namespace zg
