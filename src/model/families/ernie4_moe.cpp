// ERNIE 4.5 with experts: softmax scores, chosen with a choice bias; heads rotate neighbouring columns.
#include <algorithm>

#include "model/families/deepseek_experts.hpp"

namespace zg::model {
namespace {

using hf::Keys;

BlockDescription block() {
  BlockDescription description;
  description.rope.interleaved = true;
  return description;
}

constexpr const char *kStart = "moe_layer_start_index", *kEnd = "moe_layer_end_index",
                     *kInterval = "moe_layer_interval", *kShared = "moe_num_shared_experts",
                     *kLeast = "moe_norm_min";

void read(const Keys& keys, ModelConfig& c) {
  keys.demand("use_bias", false);
  Experts& e = c.experts;
  e.shared_inner = size_or_zero(keys, kShared, 2) * e.inner;
  e.router.least_sum = keys.positive(kLeast, 1e-12);
  const std::int64_t start = size_or_zero(keys, kStart, 1), interval = keys.size(kInterval, 1),
                     end = keys.has(kEnd) && keys.at(kEnd) == -1 ? c.layers - 1
                                                                 : size_or_zero(keys, kEnd, c.layers - 1);
  for (std::int64_t l = 0; l < c.layers; ++l)
    e.dense.push_back((l + 1) % interval != 0 || l < start || l > end);
  if (std::find(e.dense.begin(), e.dense.end(), true) == e.dense.end()) e.dense.clear();
}

void write(const ModelConfig& c, nlohmann::ordered_json& out) {
  const Experts& e = c.experts;
  out[kShared] = e.shared_inner / e.inner;
  out[kLeast] = e.router.least_sum;
  std::vector<std::int64_t> layers;
  for (std::int64_t l = 0; l < c.layers; ++l) {
    if (c.has_experts(l)) layers.push_back(l);
  }
  out[kStart] = layers.empty() ? c.layers : layers.front();
  out[kEnd] = layers.empty() ? c.layers : layers.back();
  out[kInterval] = layers.size() > 1 ? layers[1] - layers[0] : 1;
  out["use_bias"] = false;
}

}  // namespace

const Family& ernie4_moe() {
  static const DecoderRules kRules{
      .block = block(),
      .norm_eps = 1e-5,
      .tied = true,
      .kv_heads_needed = true,
      .windows = {.allowed = false},
      .experts = ExpertKeys{
          .count = "moe_num_experts",
          .also = "num_experts",
          .experts = 64,
          .per_token_key = "moe_k",
          .per_token = 6,
          .inner_default = 1536,
          .renormalizes = true,
          .choice_bias = true,
          .read = read,
          .write = write,
          .keys = {
              {kShared, "whole number, 0 or more", "2",
               "Width inside the MLP that all tokens pass besides their experts, as a multiple of "
               "`moe_intermediate_size`."},
              {kLeast, kNumberText, "1e-12", "The least sum by which the weights of experts are divided."},
              {kStart, "a layer, counted from 0", "1", "The first layer that may have experts."},
              {kEnd, "a layer, or -1", "-1", "The last one; -1: the last layer."},
              {kInterval, kSizeText, "1",
               "Each layer between these whose number, counted from 1, is a multiple of it has experts."},
              {"use_bias", "`false`", "false", "Products have no biases."}}}};
  static const Family kFamily = [] {
    Family family = decoder_family(Arch::kErnie4Moe, "ernie4_5_moe", "ernie4_5_moe",
                                   "Ernie4_5_MoeForCausalLM", "ERNIE-4.5-MoE", kRules);
    BlockNames& names = family.files.block;
    names.shared = "mlp.shared_experts";
    names.choice_bias = "mlp.moe_statics.e_score_correction_bias", names.choice_bias_is_row = true;
    family.files.renamed = {{".mlp.gate.moe_statics.", ".mlp.moe_statics."}};
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
