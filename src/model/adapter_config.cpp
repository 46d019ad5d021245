#include "model/adapter_config.hpp"
#include "model/families/family.hpp"

#include <algorithm>
#include <cctype>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>

#include "model/adapter_tensors.hpp"
#include "model/adapters.hpp"
#include "model/hf_text.hpp"
#include "model/name_pattern.hpp"

namespace zg::hf {
namespace {

using nlohmann::json;

// Reads the keys of an adapter_config.json.
class ConfigReader {
 public:
  ConfigReader(const std::string& text, const std::string& where)
      : where_(where), object_(parse_object(text, where)) {}

  // Null where the key is absent.
  const json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  [[noreturn]] void wrong(const char* key, const std::string& expected) const {
    const json* value = find(key);
    const std::string found =
        value == nullptr ? "nothing" : value->dump(-1, ' ', true, json::error_handler_t::replace);
    throw Error(Errc::kUsage, where_,
                fmt::format("\"{}\" is {}, expected {}", key, found.substr(0, 100), expected),
                "save the adapter again, or make it with this program");
  }
  double number(const char* key, double least) const {
    const json* value = find(key);
    if (value == nullptr || !value->is_number() || !(value->get<double>() >= least)) {
      wrong(key, fmt::format("a number, {} or more", least));
    }
    return value->get<double>();
  }
  bool flag(const char* key) const {
    const json* value = find(key);
    if (value != nullptr && !value->is_boolean()) wrong(key, "true or false");
    return value != nullptr && value->get<bool>();
  }
  // Requires that these keys, which would change what is computed, are absent, null, false or empty.
  void demand_off(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      if (is_on(key)) wrong(key, "nothing: that is not supported");
    }
  }
  // Refuses keys that are in neither `read` nor `idle`: they may change what is computed.
  void demand_known(std::span<const std::string_view> read, std::span<const std::string_view> idle) const {
    const auto among = [](std::span<const std::string_view> list, std::string_view key) {
      return std::find(list.begin(), list.end(), key) != list.end();
    };
    for (const auto& item : object_.items()) {
      if (!is_on(item.key().c_str()) || among(read, item.key()) || among(idle, item.key())) continue;
      throw Error(Errc::kUsage, where_,
                  fmt::format("has the key {}, which is not known", in_quotes(item.key())),
                  "it may change what the adapter computes; where it does not, remove it");
    }
  }
  const std::string& where() const { return where_; }

 private:
  bool is_on(const char* key) const {
    const json* value = find(key);
    return value != nullptr && *value != false && *value != 0 && !value->empty();
  }

  const std::string where_;
  const json object_;
};

// Whether a dotted name ends in another: "self_attn.q_proj" in "q_proj".
bool ends_in(const std::string& name, const std::string& end) {
  const std::size_t n = name.size(), m = end.size();
  return name == end || (n > m && name[n - m - 1] == '.' && name.compare(n - m, m, end) == 0);
}

// Some initialisations (PiSSA, OLoRA, CorDA, LoftQ) also change the model's own matrices, to which B A must
// then be added. They are refused.
void demand_plain_start(const ConfigReader& reader) {
  const json* start = reader.find("init_lora_weights");
  if (start == nullptr || start->is_boolean()) return;
  for (const char* plain : {"gaussian", "eva", "orthogonal"}) {
    if (*start == plain) return;
  }
  reader.wrong("init_lora_weights",
               "true, false, \"gaussian\", \"eva\" or \"orthogonal\": others change the model (save it "
               "converted to plain LoRA, with path_initial_model_for_weight_conversion)");
}

// The value of "target_modules" and similar keys: a regular expression, or a list of names.
class Names {
 public:
  Names(const ConfigReader& reader, const char* key) : reader_(reader), key_(key) {
    const json& value = *reader.find(key);
    if (value.is_string() && !is_all(value.get<std::string>())) {
      try {
        pattern_.emplace(value.get<std::string>());
      } catch (const std::invalid_argument& e) {
        reader.wrong(key, fmt::format("a regular expression of Python's: this one {}", e.what()));
      }
      return;
    }
    const json list = value.is_string() ? json::array({value}) : value;
    if (!list.is_array() || list.empty()) reader.wrong(key, "a list of names of modules, or a pattern");
    for (const json& one : list) {
      if (!one.is_string() || one.get<std::string>().empty()) reader.wrong(key, "a list of names of modules");
      names_.push_back(one.get<std::string>());
    }
  }
  bool is_pattern() const { return pattern_.has_value(); }
  // linear: whether "all-linear" includes this module.
  bool has(const std::string& module, bool linear) const {
    if (!pattern_) {
      return std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
        return is_all(name) ? linear : ends_in(module, name);
      });
    }
    try {
      return pattern_->matches(module);
    } catch (const std::invalid_argument& e) {
      reader_.wrong(key_, fmt::format("a simpler expression: this one {}", e.what()));
    }
  }

 private:
  static bool is_all(std::string name) {
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return name == "all-linear";
  }
  const ConfigReader& reader_;
  const char* const key_;
  std::optional<NamePattern> pattern_;
  std::vector<std::string> names_;
};

