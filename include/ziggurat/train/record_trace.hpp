// The access trace of a training run, made from its plan: no device, drive or step is needed.
#pragma once
#include <cstdint>

#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// With `steps` 0, records one step of the steady state, which a replay repeats. Otherwise the first `steps`
// steps, with the evaluations that the configuration asks for. The trace has the run's budgets without the
// workspace.
AccessTrace record_trace(const RunPlan& plan, std::int64_t steps);

}  // namespace zg
