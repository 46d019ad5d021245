// The adapters that a run trains.
#pragma once
#include "ziggurat/config/run_config.hpp"

namespace zg {

// The adapters that the configuration's section "lora" asks for with this model; none without that section.
// Reads lora.from. Throws Error(kUsage) for a model that cannot have adapters, and for a target module that
// the model does not have.
Lora lora_of(const RunConfig& config, const ModelConfig& model);

}  // namespace zg
