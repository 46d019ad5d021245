// OLMo 2: norms only on the outputs of the branches, and norms of queries and keys over all heads together.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.norms = NormPlacement::kAfter;
  description.head_norms = HeadNorms::kAll;
  return description;
}

}  // namespace

const Family& olmo2() {
  static const DecoderRules kRules{
      .block = block(), .norm_eps = 1e-5, .attention_bias = true, .windows = {.allowed = false}};
  static const Family kFamily =
      decoder_family(Arch::kOlmo2, "olmo2", "olmo2", "Olmo2ForCausalLM", "OLMo 2", kRules);
  return kFamily;
}

}  // namespace zg::model
