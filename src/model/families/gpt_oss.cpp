// gpt-oss: sinks and biases in attention, a window in every other layer, and experts with biases whose gates
// and ups are clamped pairs. Its files have all experts of a layer in one tensor: MXFP4 as released, or
// transposed and plain.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

using hf::Keys;

BlockDescription block() {
  BlockDescription description;
  description.qkv_bias = description.o_bias = true;
  description.sinks = true;
  description.gate = Gate::kClampedPairs;
  return description;
}

void demand(const Keys& keys, const char* key, double value) {
  if (keys.positive(key, value) != value) keys.unsupported(key, fmt::format("{}", value));
}

void read(const Keys& keys, ModelConfig&) {
  demand(keys, "swiglu_alpha", kPairsSlope);
  demand(keys, "swiglu_limit", kPairsLimit);
}

void write(const ModelConfig&, nlohmann::ordered_json& out) {
  out["attention_bias"] = true;
  out["swiglu_limit"] = kPairsLimit;
}

}  // namespace

const Family& gpt_oss() {
  static const DecoderRules kRules{
      .block = block(),
      .head_size = 64,
      .norm_eps = 1e-5,
      .kv_heads_needed = true,
      .always_sinks = true,
      .rope = hf::RopeKeys::kOne,
      .windows = {.absent_is_none = false,
                  .typed = true,
                  .rule = [](const Keys&, std::int64_t layer) { return layer % 2 == 0; }},
      .experts = ExpertKeys{.count = "num_local_experts",
                            .also = "num_experts",
                            .experts = 128,
                            .per_token = 4,
                            .inner = "intermediate_size",
                            .renormalizes = true,
                            .biases = true,
                            .read = read,
                            .write = write,
                            .keys = {{"swiglu_alpha", "`1.702`", "1.702", "Slope of the sigmoid of gates."},
                                     {"swiglu_limit", "`7`", "7",
                                      "Gates are at most this, ups between its negative and it."}}}};
  static const Family kFamily = [] {
    Family family =
        decoder_family(Arch::kGptOss, "gpt_oss", "gpt_oss", "GptOssForCausalLM", "gpt-oss", kRules);
    BlockNames& names = family.files.block;
    names.router = "mlp.router";
    names.fused_experts = names.transposed_experts = true;
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
