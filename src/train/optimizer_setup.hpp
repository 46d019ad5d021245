// From the optimizer's configuration to what the engine takes. Pure functions.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/config/run_config.hpp"
#include "ziggurat/engine/engine.hpp"

namespace zg {

StateFormat state_format(const OptimizerConfig& config, DType weights);

// The group of every parameter, by unit (LayoutOptions::groups); the configuration's group i is i + 1, 0 is
// what no group matches. Empty without groups. Throws Error(kUsage) for a pattern that matches nothing, for a
// group whose parameters earlier ones have, and where nothing is left to be trained.
std::vector<std::vector<int>> parameter_groups(const OptimizerConfig& config, const Model& model);

// For the update after `updates` others.
UpdateRule update_rule(const RunConfig& config, std::int64_t updates);

// "AdamW", "SGD", ...
const char* optimizer_name(const OptimizerConfig& config);

}  // namespace zg
