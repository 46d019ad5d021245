// Rotary embeddings in a config.json, in both spellings: rope_parameters, which newer files have, and
// rope_theta with rope_scaling. Private to src/model.
#pragma once
#include "model/hf_keys.hpp"

namespace zg::hf {

// Reads the rotary embeddings of a family into config.block; `config` has its sizes.
void read_rope(const Keys& keys, ModelConfig& config);
void write_rope(const ModelConfig& config, nlohmann::ordered_json& out);

}  // namespace zg::hf
