// DeepSeek-V2: latent attention, whose rotating pairs lie side by side, and experts by softmax scores, which
// may be chosen from the groups with the largest score.
#include "model/families/deepseek_experts.hpp"

namespace zg::model {
namespace {

using hf::Keys;

constexpr DeepseekDefaults kDefaults{.shared_experts = 2, .first_experts = 0};
constexpr const char *kMethod = "topk_method", *kGreedy = "greedy", *kInGroups = "group_limited_greedy";

void read(const Keys& keys, ModelConfig& c) {
  const std::string method = keys.text(kMethod, kGreedy);
  if (method != kGreedy && method != kInGroups)
    keys.unsupported(kMethod, fmt::format("\"{}\" or \"{}\"", kGreedy, kInGroups));
  if (keys.text("scoring_func", "softmax") != "softmax") keys.unsupported("scoring_func", "\"softmax\"");
  read_deepseek_experts(keys, kDefaults, c);
  if (!c.experts.on()) return;
  if (method == kGreedy) c.experts.router.groups = c.experts.router.kept_groups = 1;
  if (c.block.mlp_bias) keys.unsupported("mlp_bias", "false, in layers with experts,");
}

void write(const ModelConfig& c, nlohmann::ordered_json& out) {
  write_deepseek_experts(c, out);
  out[kMethod] = c.experts.router.groups > 1 ? kInGroups : kGreedy;
}

// transformers ignores "norm_topk_prob" in this family.
ExpertKeys experts() {
  ExpertKeys keys = deepseek_experts(kDefaults);
  keys.experts = 64, keys.per_token = 6, keys.inner_default = 1407;
  keys.router = {.group_score = GroupScore::kLargest};
  keys.never_renormalizes = true;
  keys.choice_bias = false;
  keys.read = read, keys.write = write;
  keys.keys.push_back({kMethod, "`\"greedy\"`, `\"group_limited_greedy\"`", "\"greedy\"",
                       "Whether experts are chosen from all, or from the groups with the largest score."});
  return keys;
}

}  // namespace

const Family& deepseek_v2() {
  static const DecoderRules kRules = [] {
    DecoderRules rules;
    rules.attention_bias = rules.mlp_bias = true;
    rules.windows.allowed = false;
    rules.experts = experts();
    rules.latent = LatentKeys{};
    return rules;
  }();
  static const Family kFamily = [] {
    Family family = decoder_family(Arch::kDeepseekV2, "deepseek_v2", "deepseek_v2", "DeepseekV2ForCausalLM",
                                   "DeepSeek-V2", kRules);
    family.files.block.shared = "mlp.shared_experts";
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
