// Gemma 3's text models: as Gemma 2, with norms of queries and keys instead of capped scores, five layers
// with a window for each one without, and different rotary frequencies for these two kinds of layers.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description = gemma_block();
  description.head_norms = HeadNorms::kEach;
  return description;
}

}  // namespace

const Family& gemma3() {
  static const DecoderRules kRules{
      .block = block(),
      .head_size = 256,
      .tied = true,
      .kv_heads_needed = true,
      .attention_bias = true,
      .rope = hf::RopeKeys::kLocalAndGlobal,
      .windows = {.needed = true,
                  .typed = true,
                  .rule =
                      [](const hf::Keys& keys, std::int64_t layer) {
                        return (layer + 1) % keys.size("sliding_window_pattern", 6) != 0;
                      },
                  .keys = {{"sliding_window_pattern", kSizeText, "6",
                            "Every layer whose number, from 1, is a multiple of it has no window."}}},
      .gemma = GemmaKeys{.caps_scores = false}};
  static const Family kFamily =
      decoder_family(Arch::kGemma3, "gemma3", "gemma3_text", "Gemma3ForCausalLM", "Gemma 3", kRules);
  return kFamily;
}

}  // namespace zg::model
