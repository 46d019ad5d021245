// The section "lora": adapters that are trained in place of the model's own parameters.
#include "config/sections.hpp"

namespace zg::config {

const Keys& lora_keys() {
  static const Keys keys({
      {"rank", IntSpec{.min = 1, .max = 1 << 24},
       "Rows of A and columns of B of each adapter: y = W x + alpha / rank * B A x.",
       "this or `from` is required"},
      {"alpha", NumberSpec{.range = kSmall}, "Adapters are multiplied by `alpha` / rank.", "the rank"},
      {"rslora", &LoraConfig::rslora, BoolSpec{},
       "Whether adapters are multiplied by `alpha` / sqrt(rank) instead."},
      {"dropout", &LoraConfig::dropout, NumberSpec{.range = kBelowOne},
       "Share of the elements of a matrix's input that training drops on their way to the adapter."},
      {"base", &LoraConfig::base,
       ChoiceSpec(LoraConfig::Base::kElements,
                  {{"elements", LoraConfig::Base::kElements}, {"codes", LoraConfig::Base::kCodes}}),
       "How a base whose files have matrices in 4 or 8 bits is kept: as `elements` of the run's type, or as "
       "the "
       "`codes` of the files, of which each forward and backward decodes a layer."},
      {"target", FormSpec{},
       "Modules of each layer that get an adapter, by Hugging Face's names (`q_proj`, `k_proj`, `v_proj`, "
       "`o_proj`, `gate_proj`, `up_proj`, `down_proj`; Phi-3: `qkv_proj`, `gate_up_proj`; DeepSeek: "
       "`q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj`; GPT-2: `c_attn`, "
       "`c_fc`, and `c_proj`, of which `attn.c_proj` and `mlp.c_proj` are one each), in which `*` and `?` "
       "match as in a shell; `all-linear`: all of them. A name is the end of a module's path, so `up_proj` "
       "also "
       "names that of experts and of the MLP that all tokens pass; `experts.*.up_proj` and "
       "`shared_expert.up_proj` name one of them (Mixtral's experts: `w1`, `w3`, `w2`).",
       "`\"all-linear\"`, or no module where `target_parameters` is given", "a text, or a list of texts"},
      {"target_parameters", FormSpec{},
       "Adapters of experts in the form that PEFT has with transformers 5, where a layer's experts have two "
       "parameters together: `experts.gate_up_proj` and `experts.down_proj`, names as in `target`. Gate and "
       "up "
       "of an expert then share one A, there is no `dropout`, and `target` names no matrices of experts.",
       "none", "a text, or a list of texts"},
      {"from", TextSpec{},
       "Directory of adapters to start from, as PEFT or an earlier run wrote it. It sets "
       "rank, alpha, rslora, target and target_parameters.",
       "new adapters, which change nothing at first"},
  });
  return keys;
}

void read_lora(Section& root, RunConfig& run) {
  auto section = root.section("lora");
  if (!section) {
    if (!run.quantize.code) return;
    root.fail("model.quantize",
              "is given, and the run trains the model itself, whose codes cannot be trained",
              "train adapters beside it (a section lora, e.g. \"lora\": {\"rank\": 16}), or remove the key");
  }
  LoraConfig& out = run.lora;
  section->read_into(out);
  if (section->has("from")) {
    out.from = section->text("from");
    if (out.from.empty()) section->wrong("from", "a directory");
    for (const char* key : {"rank", "alpha", "rslora", "target", "target_parameters"}) {
      if (section->has(key))
        section->fail(key, "is said by the adapters of lora.from", "remove one of the two");
    }
  } else {
    section->require("rank", "e.g. \"rank\": 16, or \"from\": \"a directory of adapters\"");
    out.rank = section->integer("rank");
  }
  if (section->has("alpha")) out.alpha = section->number("alpha");
  const auto names = [&](const char* key, const char* expected, std::vector<std::string>& into) {
    const Json* value = section->find(key);
    if (value == nullptr) return;
    into.clear();
    for (const Json& name : value->is_array() ? *value : Json::array({*value})) {
      if (!name.is_string() || name.get_ref<const std::string&>().empty()) section->wrong(key, expected);
      into.push_back(name.get<std::string>());
    }
    if (into.empty()) section->wrong(key, expected);
  };
  names("target_parameters", "a list such as [\"experts.gate_up_proj\", \"experts.down_proj\"]",
        out.parameters);
  if (!out.parameters.empty()) out.targets.clear();
  names("target", "\"all-linear\", or a list such as [\"q_proj\", \"v_proj\"]", out.targets);
  section->finish();
}

}  // namespace zg::config
