// Granite with experts: multipliers of the embedding, of scores, of what branches add and of logits. Its
// files have all experts of a layer in one tensor.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

using hf::Keys;

void read(const Keys& keys, ModelConfig& c) {
  BlockDescription& block = c.block;
  block.embedding_multiplier = keys.positive("embedding_multiplier", 1);
  block.attention_multiplier = keys.positive("attention_multiplier", 1);
  block.residual_multiplier = keys.positive("residual_multiplier", 1);
  block.logits_divisor = keys.positive("logits_scaling", 1);
  c.experts.router.scale = block.residual_multiplier;
}

void write(const ModelConfig& c, nlohmann::ordered_json& out) {
  out["embedding_multiplier"] = c.block.embedding_multiplier;
  out["attention_multiplier"] = c.block.attention_multiplier;
  out["residual_multiplier"] = c.block.residual_multiplier;
  out["logits_scaling"] = c.block.logits_divisor;
}

ExpertKeys experts() {
  ExpertKeys keys{.count = "num_local_experts",
                  .also = "num_experts",
                  .experts = 8,
                  .per_token = 2,
                  .inner = "intermediate_size",
                  .renormalizes = true,
                  .read = read,
                  .write = write};
  keys.keys = {
      {"embedding_multiplier", kNumberText, "1", "The embedding is multiplied by it."},
      {"attention_multiplier", kNumberText, "1", "Scores are products of queries and keys times it."},
      {"residual_multiplier", kNumberText, "1",
       "The outputs of attention and of experts are multiplied by it."},
      {"logits_scaling", kNumberText, "1", "Logits are divided by it."}};
  return keys;
}

}  // namespace

const Family& granite_moe() {
  static const DecoderRules kRules = [] {
    DecoderRules rules;
    rules.kv_heads_needed = true;
    rules.windows.allowed = false;
    rules.experts = experts();
    return rules;
  }();
  static const Family kFamily = [] {
    Family family = decoder_family(Arch::kGraniteMoe, "granitemoe", "granitemoe", "GraniteMoeForCausalLM",
                                   "Granite-MoE", kRules);
    BlockNames& names = family.files.block;
    names.router = "block_sparse_moe.router.layer", names.experts = "block_sparse_moe.experts";
    names.fused_experts = true;
    names.all_gate_up = "block_sparse_moe.input_linear.weight";
    names.all_down = "block_sparse_moe.output_linear.weight";
    family.files.renamed = {
        {".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"},
        {".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"},
        {".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"}};
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
