// Describes the parts of a run to the watchdog. The parts outlive the registration.
#pragma once
#include <vector>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

WatchedPart part_of(const io::Engine& io);
WatchedPart part_of(const TensorStore& store);
WatchedPart part_of(const StepExecutor& engine);
// Reports what each rank of this process does, or for which ranks it waits.
WatchedPart part_of(std::vector<const StepExecutor*> ranks);

}  // namespace zg
