// Speeds of what a run computes on and of its link to host memory.
#pragma once
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {

// Of the processor, or of the GPU, which is asked for memory of its own that goes back: so before a run takes
// what it needs, which may be all there is.
Roofs measure_roofs(const RunConfig& config);

}  // namespace zg
