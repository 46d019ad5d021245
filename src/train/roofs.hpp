// The roofs of a run's device and of its link to host memory.
#pragma once
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {

// Measures the CPU, or the GPU. Takes GPU memory meanwhile, so it must be called before the run takes its
// memory, which may be all that there is.
Roofs measure_roofs(const RunConfig& config);

}  // namespace zg
