// DeepSeek-V3 and Kimi K2: V2's attention, and experts by sigmoid scores with a choice bias. Files have
// layers that predict further tokens after the last one.
#include "model/families/deepseek_experts.hpp"

namespace zg::model {
namespace {

using hf::Keys;

constexpr DeepseekDefaults kDefaults{.scale = 2.5, .groups = 8, .kept_groups = 4, .first_experts = 3};

void read(const Keys& keys, ModelConfig& c) {
  if (keys.text("scoring_func", "sigmoid") != "sigmoid") keys.unsupported("scoring_func", "\"sigmoid\"");
  if (keys.text("topk_method", "noaux_tc") != "noaux_tc") keys.unsupported("topk_method", "\"noaux_tc\"");
  read_deepseek_experts(keys, kDefaults, c);
}

ExpertKeys experts() {
  ExpertKeys keys = deepseek_experts(kDefaults);
  keys.experts = 256, keys.per_token = 8, keys.inner_default = 2048;
  keys.read = read;
  return keys;
}

}  // namespace

const Family& deepseek_v3() {
  static const DecoderRules kRules = [] {
    DecoderRules rules;
    rules.attention_bias = true;
    rules.windows.allowed = false;
    rules.experts = experts();
    rules.latent = LatentKeys{.tells_pairs = true};
    return rules;
  }();
  static const Family kFamily = [] {
    Family family = decoder_family(Arch::kDeepseekV3, "deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM",
                                   "DeepSeek-V3", kRules);
    family.other_type = "kimi_k2";
    family.files.extra_layers = true;
    family.files.block.shared = "mlp.shared_experts";
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
