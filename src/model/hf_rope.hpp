// Rotary embeddings in a config.json, in both spellings: rope_parameters, which newer files have, and
// rope_theta with rope_scaling. Private to src/model.
#pragma once
#include "model/hf_keys.hpp"

namespace zg::hf {

// The keys by which a family's files describe its rotary embeddings.
enum class RopeKeys {
  kOne,            // one base and one scaling for all layers
  kPartial,        // as kOne, with the fraction of a head that rotates
  kLong,           // as kPartial, with LongRoPE (Phi-3)
  kLocalAndGlobal  // a base for layers with a window, a base and a scaling for the others (Gemma 3)
};

// Reads them into config.block; `config` has the model's sizes. partial: the default of the fraction that
// rotates.
void read_rope(const Keys& keys, RopeKeys which, ModelConfig& config, double partial = 1);
void write_rope(const ModelConfig& config, RopeKeys which, nlohmann::ordered_json& out);

}  // namespace zg::hf
