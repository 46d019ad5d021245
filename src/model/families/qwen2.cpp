// Qwen 2 and 2.5: biases of q, k and v, and a window in the last layers if it is switched on.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.qkv_bias = true;
  return description;
}

}  // namespace

const Family& qwen2() {
  static const DecoderRules kRules{.block = block(), .kv_heads_needed = true, .windows = qwen_windows()};
  static const Family kFamily =
      decoder_family(Arch::kQwen2, "qwen2", "qwen2", "Qwen2ForCausalLM", "Qwen2", kRules);
  return kFamily;
}

}  // namespace zg::model
