// The keys of experts that the families after DeepSeek have in common. Private to src/model.
#pragma once
#include "model/families/decoder.hpp"

namespace zg::model {

// What files without the keys have.
struct DeepseekDefaults {
  double scale = 1;                                    // "routed_scaling_factor"
  std::int64_t groups = 1, kept_groups = 1;            // "n_group", "topk_group"
  std::int64_t shared_experts = 1, first_experts = 1;  // "n_shared_experts", "first_k_dense_replace"
};

// DeepSeek-V3's experts: chosen by sigmoids plus a choice bias, in groups, besides an MLP that all tokens
// pass, in all but the first layers.
ExpertKeys deepseek_experts(const DeepseekDefaults& defaults);

// Read and write the keys of these. Routers of other rules may share them.
void read_deepseek_experts(const hf::Keys& keys, const DeepseekDefaults& defaults, ModelConfig& config);
void write_deepseek_experts(const ModelConfig& config, nlohmann::ordered_json& out);

// A whole number that may be 0.
std::int64_t size_or_zero(const hf::Keys& keys, const char* key, std::int64_t fallback);

}  // namespace zg::model
