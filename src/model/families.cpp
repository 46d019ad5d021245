// What the families are called, and what of a configuration follows from others of its values.
#include "model/families.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace model {

const std::array<Family, std::size(kFamilies)>& families() {
  static constexpr std::array<Family, std::size(kFamilies)> kTable{
      {{.arch = Arch::kGpt2,
        .name = "gpt2",
        .model_type = "gpt2",
        .architecture = "GPT2LMHeadModel",
        .title = "GPT-2",
        .files = {"transformer.", false, "h", "wte.weight", "ln_f"},
        .form = {.layer_norms = true, .gated = false, .rotates = false, .joint_qkv = true, .biases = true}},
       {.arch = Arch::kLlama,
        .name = "llama",
        .model_type = "llama",
        .architecture = "LlamaForCausalLM",
        .title = "Llama"},
       {.arch = Arch::kMistral,
        .name = "mistral",
        .model_type = "mistral",
        .architecture = "MistralForCausalLM",
        .title = "Mistral"},
       {.arch = Arch::kQwen2,
        .name = "qwen2",
        .model_type = "qwen2",
        .architecture = "Qwen2ForCausalLM",
        .title = "Qwen2"},
       {.arch = Arch::kQwen3,
        .name = "qwen3",
        .model_type = "qwen3",
        .architecture = "Qwen3ForCausalLM",
        .title = "Qwen3"},
       {.arch = Arch::kPhi3,
        .name = "phi3",
        .model_type = "phi3",
        .architecture = "Phi3ForCausalLM",
        .title = "Phi-3"},
       {.arch = Arch::kOlmo2,
        .name = "olmo2",
        .model_type = "olmo2",
        .architecture = "Olmo2ForCausalLM",
        .title = "OLMo 2"},
       {.arch = Arch::kGemma2,
        .name = "gemma2",
        .model_type = "gemma2",
        .architecture = "Gemma2ForCausalLM",
        .title = "Gemma 2"},
       {.arch = Arch::kGemma3,
        .name = "gemma3",
        .model_type = "gemma3_text",
        .architecture = "Gemma3ForCausalLM",
        .title = "Gemma 3"}}};
  return kTable;
}

const Family& family_of(Arch arch) {
  for (const Family& family : families()) {
    if (family.arch == arch) return family;
  }
  ZG_ASSERT(false, "family {}", static_cast<int>(arch));
  return families().front();
}

std::string layers_with_head(Arch arch) {
  const FileNames& files = family_of(arch).files;
  return std::string(files.kept ? "" : files.model) + files.layers;
}

std::string family_names(const char* quote, const char* last) {
  std::string text;
  for (std::size_t i = 0; i < families().size(); ++i) {
    text += i == 0 ? "" : i + 1 == families().size() ? last : ", ";
    text += std::string(quote) + families()[i].name + quote;
  }
  return text;
}

}  // namespace model

const FamilyForm& form_of(Arch arch) {
  return model::family_of(arch).form;
}
const char* name_of(Arch arch) {
  return model::family_of(arch).name;
}
const char* title_of(Arch arch) {
  return model::family_of(arch).title;
}

bool ModelConfig::any_window() const {
  return std::find(block.windowed.begin(), block.windowed.end(), true) != block.windowed.end();
}

bool ModelConfig::layers_differ() const {
  const bool windows =
      any_window() && std::find(block.windowed.begin(), block.windowed.end(), false) != block.windowed.end();
  return windows || scores_by_layer;
}

std::int64_t ModelConfig::longest_sequence() const {
  std::int64_t longest = context;
  if (block.rope.scaling.kind == RopeScaling::Kind::kLongRope)
    longest = std::min(longest, block.rope.scaling.original);
  return longest;
}

}  // namespace zg
