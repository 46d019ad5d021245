// Mistral: all layers have a window, or none.
#include "model/families/decoder.hpp"

namespace zg::model {

const Family& mistral() {
  static const DecoderRules kRules{
      .kv_heads_needed = true,
      .windows = {.everywhere = true, .rule = [](const hf::Keys&, std::int64_t) { return true; }}};
  static const Family kFamily =
      decoder_family(Arch::kMistral, "mistral", "mistral", "MistralForCausalLM", "Mistral", kRules);
  return kFamily;
}

}  // namespace zg::model
