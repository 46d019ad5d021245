// Qwen 3 with experts, such as Qwen3-30B-A3B.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.head_norms = HeadNorms::kEach;
  return description;
}

}  // namespace

const Family& qwen3_moe() {
  static const DecoderRules kRules{
      .block = block(),
      .kv_heads_needed = true,
      .attention_bias = true,
      .windows = qwen_windows(),
      .experts = ExpertKeys{.experts = 128, .per_token = 8, .inner_default = 768, .dense_layers = true}};
  static const Family kFamily =
      decoder_family(Arch::kQwen3Moe, "qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-MoE", kRules);
  return kFamily;
}

}  // namespace zg::model
