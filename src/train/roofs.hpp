// The roofs of a run's device and of its link to host memory.
#pragma once
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {

// Measures the processor, or the GPU. On a GPU memory is taken for this and given back, so it must be called
// before the run takes its memory, which may be all that there is.
Roofs measure_roofs(const RunConfig& config);

}  // namespace zg
