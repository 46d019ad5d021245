// What the families are called, and what of a configuration follows from others of its values.
#include "model/families.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace model {

const std::array<Family, std::size(kFamilies)>& families() {
  static constexpr std::array<Family, std::size(kFamilies)> kTable{
      {{Arch::kGpt2, "gpt2", "gpt2", "GPT2LMHeadModel", "GPT-2"},
       {Arch::kLlama, "llama", "llama", "LlamaForCausalLM", "Llama"},
       {Arch::kMistral, "mistral", "mistral", "MistralForCausalLM", "Mistral"},
       {Arch::kQwen2, "qwen2", "qwen2", "Qwen2ForCausalLM", "Qwen2"},
       {Arch::kQwen3, "qwen3", "qwen3", "Qwen3ForCausalLM", "Qwen3"},
       {Arch::kPhi3, "phi3", "phi3", "Phi3ForCausalLM", "Phi-3"},
       {Arch::kOlmo2, "olmo2", "olmo2", "Olmo2ForCausalLM", "OLMo 2"},
       {Arch::kGemma2, "gemma2", "gemma2", "Gemma2ForCausalLM", "Gemma 2"},
       {Arch::kGemma3, "gemma3", "gemma3_text", "Gemma3ForCausalLM", "Gemma 3"}}};
  return kTable;
}

const Family& family_of(Arch arch) {
  for (const Family& family : families()) {
    if (family.arch == arch) return family;
  }
  ZG_ASSERT(false, "family {}", static_cast<int>(arch));
  return families().front();
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
  return windows || (arch == Arch::kGpt2 && scores_by_layer);
}

std::int64_t ModelConfig::longest_sequence() const {
  std::int64_t longest = context;
  if (arch != Arch::kGpt2 && block.rope.scaling.kind == RopeScaling::Kind::kLongRope)
    longest = std::min(longest, block.rope.scaling.original);
  return longest;
}

}  // namespace zg
