// Gemma 2: norms on the inputs and outputs of the branches, capped scores and logits, and a window in every
// second layer.
#include "model/families/decoder.hpp"

namespace zg::model {

const Family& gemma2() {
  static const DecoderRules kRules{
      .block = gemma_block(),
      .head_size = 256,
      .tied = true,
      .kv_heads_needed = true,
      .attention_bias = true,
      .windows = {.needed = true,
                  .typed = true,
                  .rule = [](const hf::Keys&, std::int64_t layer) { return layer % 2 == 0; }},
      .gemma = GemmaKeys{}};
  static const Family kFamily =
      decoder_family(Arch::kGemma2, "gemma2", "gemma2", "Gemma2ForCausalLM", "Gemma 2", kRules);
  return kFamily;
}

}  // namespace zg::model
