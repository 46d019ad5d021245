// The section "router": balance terms of mixtures of experts.
#include "config/sections.hpp"

namespace zg::config {

const Keys& router_keys() {
  using enum BalanceKind;
  static const Keys keys({
      {"balance", &BalanceOptions::kind,
       ChoiceSpec(
           kNone,
           {{"none", kNone}, {"hf", kHf}, {"switch", kSwitch}, {"sequence", kSequence}, {"global", kGlobal}}),
       "The term of the loss by which routers learn to use all experts: E * sum of f P over E experts, where "
       "f is the "
       "share of tokens that have chosen an expert, and P the mean probability that the router gives it. "
       "`hf`: over a "
       "micro-batch, all layers together, f is the number of experts of a token times as large "
       "(transformers); "
       "`switch`: over a micro-batch, layer by layer (Megatron); `sequence`: over each sequence "
       "(DeepSeek-V3); "
       "`global`: over the whole batch of all ranks. Means over tokens, added up over layers."},
      {"balance_coefficient", &BalanceOptions::coefficient, NumberSpec{.fallback = 0.001, .range = kRate},
       "What the term is multiplied by. `router_aux_loss_coef` of a `config.json` is meant for `hf`."},
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
  if (section->has("balance_coefficient") && run.balance.kind == BalanceKind::kNone)
    section->fail("balance_coefficient", "has no effect without a balance term",
                  "name one (router.balance), or remove the key");
  section->finish();
}

}  // namespace zg::config
