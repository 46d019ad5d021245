// GLM-4.5 and 4.6: DeepSeek-V3's experts behind attention with groups of heads, of which a part of the
// columns rotates.
#include "model/families/deepseek_experts.hpp"

namespace zg::model {
namespace {

void read(const hf::Keys& keys, ModelConfig& c) {
  read_deepseek_experts(keys, {}, c);
  if (keys.flag("use_qk_norm", false)) c.block.head_norms = HeadNorms::kEach;
}

void write(const ModelConfig& c, nlohmann::ordered_json& out) {
  write_deepseek_experts(c, out);
  out["use_qk_norm"] = c.block.head_norms == HeadNorms::kEach;
}

ExpertKeys experts() {
  ExpertKeys keys = deepseek_experts({});
  keys.experts = 128, keys.per_token = 8, keys.inner_default = 1408;
  keys.read = read, keys.write = write;
  keys.keys.push_back({"use_qk_norm", kBoolText, "false", "Queries and keys have RMS norms of each head."});
  return keys;
}

}  // namespace

const Family& glm4_moe() {
  static const DecoderRules kRules = [] {
    DecoderRules rules;
    rules.norm_eps = 1e-5;
    rules.kv_heads_needed = true;
    rules.attention_bias = true, rules.o_has_bias = false;
    rules.rope = hf::RopeKeys::kPartial, rules.partial_rotary = 0.5;
    rules.windows.allowed = false;
    rules.experts = experts();
    return rules;
  }();
  static const Family kFamily = [] {
    Family family =
        decoder_family(Arch::kGlm4Moe, "glm4_moe", "glm4_moe", "Glm4MoeForCausalLM", "GLM-4.5-MoE", kRules);
    family.files.block.shared = "mlp.shared_experts";
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
