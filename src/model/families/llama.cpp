// Llama, whose keys all other decoder families have, too.
#include "model/families/decoder.hpp"

namespace zg::model {

const Family& llama() {
  static const DecoderRules kRules{
      .attention_bias = true, .mlp_bias = true, .has_pad_token = false, .windows = {.allowed = false}};
  static const Family kFamily =
      decoder_family(Arch::kLlama, "llama", "llama", "LlamaForCausalLM", "Llama", kRules);
  return kFamily;
}

}  // namespace zg::model