// "layers_to_transform" and "layers_pattern": the numbers of the adapted layers. Empty: all layers.
std::optional<std::set<std::int64_t>> read_layers(const ConfigReader& reader, const ModelConfig& model) {
  constexpr const char *kLayers = "layers_to_transform", *kPattern = "layers_pattern";
  const json* value = reader.find(kLayers);
  const bool given = value != nullptr && !(value->is_array() && value->empty());
  const json* patterns = reader.find(kPattern);
  const bool named = patterns != nullptr && !patterns->empty();
  if (named && !given) reader.wrong(kPattern, "nothing without \"layers_to_transform\"");
  if (!given) return std::nullopt;
  std::set<std::int64_t> layers;
  for (const json& one : value->is_array() ? *value : json::array({*value})) {
    if (!one.is_number_unsigned() || one.get<std::uint64_t>() >= static_cast<std::uint64_t>(model.layers))
      reader.wrong(kLayers, fmt::format("whole numbers below {}, the layers of the model", model.layers));
    layers.insert(one.get<std::int64_t>());
  }
  if (!named) return layers;
  const std::string whole = model::layers_with_head(model::family_of(model.arch)),
                    last = whole.substr(whole.find('.') + 1);
  for (const json& one : patterns->is_array() ? *patterns : json::array({*patterns})) {
    if (!one.is_string()) reader.wrong(kPattern, "a pattern, or a list of such");
    try {
      const NamePattern pattern(one.get<std::string>());
      if (pattern.matches(last) || pattern.matches(whole)) return layers;
    } catch (const std::invalid_argument& e) {
      reader.wrong(kPattern, fmt::format("a regular expression of Python's: this one {}", e.what()));
    }
  }
  reader.wrong(kPattern, fmt::format("\"{}\", the name of the model's layers", last));
}

// Refuses modules that PEFT can adapt and this program cannot.
void refuse_outside(const Names& targets, const std::optional<Names>& without, const ConfigReader& reader,
                    const ModelConfig& model) {
  const model::Family& family = model::family_of(model.arch);
  const std::string prefix = family.files.kept ? "" : family.files.model, table = family.files.embedding;
  std::vector<std::string> outside{prefix + table.substr(0, table.rfind('.')), "lm_head"};
  if (!family.form.rotates) outside.push_back(prefix + "wpe");
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    if (!model.has_experts(layer)) continue;
    for (const char* router : {family.files.block.router, family.files.block.shared_gate})
      outside.push_back(fmt::format("{}.{}.{}", model::layers_with_head(family), layer, router));
  }
  for (const std::string& name : outside) {
    if (!targets.has(name, false) || (without && without->has(name, false))) continue;
    reader.wrong("target_modules", fmt::format("modules of the layers: it names {}, too, which has no "
                                               "adapters here,",
                                               name));
  }
}

