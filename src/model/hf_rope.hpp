// Rotary embeddings in a config.json, in both spellings: rope_parameters, which newer files have, and
// rope_theta with rope_scaling. Private to src/model.
#pragma once
#include "model/hf_keys.hpp"

namespace zg::hf {

// Which keys of rotary embeddings a family has: those of one kind of layers; the same with LongRoPE and a
// share of a head that rotates (Phi-3); or those of layers without a window and of layers with one (Gemma 3).
enum class RopeKeys { kOne, kLong, kLocalAndGlobal };

// Reads them into config.block; `config` has the model's sizes.
void read_rope(const Keys& keys, RopeKeys which, ModelConfig& config);
void write_rope(const ModelConfig& config, RopeKeys which, nlohmann::ordered_json& out);

}  // namespace zg::hf
