// The section "router": balance terms of mixtures of experts.
#include "config/sections.hpp"

namespace zg::config {

const Keys& router_keys() {
  using enum BalanceKind;
  static const Keys keys({
      {"balance", &BalanceOptions::kind,
       ChoiceSpec(
           kNone,
           {{"none", kNone},
            {"hf", kHf},
            {"switch", kSwitch},
            {"sequence", kSequence},
            {"global", kGlobal},
            {"bias", kBias}}),
       "The term of the loss by which routers learn to use all experts: E * sum of f P over E experts, where "
       "f is the "
       "share of tokens that have chosen an expert, and P the mean probability that the router gives it. "
       "`hf`: over a "
       "micro-batch, all layers together, f is the number of experts of a token times as large "
       "(transformers); "
       "`switch`: over a micro-batch, layer by layer (Megatron); `sequence`: over each sequence "
       "(DeepSeek-V3); "
       "`global`: over the whole batch of all ranks. Means over tokens, added up over layers. `bias` is no "
       "term: after each "
       "step the choice bias of an expert moves by `bias_rate`, up if it has had fewer tokens than the mean of "
       "its layer, else down (DeepSeek-V3; for families whose routers have choice biases)."},
      {"balance_coefficient", &BalanceOptions::coefficient, NumberSpec{.fallback = 0.001, .range = kRate},
       "What the term is multiplied by. `router_aux_loss_coef` of a `config.json` is meant for `hf`."},
      {"bias_rate", &BalanceOptions::bias_rate, NumberSpec{.fallback = 0.001, .range = kRate},
       "By so much choice biases move in a step, with `router.balance` `\"bias\"`."},
      {"z_loss", &BalanceOptions::z_coefficient, NumberSpec{.range = kRate},
       "Coefficient of the mean over tokens of the squared log-sum-exp of a router's logits, added up over "
       "layers."},
  });
  return keys;
}

void read_router(Section& root, RunConfig& run) {
  auto section = root.section("router");
  if (!section) return;
  section->read_into(run.balance);
  if (section->has("balance_coefficient") && !run.balance.has_term())
    section->fail("balance_coefficient", "has no effect without a balance term",
                  "name one (router.balance), or remove the key");
  if (section->has("bias_rate") && run.balance.kind != BalanceKind::kBias)
    section->fail("bias_rate", "has no effect unless router.balance is \"bias\"",
                  "set router.balance to \"bias\", or remove the key");
  section->finish();
}

}  // namespace zg::config
