// Qwen 3: queries and keys are normalised head by head.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.head_norms = HeadNorms::kEach;
  return description;
}

}  // namespace

const Family& qwen3() {
  static const DecoderRules kRules{.block = block(),
                                   .head_size = 128,
                                   .kv_heads_needed = true,
                                   .attention_bias = true,
                                   .windows = qwen_windows()};
  static const Family kFamily =
      decoder_family(Arch::kQwen3, "qwen3", "qwen3", "Qwen3ForCausalLM", "Qwen3", kRules);
  return kFamily;
}

}  // namespace zg::model
