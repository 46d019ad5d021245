// The keys of experts that the families after DeepSeek-V3 have in common. Private to src/model.
#pragma once
#include "model/families/decoder.hpp"

namespace zg::model {

// Experts chosen by sigmoids plus a choice bias, in groups, besides an MLP that all tokens pass, in all but
// the first layers.
ExpertKeys deepseek_experts();

// Reads and writes the keys of these, and lists them.
void read_deepseek_experts(const hf::Keys& keys, ModelConfig& config);
void write_deepseek_experts(const ModelConfig& config, nlohmann::ordered_json& out);

// A whole number that may be 0.
std::int64_t size_or_zero(const hf::Keys& keys, const char* key, std::int64_t fallback);

}  // namespace zg::model
