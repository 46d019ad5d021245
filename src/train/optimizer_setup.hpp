// Translates the optimizer's configuration for the engine. Pure functions.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/config/run_config.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

StateFormat state_format(const OptimizerConfig& config, DType weights);

// The group of every parameter, by unit (LayoutOptions::groups): i + 1 for group i of the configuration, 0
// for parameters that no group matches. Empty without groups. Throws Error(kUsage) for a pattern that matches
// nothing, for a group all of whose parameters belong to earlier groups, and where no parameter is trained.
std::vector<std::vector<int>> parameter_groups(const OptimizerConfig& config, const Model& model);

// The rule of the next update after `updates` updates.
UpdateRule update_rule(const RunConfig& config, std::int64_t updates);

// "AdamW", "SGD", ...
const char* optimizer_name(const OptimizerConfig& config);

}  // namespace zg
