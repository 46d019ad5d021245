// Phi-3: fused matrices in its files, and LongRoPE.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.fused = true;
  return description;
}

}  // namespace

const Family& phi3() {
  static const DecoderRules kRules{.block = block(),
                                   .norm_eps = 1e-5,
                                   .rope = hf::RopeKeys::kLong,
                                   .windows = {.absent_is_none = true,
                                               .everywhere = true,
                                               .rule = [](const hf::Keys&, std::int64_t) { return true; }}};
  static const Family kFamily =
      decoder_family(Arch::kPhi3, "phi3", "phi3", "Phi3ForCausalLM", "Phi-3", kRules);
  return kFamily;
}

}  // namespace zg::model
