#include "train/adapter_setup.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/model/adapter_files.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

namespace {

// PEFT cannot compute dropout for adapters of parameters, so its users could not load what such a run has
// made.
void check_dropout(const Lora& lora) {
  if (lora.experts_as() == ExpertsAs::kModules || lora.dropout == 0) return;
  throw Error(
      Errc::kUsage, "lora.dropout",
      fmt::format("is {}, and adapters of parameters that hold all experts of a layer have none, as in PEFT",
                  lora.dropout),
      "remove it, or adapt the experts' modules (lora.target)");
}

}  // namespace

Lora lora_of(const RunConfig& config, const ModelConfig& model) {
  const LoraConfig& asked = config.lora;
  if (!asked.on()) return {};
  if (config.model_from.empty()) {
    throw Error(Errc::kUsage, "lora",
                "the model is new, and adapters are left beside one that is not trained",
                "name a trained model (model.from), or remove the section");
  }
  if (!asked.from.empty()) {
    Lora lora = AdapterWeights(asked.from, model).lora();
    lora.dropout = asked.dropout;
    check_dropout(lora);
    return lora;
  }
  Lora lora{.rank = asked.rank,
            .alpha = asked.alpha.value_or(static_cast<double>(asked.rank)),
            .rslora = asked.rslora,
            .dropout = asked.dropout};
  const ExpertsAs experts = asked.parameters.empty() ? ExpertsAs::kModules : ExpertsAs::kParameters;
  for (const std::string& target : asked.targets) {
    const std::uint32_t found = match_modules(model, target, experts);
    if (found == 0) {
      throw Error(Errc::kUsage, "lora.target",
                  fmt::format("\"{}\" matches no module of {}", target, name_of(model.arch)),
                  "its modules are " + names_of(lora_modules(model, experts)) + "; * matches any text");
    }
    lora.modules |= found;
  }
  for (const std::string& parameter : asked.parameters) {
    const std::uint32_t found = match_parameters(model, parameter);
    if (found == 0) {
      const std::vector<LoraModule> there = lora_parameters(model);
      throw Error(Errc::kUsage, "lora.target_parameters",
                  there.empty() ? fmt::format("is given, and {} has no experts", name_of(model.arch))
                                : fmt::format("\"{}\" matches no parameter of experts of {}", parameter,
                                              name_of(model.arch)),
                  there.empty() ? "name the modules to adapt with lora.target"
                                : "these are " + names_of(there) + "; * matches any text");
    }
    lora.modules |= found;
  }
  check_dropout(lora);
  return lora;
}

namespace {

// Checks that what this rank and its tiles hold of a coded parameter can be kept in codes.
void check_parts_of(const ParamCode& code, const Unit& unit, const Param& p) {
  for (const Tile& tile : unit.tiles) {
    const std::int64_t first = std::max(p.offset, tile.first),
                       last = std::min(p.offset + p.count(), tile.first + tile.count);
    if (first >= last) continue;
    const CodePart part = code_part(p, (first - p.offset) / p.cols, (last - first) / p.cols);
    if (code_of_part(code, part)) continue;
    throw Error(
        Errc::kUsage, "lora.base",
        fmt::format("is \"codes\", and {} of {} columns is shared by ranks or tiles {}", p.name, p.whole_cols,
                    code.groups ? "although its columns are in act order"
                                : "with borders within few codes of each other"),
        "set lora.base to \"elements\", or choose another parallel.tensor");
  }
}

}  // namespace

std::vector<std::vector<std::optional<ParamCode>>> codes_of_base(const RunConfig& config,
                                                                 const Model& model) {
  const HfWeights weights(config.model_from, model);
  std::vector<std::vector<std::optional<ParamCode>>> codes;
  bool any = false;
  for (const Unit& unit : model.units()) {
    codes.emplace_back();
    for (const Param& p : unit.params) {
      codes.back().push_back(p.adapter ? std::nullopt : weights.code_of(p));
      if (!codes.back().back()) continue;
      any = true;
      check_parts_of(*codes.back().back(), unit, p);
    }
  }
  if (!any) {
    throw Error(Errc::kUsage, "lora.base",
                fmt::format("is \"codes\", and {} has no matrices in 4 or 8 bits that can be kept so",
                            config.model_from),
                "write such a model (ziggurat quantize), or remove the key");
  }
  return codes;
}

}  // namespace zg
