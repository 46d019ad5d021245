// OLMoE: experts in every layer, and norms of queries and keys over all heads together.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.head_norms = HeadNorms::kAll;
  return description;
}

}  // namespace

const Family& olmoe() {
  static const DecoderRules kRules{
      .block = block(),
      .norm_eps = 1e-5,
      .attention_bias = true,
      .windows = {.allowed = false},
      .experts = ExpertKeys{.experts = 64, .per_token = 8, .inner = "intermediate_size"}};
  static const Family kFamily =
      decoder_family(Arch::kOlmoe, "olmoe", "olmoe", "OlmoeForCausalLM", "OLMoE", kRules);
  return kFamily;
}

}  // namespace zg::model
