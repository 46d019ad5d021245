#include "ziggurat/model/adapter_files.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>

#include "model/adapters.hpp"
#include "model/hf_text.hpp"
#include "model/safetensors_values.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kWeightsName = "adapter_model.safetensors";

// The prefix of the names of parameters in PEFT's files, where GPT-2's fused matrices are whole again
// (Param::name).
std::string prefix_of(Arch arch) {
  return std::string("base_model.model.") + (arch == Arch::kGpt2 ? "transformer." : "");
}

// Reads the keys of an adapter_config.json.
class ConfigReader {
 public:
  ConfigReader(const std::string& text, const std::string& where)
      : where_(where), object_(hf::parse_object(text, where)) {}

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
  // Keys that would change what is computed, and must be absent, null, false or empty.
  void demand_off(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      if (is_on(key)) wrong(key, "nothing: that is not supported");
    }
  }
  // A key that neither is read here nor is among `idle` may change what is computed, too.
  void demand_known(std::span<const std::string_view> read, std::span<const std::string_view> idle) const {
    const auto among = [](std::span<const std::string_view> list, std::string_view key) {
      return std::find(list.begin(), list.end(), key) != list.end();
    };
    for (const auto& item : object_.items()) {
      if (!is_on(item.key().c_str()) || among(read, item.key()) || among(idle, item.key())) continue;
      throw Error(Errc::kUsage, where_,
                  fmt::format("has the key {}, which is not known", hf::in_quotes(item.key())),
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

// Some ways to begin change the model itself (PiSSA, OLoRA, CorDA, LoftQ), beside which B A is meant then.
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

std::uint32_t read_modules(const ConfigReader& reader, const ModelConfig& model) {
  const json* value = reader.find("target_modules");
  const json names = value != nullptr && value->is_string() ? json::array({*value})
                     : value == nullptr                     ? json()
                                                            : *value;
  std::uint32_t bits = 0;
  if (!names.is_array() || names.empty()) reader.wrong("target_modules", "a list of names of modules");
  for (const json& one : names) {
    const std::string name = one.is_string() ? one.get<std::string>() : "";
    std::uint32_t found = 0;
    const model::AdapterList modules(model, model::AdapterList::Which::kAll);
    for (const model::Adapter& module : modules.all()) {
      if (name == "all-linear" || ends_in(module.path, name) || ends_in(name, module.path))
        found |= 1u << static_cast<int>(module.module);
    }
    if (found == 0) {
      reader.wrong("target_modules", fmt::format("names among {}, the modules of {}",
                                                 names_of(lora_modules(model)), name_of(model.arch)));
    }
    bits |= found;
  }
  return bits;
}

// Keys of PEFT's that say where a model comes from, how A and B began, or how they are used.
constexpr std::string_view kIdleKeys[] = {"task_type",          "base_model_name_or_path",
                                          "revision",           "inference_mode",
                                          "auto_mapping",       "eva_config",
                                          "peft_version",       "corda_config",
                                          "lora_ga_config",     "runtime_config",
                                          "loftq_config",       "layers_pattern",
                                          "megatron_core",      "qalora_group_size",
                                          "ensure_weight_tying"};

hf::Source source_of(const SafeTensors& file, const SafeTensors::Entry& entry) {
  return {&file, &entry, *hf::float_dtype(entry.dtype)};
}

}  // namespace

Lora parse_adapter_config(const std::string& json_text, const std::string& where, const ModelConfig& model) {
  const ConfigReader reader(json_text, where);
  const json* kind = reader.find("peft_type");
  if (kind == nullptr || *kind != "LORA") reader.wrong("peft_type", "\"LORA\"");
  reader.demand_off({"use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "rank_pattern",
                     "alpha_pattern", "layers_to_transform", "exclude_modules", "layer_replication",
                     "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
                     "megatron_config"});
  // Whether the modules' own matrices are [in, out], as PEFT knows of those of GPT-2 whatever this says.
  if (model.arch == Arch::kGpt2) {
    (void)reader.flag("fan_in_fan_out");
  } else {
    reader.demand_off({"fan_in_fan_out"});
  }
  if (const json* bias = reader.find("bias"); bias != nullptr && *bias != "none")
    reader.wrong("bias", "\"none\"");
  demand_plain_start(reader);
  Lora lora;
  const double rank = reader.number("r", 1);
  lora.rank = rank <= 1 << 24 ? static_cast<std::int64_t>(rank) : 0;
  if (static_cast<double>(lora.rank) != rank) reader.wrong("r", "a whole number, 1 or more");
  lora.alpha = reader.number("lora_alpha", 0);
  if (lora.alpha == 0) reader.wrong("lora_alpha", "a number above 0");
  lora.rslora = reader.flag("use_rslora");
  if (reader.find("lora_dropout") != nullptr) lora.dropout = reader.number("lora_dropout", 0);
  if (lora.dropout >= 1) reader.wrong("lora_dropout", "a number from 0 to below 1");
  lora.modules = read_modules(reader, model);
  static constexpr std::string_view kRead[] = {
      "peft_type",  "fan_in_fan_out", "bias",         "init_lora_weights", "r",
      "lora_alpha", "use_rslora",     "lora_dropout", "target_modules"};
  reader.demand_known(kRead, kIdleKeys);
  return lora;
}

Lora read_adapter_config(const std::string& directory, const ModelConfig& model) {
  const std::string path = directory + "/" + kConfigName;
  return parse_adapter_config(read_text_file(path, "the configuration of an adapter"), path, model);
}

std::string write_adapter_config(const Lora& lora, const std::string& base) {
  ordered_json out;
  const auto whole = static_cast<std::int64_t>(lora.alpha);
  out["peft_type"] = "LORA";
  out["task_type"] = "CAUSAL_LM";
  out["base_model_name_or_path"] = base;
  out["r"] = lora.rank;
  if (static_cast<double>(whole) == lora.alpha) {
    out["lora_alpha"] = whole;
  } else {
    out["lora_alpha"] = lora.alpha;
  }
  out["lora_dropout"] = lora.dropout;
  out["use_rslora"] = lora.rslora;
  out["target_modules"] = ordered_json::array();
  for (int m = 0; m < kLoraModules; ++m) {
    if (lora.has(static_cast<LoraModule>(m)))
      out["target_modules"].push_back(name_of(static_cast<LoraModule>(m)));
  }
  out["bias"] = "none";
  out["use_dora"] = false;
  out["fan_in_fan_out"] = lora.has(LoraModule::kCAttn) || lora.has(LoraModule::kAttnCProj) ||
                          lora.has(LoraModule::kCFc) || lora.has(LoraModule::kMlpCProj);
  out["inference_mode"] = true;
  out["init_lora_weights"] = true;
  for (const char* none : {"modules_to_save", "layers_to_transform", "layers_pattern"}) out[none] = nullptr;
  for (const char* empty : {"rank_pattern", "alpha_pattern"}) out[empty] = ordered_json::object();
  return out.dump(2) + "\n";
}

AdapterWeights::AdapterWeights(const std::string& directory, const ModelConfig& model)
    : lora_(read_adapter_config(directory, model)),
      prefix_(prefix_of(model.arch)),
      file_(directory + "/" + kWeightsName) {
  constexpr const char* kHint = "the adapter's two files and the model must belong together";
  ModelConfig adapted = model;
  adapted.lora = lora_;
  const model::AdapterList list(adapted);
  std::set<std::string> known;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    for (const model::Adapter& one : list.all()) {
      const std::string module =
          fmt::format("{}.{}.{}", model.arch == Arch::kGpt2 ? "h" : "model.layers", layer, one.path);
      for (const auto& [which, shape] : {std::pair("lora_A", std::vector<std::int64_t>{lora_.rank, one.in}),
                                         {"lora_B", std::vector<std::int64_t>{one.out, lora_.rank}}}) {
        const std::string name = prefix_ + module + "." + which + ".weight";
        const SafeTensors::Entry* entry = file_.find(name);
        if (entry == nullptr) throw Error(Errc::kUsage, file_.path(), "misses " + hf::in_quotes(name), kHint);
        if (entry->shape != shape) {
          throw Error(Errc::kUsage, file_.path(),
                      fmt::format("{} has the shape {}; the configuration and the model ask for {}",
                                  hf::in_quotes(name), hf::shape_text(entry->shape), hf::shape_text(shape)),
                      kHint);
        }
        if (!hf::float_dtype(entry->dtype)) {
          throw Error(Errc::kUsage, file_.path(),
                      fmt::format("{} has the dtype {}; F64, F32, F16 and BF16 can be read",
                                  hf::in_quotes(name), entry->dtype),
                      "convert the adapter to one of these");
        }
        known.insert(name);
      }
    }
  }
  for (const SafeTensors::Entry& entry : file_.entries()) {
    if (known.count(entry.name) != 0) continue;
    throw Error(Errc::kUsage, file_.path(), hf::in_quotes(entry.name) + " is no tensor of these adapters",
                kHint);
  }
}

const SafeTensors::Entry* AdapterWeights::find(const std::string& module, const char* which) const {
  return file_.find(prefix_ + module + which);
}

void AdapterWeights::read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const {
  const SafeTensors::Entry* entry = find(param.name, "");
  ZG_ASSERT(entry != nullptr, "no adapter {}", param.name);
  const hf::Source source = source_of(file_, *entry);
  param.for_runs(begin, end, [&](std::int64_t at, std::int64_t whole, std::int64_t n) {
    hf::read_values(source, whole, whole + n, out + at - begin);
  });
}

bool AdapterWeights::merge(const Param& param, std::int64_t begin, std::int64_t end, float* out) const {
  const std::string& name = param.name_in_files();
  constexpr std::string_view kWeight = ".weight";
  if (param.vector || param.adapter || begin == end || name.size() < kWeight.size()) return false;
  const std::string module = name.substr(0, name.size() - kWeight.size());
  const SafeTensors::Entry *a = find(module, ".lora_A.weight"), *b = find(module, ".lora_B.weight");
  if (a == nullptr || b == nullptr) return false;
  ZG_ASSERT(param.is_whole(), "{} is a part", param.name);
  const std::int64_t rank = lora_.rank, cols = param.cols;
  const std::int64_t first = begin / cols, last = (end - 1) / cols;  // rows, inclusive
  std::vector<float> all_a(static_cast<std::size_t>(rank * cols)),
      rows_b(static_cast<std::size_t>((last - first + 1) * rank));
  hf::read_values(source_of(file_, *a), 0, rank * cols, all_a.data());
  const std::int64_t row_in_file = param.file_row + first;
  hf::read_values(source_of(file_, *b), row_in_file * rank,
                  row_in_file * rank + static_cast<std::int64_t>(rows_b.size()), rows_b.data());
  add_adapter(all_a.data(), rows_b.data(), rank, cols, lora_.factor(), begin, end, out);
  return true;
}

void add_adapter(const float* a, const float* b, std::int64_t rank, std::int64_t cols, double factor,
                 std::int64_t begin, std::int64_t end, float* out) {
  if (begin == end) return;
  const std::int64_t first = begin / cols, last = (end - 1) / cols;  // rows, inclusive
  const auto times = static_cast<float>(factor);
  parallel_for(last - first + 1, 16, [&](std::int64_t from, std::int64_t to) {
    std::vector<float> sum(static_cast<std::size_t>(cols));
    for (std::int64_t r = from; r < to; ++r) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (std::int64_t k = 0; k < rank; ++k) {
        const float weight = b[r * rank + k];
        const float* const row = a + k * cols;
        for (std::int64_t c = 0; c < cols; ++c) sum[static_cast<std::size_t>(c)] += weight * row[c];
      }
      const std::int64_t at = (first + r) * cols;
      for (std::int64_t i = std::max(begin, at); i < std::min(end, at + cols); ++i)
        out[i - begin] += times * sum[static_cast<std::size_t>(i - at)];
    }
  });
}

