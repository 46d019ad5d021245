// The list of families, and the values of a configuration that follow from its other values.
#include <algorithm>
#include <iterator>
#include <map>

#include "model/families/family.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace model {

std::span<const Family* const> families() {
  static const Family* const kAll[] = {
      &gpt2(),    &llama(),    &mistral(),    &qwen2(),      &qwen3(),       &phi3(),       &olmo2(),
      &gemma2(),  &gemma3(),   &mixtral(),    &qwen2_moe(),  &qwen3_moe(),   &olmoe(),      &granite_moe(),
      &gpt_oss(), &glm4_moe(), &ernie4_moe(), &minimax_m2(), &deepseek_v2(), &deepseek_v3()};
  static_assert(std::size(kAll) == std::size(kFamilies));
  return kAll;
}

const Family& family_of(Arch arch) {
  for (const Family* const family : families()) {
    if (family->arch == arch) return *family;
  }
  ZG_ASSERT(false, "family {}", static_cast<int>(arch));
  return gpt2();
}

std::string layers_with_head(const Family& family) {
  const FileNames& files = family.files;
  return std::string(files.kept ? "" : files.model) + files.layers;
}

std::string family_names(const char* quote, const char* last) {
  std::string text;
  for (std::size_t i = 0; i < families().size(); ++i) {
    text += i == 0 ? "" : i + 1 == families().size() ? last : ", ";
    text += std::string(quote) + families()[i]->name + quote;
  }
  return text;
}

}  // namespace model

const std::vector<ModelKey>& model_keys(Arch arch) {
  static const std::map<Arch, std::vector<ModelKey>> kKeys = [] {
    std::map<Arch, std::vector<ModelKey>> all;
    for (const model::Family* const family : model::families()) all[family->arch] = family->keys(*family);
    return all;
  }();
  return kKeys.at(arch);
}

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

LatentHeads ModelConfig::latent_heads() const {
  ZG_ASSERT(block.latent.has_value(), "{} has no latent attention", name_of(arch));
  return {heads, head_size - block.latent->rope, block.latent->rope, block.latent->value_size};
}

std::int64_t ModelConfig::experts_in_unit() const {
  if (experts.in_unit > 0) return std::min(experts.in_unit, experts.count);
  constexpr std::int64_t kElements = 4 << 20;
  const std::int64_t each = 3 * width * experts.inner;
  return std::clamp<std::int64_t>((kElements + each - 1) / each, 1, experts.count);
}

std::int64_t ModelConfig::longest_sequence() const {
  std::int64_t longest = context;
  if (block.rope.scaling.kind == RopeScaling::Kind::kLongRope)
    longest = std::min(longest, block.rope.scaling.original);
  return longest;
}

}  // namespace zg
