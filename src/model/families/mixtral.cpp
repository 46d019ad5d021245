// Mixtral: Mistral's attention, and experts in every layer, whose weights always add up to one.
#include "model/families/decoder.hpp"

namespace zg::model {

const Family& mixtral() {
  static const DecoderRules kRules{.norm_eps = 1e-5,
                                   .kv_heads_needed = true,
                                   .windows = {.absent_is_none = true,
                                               .everywhere = true,
                                               .rule = [](const hf::Keys&, std::int64_t) { return true; }},
                                   .experts = ExpertKeys{.count = "num_local_experts",
                                                         .experts = 8,
                                                         .per_token = 2,
                                                         .inner = "intermediate_size",
                                                         .renormalizes = true,
                                                         .jitter = true}};
  static const Family kFamily = [] {
    Family family =
        decoder_family(Arch::kMixtral, "mixtral", "mixtral", "MixtralForCausalLM", "Mixtral", kRules);
    BlockNames& names = family.files.block;
    names.router = "block_sparse_moe.gate", names.experts = "block_sparse_moe.experts";
    names.expert_gate = "w1", names.expert_up = "w3", names.expert_down = "w2";
    names.all_gate_up = "block_sparse_moe.experts.gate_up_proj";
    names.all_down = "block_sparse_moe.experts.down_proj";
    family.files.renamed = {{".mlp.", ".block_sparse_moe."}};
    names.expert_modules[0] = LoraModule::kExpertW1, names.expert_modules[1] = LoraModule::kExpertW3,
    names.expert_modules[2] = LoraModule::kExpertW2;
    return family;
  }();
  return kFamily;
}

}  // namespace zg::model
