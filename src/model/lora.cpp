#include "ziggurat/model/lora.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "model/adapters.hpp"
#include "model/families/family.hpp"

namespace zg {

const char* name_of(LoraModule module) {
  static constexpr const char* kNames[kLoraModules] = {"q_proj",
                                                       "k_proj",
                                                       "v_proj",
                                                       "qkv_proj",
                                                       "o_proj",
                                                       "gate_proj",
                                                       "up_proj",
                                                       "gate_up_proj",
                                                       "down_proj",
                                                       "c_attn",
                                                       "attn.c_proj",
                                                       "c_fc",
                                                       "mlp.c_proj",
                                                       "shared_expert.gate_proj",
                                                       "shared_expert.up_proj",
                                                       "shared_expert.down_proj",
                                                       "experts.*.gate_proj",
                                                       "experts.*.up_proj",
                                                       "experts.*.down_proj",
                                                       "experts.*.w1",
                                                       "experts.*.w2",
                                                       "experts.*.w3",
                                                       "experts.gate_up_proj",
                                                       "experts.down_proj",
                                                       "q_a_proj",
                                                       "q_b_proj",
                                                       "kv_a_proj_with_mqa",
                                                       "kv_b_proj"};
  return kNames[static_cast<std::size_t>(module)];
}

namespace model {

std::vector<ModulePath> module_paths(const ModelConfig& model, ExpertsAs experts) {
  std::vector<ModulePath> paths;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const AdapterList list(model, layer, AdapterList::Which::kAll);
    for (const Adapter& one : list.all()) {
      const bool known = std::any_of(paths.begin(), paths.end(),
                                     [&](const ModulePath& other) { return other.module == one.module; });
      if (!known) paths.push_back({one.module, one.path()});
    }
  }
  if (!model.experts.on() || experts == ExpertsAs::kParameters) return paths;
  const AdapterList list = AdapterList::of_expert(model, AdapterList::Which::kAll);
  for (const Adapter& one : list.all()) {
    if ((bit_of(one.module) & kExpertModules) != 0)
      paths.push_back(
          {one.module, fmt::format("{}.*.{}", family_of(model.arch).files.block.experts, one.path())});
  }
  return paths;
}

std::vector<ModulePath> parameter_paths(const ModelConfig& model) {
  if (!model.experts.on() || family_of(model.arch).files.block.fused_experts) return {};
  const std::string path = family_of(model.arch).files.block.all_experts;
  return {{LoraModule::kAllExpertsGateUp, path + ".gate_up_proj"},
          {LoraModule::kAllExpertsDown, path + ".down_proj"}};
}

}  // namespace model

namespace {

std::vector<LoraModule> modules_of(const std::vector<model::ModulePath>& paths) {
  std::vector<LoraModule> modules;
  for (const model::ModulePath& one : paths) modules.push_back(one.module);
  return modules;
}

// Whether a pattern matches the path, or a part of it that begins after a dot.
bool matches_end(const std::string& pattern, const std::string& path) {
  for (std::size_t at = 0;; ++at) {
    if (fnmatch(pattern.c_str(), path.c_str() + at, 0) == 0) return true;
    at = path.find('.', at);
    if (at == path.npos) return false;
  }
}

std::uint32_t match(const std::vector<model::ModulePath>& paths, const std::string& pattern) {
  std::uint32_t bits = 0;
  for (const model::ModulePath& one : paths) bits |= matches_end(pattern, one.path) ? bit_of(one.module) : 0;
  return bits;
}

}  // namespace

std::vector<LoraModule> lora_modules(const ModelConfig& model, ExpertsAs experts) {
  return modules_of(model::module_paths(model, experts));
}

std::vector<LoraModule> lora_parameters(const ModelConfig& model) {
  return modules_of(model::parameter_paths(model));
}

std::uint32_t match_modules(const ModelConfig& model, const std::string& pattern, ExpertsAs experts) {
  return match(model::module_paths(model, experts), pattern == "all-linear" ? "*" : pattern);
}

std::uint32_t match_parameters(const ModelConfig& model, const std::string& pattern) {
  return match(model::parameter_paths(model), pattern);
}

std::string shape_of(const Lora& lora) {
  if (!lora.on()) return "none";
  std::vector<LoraModule> modules;
  for (int m = 0; m < kLoraModules; ++m) {
    if (lora.has(static_cast<LoraModule>(m))) modules.push_back(static_cast<LoraModule>(m));
  }
  return fmt::format("rank {}, of {}", lora.rank, names_of(modules));
}

std::string arithmetic_of(const Lora& lora) {
  if (!lora.on()) return "none";
  return fmt::format("alpha {}{}, dropout {}", lora.alpha, lora.rslora ? " (rslora)" : "", lora.dropout);
}

namespace {

// The rest of a text that is taken piece by piece.
class Taken {
 public:
  explicit Taken(std::string_view text) : text_(text) {}
  bool empty() const { return text_.empty(); }
  bool take(std::string_view what) {
    if (text_.substr(0, what.size()) != what) return false;
    text_.remove_prefix(what.size());
    return true;
  }
  template <class T>
  bool number(T& out) {
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), out);
    text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
    return error == std::errc();
  }

 private:
  std::string_view text_;
};

}  // namespace

std::optional<Lora> parse_lora(const std::string& shape, const std::string& arithmetic) {
  Lora lora;
  Taken first(shape), second(arithmetic);
  if (!first.take("rank ") || !first.number(lora.rank) || !first.take(", of ")) return {};
  while (!first.empty()) {
    const std::uint32_t before = lora.modules;
    for (int m = 0; m < kLoraModules && lora.modules == before; ++m) {
      if (first.take(name_of(static_cast<LoraModule>(m)))) lora.modules |= bit_of(static_cast<LoraModule>(m));
    }
    if (lora.modules == before || !(first.empty() || first.take(", ") || first.take(" and "))) return {};
  }
  if (!second.take("alpha ") || !second.number(lora.alpha)) return {};
  lora.rslora = second.take(" (rslora)");
  if (!second.take(", dropout ") || !second.number(lora.dropout) || !second.empty()) return {};
  return lora;
}

std::string names_of(const std::vector<LoraModule>& modules) {
  std::string text;
  for (const LoraModule& module : modules) {
    if (!text.empty()) text += &module == &modules.back() ? " and " : ", ";
    text += name_of(module);
  }
  return text;
}

}  // namespace zg
