#include "model/families/deepseek_experts.hpp"

#include <algorithm>

namespace zg::model {

using hf::Keys;

std::int64_t size_or_zero(const Keys& keys, const char* key, std::int64_t fallback) {
  if (keys.has(key) && keys.at(key) == 0) return 0;
  return keys.has(key) ? keys.size(key) : fallback;
}

void read_deepseek_experts(const Keys& keys, const DeepseekDefaults& defaults, ModelConfig& c) {
  Experts& e = c.experts;
  RouterRule& rule = e.router;
  rule.scale = keys.positive("routed_scaling_factor", defaults.scale);
  rule.groups = keys.size("n_group", defaults.groups);
  rule.kept_groups = keys.size("topk_group", std::min(rule.groups, defaults.kept_groups));
  const auto fail = [&](const char* key, std::int64_t value, const std::string& problem) {
    throw Error(Errc::kUsage, keys.where(), fmt::format("\"{}\" is {}; {}", key, value, problem),
                fmt::format("correct \"{}\"", key));
  };
  const std::int64_t least = rule.group_score == GroupScore::kSumOfTwo ? 2 : 1;
  if (e.count % rule.groups != 0 || (rule.groups > 1 && e.count / rule.groups < least))
    fail("n_group", rule.groups,
         fmt::format("groups of {} or more of the {} experts are expected", least, e.count));
  if (rule.kept_groups > rule.groups)
    fail("topk_group", rule.kept_groups, fmt::format("at most \"n_group\", {}, is expected", rule.groups));
  if (rule.per_token > rule.kept_groups * (e.count / rule.groups))
    fail("topk_group", rule.kept_groups,
         fmt::format("groups with {} experts or more are expected", rule.per_token));
  e.shared_inner = size_or_zero(keys, "n_shared_experts", defaults.shared_experts) * e.inner;
  const std::int64_t first = size_or_zero(keys, "first_k_dense_replace", defaults.first_experts);
  if (first >= c.layers) {
    e = {};
  } else if (first > 0) {
    e.dense.assign(static_cast<std::size_t>(c.layers), false);
    std::fill_n(e.dense.begin(), first, true);
  }
}

void write_deepseek_experts(const ModelConfig& c, nlohmann::ordered_json& out) {
  const Experts& e = c.experts;
  if (!e.on()) {
    out["first_k_dense_replace"] = c.layers;
    return;
  }
  out["routed_scaling_factor"] = e.router.scale;
  out["n_group"] = e.router.groups;
  out["topk_group"] = e.router.kept_groups;
  out["n_shared_experts"] = e.shared_inner / e.inner;
  out["first_k_dense_replace"] = std::count(e.dense.begin(), e.dense.end(), true);
}

ExpertKeys deepseek_experts(const DeepseekDefaults& defaults) {
  ExpertKeys keys{.count = "n_routed_experts",
                  .also = "num_local_experts",
                  .router = {.score = RouterScore::kSigmoid, .epsilon = 1e-20},
                  .renormalizes_by_default = true,
                  .choice_bias = true,
                  .write = write_deepseek_experts};
  const auto text = [](std::int64_t n) { return std::to_string(n); };
  keys.keys = {{"routed_scaling_factor", kNumberText, fmt::format("{}", defaults.scale),
                "The weights of experts are multiplied by it."},
               {"n_group", kSizeText, text(defaults.groups), "Groups into which the experts are divided."},
               {"topk_group", kSizeText, text(defaults.kept_groups),
                "Groups from which a token's experts are chosen: those with the largest scores."},
               {"n_shared_experts", "whole number, 0 or more", text(defaults.shared_experts),
                "Width inside the MLP that all tokens pass besides their experts, as a multiple of "
                "`moe_intermediate_size`."},
               {"first_k_dense_replace", "whole number, 0 or more", text(defaults.first_experts),
                "So many first layers have a plain MLP."}};
  return keys;
}

}  // namespace zg::model
