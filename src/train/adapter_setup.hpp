// The adapters that a run trains.
#pragma once
#include "ziggurat/config/run_config.hpp"

namespace zg {

// What the section "lora" asks for of this model; none where there is no such section. Reads lora.from.
// Throws Error(kUsage) for a model that adapters cannot stand beside, and for a target that it does not have.
Lora lora_of(const RunConfig& config, const ModelConfig& model);

}  // namespace zg