namespace {

struct Saved {
  const Unit* unit;
  const Param* param;
};

std::string header_of(const std::vector<Saved>& all, const std::string& prefix) {
  ordered_json header;
  header["__metadata__"]["format"] = "pt";
  std::int64_t at = 0;
  for (const auto& [unit, param] : all) {
    const std::int64_t bytes = param->whole_count() * std::int64_t{sizeof(float)};
    header[prefix + param->name] = {{"dtype", "F32"},
                                    {"shape", {param->whole_rows, param->whole_cols}},
                                    {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = header.dump();
  text.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  const std::uint64_t length = text.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + text;
}

}  // namespace

void save_adapters(const std::string& directory, const Model& model, const std::string& base,
                   const ReadParam& read) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw Error(Errc::kIo, directory, "cannot be created: " + errno_text(error.value()),
                "check the path and its permissions");
  }
  std::vector<Saved> all;
  std::int64_t bytes = 0;
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) {
      if (!param.adapter) continue;
      all.push_back({&unit, &param});
      bytes += param.whole_count() * std::int64_t{sizeof(float)};
    }
  }
  const std::string header = header_of(all, prefix_of(model.config().arch)),
                    config = write_adapter_config(model.config().lora, base);
  auto at = static_cast<std::int64_t>(header.size());
  OutputFile weights(directory + "/" + kWeightsName, at + bytes);
  weights.write_at(0, header.data(), at);
  std::vector<float> values;
  for (const auto& [unit, param] : all) {
    const std::int64_t count = param->whole_count();
    values.resize(static_cast<std::size_t>(count));
    read(*unit, *param, 0, count, values.data());
    weights.write_at(at, values.data(), count * std::int64_t{sizeof(float)});
    at += count * std::int64_t{sizeof(float)};
  }
  weights.sync();
  OutputFile text(directory + "/" + kConfigName, static_cast<std::int64_t>(config.size()));
  text.write_at(0, config.data(), static_cast<std::int64_t>(config.size()));
  text.sync();
  weights.commit(), text.commit();
  sync_directory(directory);
}

}  // namespace zg