// The layers' paths in names of modules: "model.layers.3.".
std::string layer_path(const ModelConfig& model, std::int64_t layer) {
  return fmt::format("{}.{}.", model::layers_with_head(model::family_of(model.arch)), layer);
}

// "target_parameters": the bits of the adapted parameters, for each layer. Empty: there is no such key.
std::vector<std::uint32_t> read_parameters(const ConfigReader& reader, const ModelConfig& model) {
  constexpr const char* kKey = "target_parameters";
  const json* value = reader.find(kKey);
  if (value == nullptr || value->empty()) return {};
  const std::vector<model::ModulePath> parameters = model::parameter_paths(model);
  std::string there;
  for (const model::ModulePath& one : parameters) there += (there.empty() ? "" : " and ") + one.path;
  const std::string expected =
      parameters.empty()
          ? fmt::format("nothing: {} has no parameters that hold all experts of a layer", name_of(model.arch))
          : fmt::format("a list of names among {}", there);
  if (!value->is_array()) reader.wrong(kKey, expected);
  std::vector<std::uint32_t> layers(static_cast<std::size_t>(model.layers));
  for (const json& name : *value) {
    bool found = false;
    for (std::int64_t layer = 0; name.is_string() && layer < model.layers; ++layer) {
      for (const model::ModulePath& one : parameters) {
        if (!model.has_experts(layer) ||
            !ends_in(layer_path(model, layer) + one.path, name.get<std::string>()))
          continue;
        found = true;
        layers[static_cast<std::size_t>(layer)] |= bit_of(one.module);
      }
    }
    if (!found) reader.wrong(kKey, expected);
  }
  return layers;
}

// The bits of the adapted modules, for each layer. experts: whether the matrices of experts are modules.
std::vector<std::uint32_t> read_modules(const ConfigReader& reader, const ModelConfig& model,
                                        ExpertsAs experts) {
  constexpr const char* kKey = "target_modules";
  const json* value = reader.find(kKey);
  const bool alone = experts == ExpertsAs::kParameters && (value == nullptr || value->empty());
  if (alone) return std::vector<std::uint32_t>(static_cast<std::size_t>(model.layers));
  if (value == nullptr) reader.wrong(kKey, "a list of names of modules");
  const Names targets(reader, kKey);
  std::optional<Names> without;
  if (const json* excluded = reader.find("exclude_modules"); excluded != nullptr && !excluded->empty())
    without.emplace(reader, "exclude_modules");
  refuse_outside(targets, without, reader, model);
  const auto only = read_layers(reader, model);
  if (only && targets.is_pattern())
    reader.wrong("layers_to_transform", "nothing beside a \"target_modules\" that is a regular expression");
  const auto has = [&](std::int64_t layer, const std::string& path) {
    const std::string name = layer_path(model, layer) + path;
    return (!only || only->count(layer) != 0) && targets.has(name, true) &&
           !(without && without->has(name, true));
  };
  std::vector<std::uint32_t> layers;
  std::uint32_t all = 0;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    std::uint32_t bits = 0;
    const model::AdapterList block(model, layer, model::AdapterList::Which::kAll);
    for (const model::Adapter& one : block.all()) bits |= has(layer, one.path()) ? bit_of(one.module) : 0;
    if (experts == ExpertsAs::kModules && model.has_experts(layer)) {
      const model::AdapterList expert = model::AdapterList::of_expert(model, model::AdapterList::Which::kAll);
      for (const model::Adapter& one : expert.all()) {
        if ((bit_of(one.module) & kExpertModules) == 0) continue;
        const auto adapted = [&](std::int64_t e) {
          return has(layer, model::expert_path(model, e) + "." + one.path());
        };
        const bool first = adapted(0);
        for (std::int64_t e = 1; e < model.experts.count; ++e) {
          if (adapted(e) == first) continue;
          reader.wrong(kKey,
                       fmt::format("the {} of all experts of layer {}, or of none: of experts 0 and {} it "
                                   "names one",
                                   one.path(), layer, e));
        }
        bits |= first ? bit_of(one.module) : 0;
      }
    }
    layers.push_back(bits), all |= bits;
  }
  if (all == 0) {
    reader.wrong(kKey, fmt::format("names among {}, the modules of {}",
                                   names_of(lora_modules(model, experts)), name_of(model.arch)));
  }
  return layers;
}

