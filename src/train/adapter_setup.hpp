// The adapters that a run trains.
#pragma once
#include <optional>
#include <vector>

#include "ziggurat/config/run_config.hpp"
#include "ziggurat/model/model.hpp"
#include "ziggurat/model/param_code.hpp"

namespace zg {

// The adapters that the configuration's section "lora" asks for with this model; none without that section.
// Reads lora.from. Throws Error(kUsage) for a model that cannot have adapters, and for a target module that
// the model does not have.
Lora lora_of(const RunConfig& config, const ModelConfig& model);

// How the parameters of the model that `config` starts from are coded, by unit and parameter
// (LayoutOptions::codes).
std::vector<std::vector<std::optional<ParamCode>>> codes_of_base(const RunConfig& config, const Model& model);

}  // namespace zg
