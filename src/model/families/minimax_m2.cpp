// MiniMax-M2: experts in every layer, chosen by sigmoids plus a choice bias, and norms of queries and keys
// over all heads together.
#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

BlockDescription block() {
  BlockDescription description;
  description.head_norms = HeadNorms::kAll;
  return description;
}

}  // namespace

const Family& minimax_m2() {
  static const DecoderRules kRules{.block = block(),
                                   .head_size = 128,
                                   .kv_heads_needed = true,
                                   .rope = hf::RopeKeys::kPartial,
                                   .windows = {.allowed = false},
                                   .experts = ExpertKeys{.count = "num_local_experts",
                                                         .also = "num_experts",
                                                         .experts = 256,
                                                         .per_token = 8,
                                                         .inner = "intermediate_size",
                                                         .router = {.score = RouterScore::kSigmoid},
                                                         .renormalizes = true,
                                                         .choice_bias = true,
                                                         .jitter = true}};
  static const Family kFamily = [] {
    Family family = decoder_family(Arch::kMinimaxM2, "minimax_m2", "minimax_m2", "MiniMaxM2ForCausalLM",
                                   "MiniMax-M2", kRules);
    BlockNames& names = family.files.block;
    names.router = "block_sparse_moe.gate", names.experts = "block_sparse_moe.experts";
    names.expert_gate = "w1", names.expert_up = "w3", names.expert_down = "w2";
    names.expert_modules[0] = LoraModule::kExpertW1, names.expert_modules[1] = LoraModule::kExpertW3,
    names.expert_modules[2] = LoraModule::kExpertW2;
    names.all_gate_up = "block_sparse_moe.experts.gate_up_proj",
    names.all_down = "block_sparse_moe.experts.down_proj";
    names.choice_bias = "block_sparse_moe.e_score_correction_bias";
    family.files.renamed = {{".mlp.", ".block_sparse_moe."}};
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
