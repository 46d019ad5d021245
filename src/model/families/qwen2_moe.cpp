// Qwen 1.5 and 2 with experts: Qwen 2's attention, and beside the experts an MLP with a gate that all tokens
// pass.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.qkv_bias = true;
  return description;
}

}  // namespace

const Family& qwen2_moe() {
  static const DecoderRules kRules{
      .block = block(),
      .kv_heads_needed = true,
      .windows = qwen_windows(),
      .experts = ExpertKeys{
          .experts = 60, .per_token = 4, .inner_default = 1408, .dense_layers = true, .shared = 5632}};
  static const Family kFamily =
      decoder_family(Arch::kQwen2Moe, "qwen2_moe", "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2-MoE", kRules);
  return kFamily;
}

}  // namespace zg::model