// PEFT's keys for the origin of a model, the initialisation of A and B, or their use, which do not matter
// here.
constexpr std::string_view kIdleKeys[] = {"task_type",         "base_model_name_or_path",
                                          "revision",          "inference_mode",
                                          "auto_mapping",      "eva_config",
                                          "peft_version",      "corda_config",
                                          "lora_ga_config",    "runtime_config",
                                          "loftq_config",      "megatron_core",
                                          "qalora_group_size", "ensure_weight_tying"};

}  // namespace

AdapterConfig parse_adapters(const std::string& json_text, const std::string& where,
                             const ModelConfig& model) {
  const ConfigReader reader(json_text, where);
  const json* kind = reader.find("peft_type");
  if (kind == nullptr || *kind != "LORA") reader.wrong("peft_type", "\"LORA\"");
  reader.demand_off({"use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "rank_pattern",
                     "alpha_pattern", "layer_replication", "trainable_token_indices",
                     "alora_invocation_tokens", "megatron_config"});
  // "fan_in_fan_out": the modules' own matrices are [in, out]. For GPT-2 PEFT ignores this key's value.
  if (model.form().joint_qkv) {
    (void)reader.flag("fan_in_fan_out");
  } else {
    reader.demand_off({"fan_in_fan_out"});
  }
  if (const json* bias = reader.find("bias"); bias != nullptr && *bias != "none")
    reader.wrong("bias", "\"none\"");
  demand_plain_start(reader);
  AdapterConfig config;
  Lora& lora = config.lora;
  const double rank = reader.number("r", 1);
  lora.rank = rank <= 1 << 24 ? static_cast<std::int64_t>(rank) : 0;
  if (static_cast<double>(lora.rank) != rank) reader.wrong("r", "a whole number, 1 or more");
  lora.alpha = reader.number("lora_alpha", 0);
  lora.rslora = reader.flag("use_rslora");
  // The factor of adapters is a float.
  if (!(lora.factor() > 0) || lora.factor() > std::numeric_limits<float>::max())
    reader.wrong("lora_alpha", "a number above 0 that fp32 holds");
  if (reader.find("lora_dropout") != nullptr) lora.dropout = reader.number("lora_dropout", 0);
  if (lora.dropout >= 1) reader.wrong("lora_dropout", "a number from 0 to below 1");
  const std::vector<std::uint32_t> parameters = read_parameters(reader, model);
  if (!parameters.empty() && lora.dropout > 0)
    reader.wrong("lora_dropout", "0, as \"target_parameters\" ask for");
  config.layers =
      read_modules(reader, model, parameters.empty() ? ExpertsAs::kModules : ExpertsAs::kParameters);
  for (std::size_t layer = 0; layer < parameters.size(); ++layer) config.layers[layer] |= parameters[layer];
  for (const std::uint32_t bits : config.layers) lora.modules |= bits;
  static constexpr std::string_view kRead[] = {"peft_type",
                                               "fan_in_fan_out",
                                               "bias",
                                               "init_lora_weights",
                                               "r",
                                               "lora_alpha",
                                               "use_rslora",
                                               "lora_dropout",
                                               "target_modules",
                                               "layers_to_transform",
                                               "layers_pattern",
                                               "exclude_modules",
                                               "target_parameters"};
  reader.demand_known(kRead, kIdleKeys);
  return config;
}

}  // namespace zg::hf
