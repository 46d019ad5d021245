#include "ziggurat/model/adapter_files.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "model/adapter_config.hpp"
#include "model/adapter_tensors.hpp"
#include "model/adapters.hpp"
#include "model/families/family.hpp"
#include "model/foreign_files.hpp"
#include "model/hf_text.hpp"
#include "model/safetensors_values.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

using nlohmann::ordered_json;

constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kWeightsName = "adapter_model.safetensors";
constexpr const char* kTogether = "the adapter's two files and the model must belong together";

// The prefix before Param::name in PEFT's files, which use the names of a model with a head.
std::string prefix_of(Arch arch) {
  const model::FileNames& files = model::family_of(arch).files;
  return std::string("base_model.model.") + (files.kept ? "" : files.model);
}

std::string weights_of(const std::string& directory) {
  const std::string path = directory + "/" + kWeightsName;
  if (!hf::is_there(path)) hf::refuse_without_adapter(directory, kWeightsName);
  return path;
}

hf::AdapterConfig read_adapters(const std::string& directory, const ModelConfig& model) {
  const std::string path = directory + "/" + kConfigName;
  if (!hf::is_there(path)) hf::refuse_without_adapter(directory, kConfigName);
  return hf::parse_adapters(hf::read_json_text(path, "the configuration of an adapter"), path, model);
}

// In transformers since version 5 names such as gate_proj do not reach experts, which are no modules there.
// So where the file has no tensor of experts, such names are of the other modules alone.
void leave_out_experts(hf::AdapterConfig& config, const SafeTensors& file) {
  const bool experts = std::any_of(file.entries().begin(), file.entries().end(), [](const auto& entry) {
    return entry.name.find(".experts.") != entry.name.npos;
  });
  if (experts || (config.lora.modules & ~kExpertModules) == 0) return;
  config.lora.modules &= ~kExpertModules;
  for (std::uint32_t& bits : config.layers) bits &= ~kExpertModules;
}

hf::Source source_of(const SafeTensors& file, const SafeTensors::Entry& entry) {
  return {&file, &entry, *hf::float_dtype(entry.dtype)};
}

}  // namespace

Lora parse_adapter_config(const std::string& json_text, const std::string& where, const ModelConfig& model) {
  return hf::parse_adapters(json_text, where, model).lora;
}

Lora read_adapter_config(const std::string& directory, const ModelConfig& model) {
  return read_adapters(directory, model).lora;
}

namespace {

// The names of the adapted modules, such that PEFT, which compares the ends of names, finds these and no
// others.
ordered_json target_modules(const ModelConfig& model) {
  const Lora& lora = model.lora;
  const std::vector<model::ModulePath> there = model::module_paths(model, lora.experts_as());
  const auto last_of = [](const model::ModulePath& one) { return one.path.substr(one.path.rfind('.') + 1); };
  ordered_json names = ordered_json::array();
  const auto add = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const model::ModulePath& one : there) {
    if (!lora.has(one.module)) continue;
    const std::string last = last_of(one);
    const bool all = std::all_of(there.begin(), there.end(), [&](const model::ModulePath& other) {
      return lora.has(other.module) || last_of(other) != last;
    });
    const std::size_t number = one.path.find('*');
    if (!model.experts.on()) {
      add(name_of(one.module));
    } else if (all) {
      add(last);
    } else if (number == one.path.npos) {
      add(one.path);
    } else {
      for (std::int64_t e = 0; e < model.experts.count; ++e)
        add(std::string(one.path).replace(number, 1, std::to_string(e)));
    }
  }
  return names;
}

}  // namespace

std::string write_adapter_config(const ModelConfig& model, const std::string& base) {
  const Lora& lora = model.lora;
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
  out["target_modules"] = target_modules(model);
  if (lora.experts_as() == ExpertsAs::kParameters) {
    out["target_parameters"] = ordered_json::array();
    for (const model::ModulePath& one : model::parameter_paths(model)) {
      if (lora.has(one.module)) out["target_parameters"].push_back(one.path);
    }
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

std::optional<AdapterOfParam> adapter_of(const ModelConfig& model, const Param& param) {
  constexpr std::string_view kWeight = ".weight";
  const std::string& name = param.name_in_files();
  if (param.vector || param.adapter || !name.ends_with(kWeight)) return {};
  AdapterOfParam of{name.substr(0, name.size() - kWeight.size()), param.file_row};
  const model::BlockNames& names = model::family_of(model.arch).files.block;
  const std::size_t dot = of.name.rfind('.'), experts = of.name.find(fmt::format(".{}.", names.experts));
  if (!model.experts.on() || experts == of.name.npos) return of;
  // An expert's gate and up share the adapter of the parameter that holds both, gate first.
  const std::string last = of.name.substr(dot + 1);
  if (model.lora.has(LoraModule::kAllExpertsGateUp) && last != names.expert_down) {
    of.name = of.name.substr(0, dot) + ".gate_up_proj";
    of.first_row = last == names.expert_up ? param.whole_rows : 0;
  }
  return of;
}

// The Bs of all experts that a file's tensor holds, put in order. A few tensors are kept, since a layer's
// experts are usually read one after the other.
class AdapterWeights::Fused {
 public:
  using Values = std::shared_ptr<const std::vector<float>>;
  Values of(const SafeTensors& file, const Place& place) {
    const std::lock_guard lock(mutex_);
    for (const auto& [entry, values] : kept_) {
      if (entry == place.entry) return values;
    }
    const auto count = static_cast<std::size_t>(place.entry->count());
    std::vector<float> in_file(count);
    hf::read_values(source_of(file, *place.entry), 0, place.entry->count(), in_file.data());
    auto values = std::make_shared<std::vector<float>>(count);
    model::split_experts(in_file.data(), place.entry->count() / place.experts, place.experts, values->data());
    if (kept_.size() == kMost) kept_.pop_front();
    kept_.emplace_back(place.entry, values);
    return values;
  }

 private:
  static constexpr std::size_t kMost = 2;  // a layer's
  std::mutex mutex_;
  std::deque<std::pair<const SafeTensors::Entry*, Values>> kept_;
};

AdapterWeights::AdapterWeights(const std::string& directory, const ModelConfig& model)
    : AdapterWeights(directory, model, read_adapters(directory, model)) {}

AdapterWeights::AdapterWeights(const std::string& directory, const ModelConfig& model,
                               hf::AdapterConfig config)
    : model_(model),
      file_(weights_of(directory), "the weights of adapters"),
      fused_(std::make_unique<Fused>()) {
  leave_out_experts(config, file_);
  model_.lora = config.lora;
  std::set<std::string> known;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    ModelConfig here = model_;
    here.lora.modules = config.layers[static_cast<std::size_t>(layer)];
    for (const model::AdapterTensor& tensor : model::adapter_tensors(here, layer)) {
      const SafeTensors::Entry& entry =
          check(prefix_of(model.arch) + tensor.name, {tensor.rows, tensor.cols});
      known.insert(entry.name);
      for (std::int64_t e = 0; e < tensor.experts(); ++e)
        places_[tensor.params[static_cast<std::size_t>(e)]] = {&entry, e, tensor.experts(), tensor.b};
    }
  }
  for (const SafeTensors::Entry& entry : file_.entries()) {
    if (known.count(entry.name) != 0) continue;
    throw Error(Errc::kUsage, file_.path(), hf::in_quotes(entry.name) + " is no tensor of these adapters",
                kTogether);
  }
}

AdapterWeights::~AdapterWeights() = default;

const SafeTensors::Entry& AdapterWeights::check(const std::string& name,
                                                const std::vector<std::int64_t>& shape) const {
  const SafeTensors::Entry* entry = file_.find(name);
  if (entry == nullptr) throw Error(Errc::kUsage, file_.path(), "misses " + hf::in_quotes(name), kTogether);
  if (entry->shape != shape) {
    throw Error(Errc::kUsage, file_.path(),
                fmt::format("{} has the shape {}; the configuration and the model ask for {}",
                            hf::in_quotes(name), hf::shape_text(entry->shape), hf::shape_text(shape)),
                kTogether);
  }
  if (!hf::float_dtype(entry->dtype)) {
    throw Error(Errc::kUsage, file_.path(),
                fmt::format("{} has the dtype {}; F64, F32, F16 and BF16 can be read", hf::in_quotes(name),
                            entry->dtype),
                "convert the adapter to one of these");
  }
  return *entry;
}

const AdapterWeights::Place* AdapterWeights::find(const std::string& param) const {
  const auto place = places_.find(param);
  return place == places_.end() ? nullptr : &place->second;
}

void AdapterWeights::read(const Place& place, std::int64_t begin, std::int64_t end, float* out) const {
  const std::int64_t each = place.entry->count() / place.experts, first = place.expert * each;
  if (place.b && place.experts > 1) {
    const Fused::Values values = fused_->of(file_, place);
    std::copy(values->begin() + first + begin, values->begin() + first + end, out);
    return;
  }
  hf::read_values(source_of(file_, *place.entry), first + begin, first + end, out);
}

void AdapterWeights::read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const {
  ZG_ASSERT(param.adapter, "{} is no adapter", param.name);
  const Place* const place = find(param.name);
  if (place == nullptr) return std::fill(out, out + (end - begin), 0.0f);
  param.for_runs(begin, end, [&](std::int64_t at, std::int64_t whole, std::int64_t n) {
    read(*place, whole, whole + n, out + at - begin);
  });
}

bool AdapterWeights::merge(const Param& param, std::int64_t begin, std::int64_t end, float* out) const {
  const auto adapter = adapter_of(model_, param);
  if (!adapter || begin == end) return false;
  const Place *const a = find(adapter->name + ".lora_A.weight"), *const b =
                                                                     find(adapter->name + ".lora_B.weight");
  if (a == nullptr || b == nullptr) return false;
  ZG_ASSERT(param.is_whole(), "{} is a part", param.name);
  const std::int64_t rank = lora().rank, cols = param.cols;
  const std::int64_t first = begin / cols, last = (end - 1) / cols;  // rows, inclusive
  std::vector<float> all_a(static_cast<std::size_t>(rank * cols)),
      rows_b(static_cast<std::size_t>((last - first + 1) * rank));
  read(*a, 0, rank * cols, all_a.data());
  const std::int64_t row = adapter->first_row + first;
  read(*b, row * rank, row * rank + static_cast<std::int64_t>(rows_b.size()), rows_b.data());
  add_adapter({.a = all_a.data(), .b = rows_b.data(), .rank = rank, .cols = cols, .factor = lora().factor()},
              begin, end, out);
  return true;
}

void add_adapter(const AdapterValues& values, std::int64_t begin, std::int64_t end, float* out) {
  if (begin == end) return;
  const std::int64_t rank = values.rank, cols = values.cols;
  const std::int64_t first = begin / cols, last = (end - 1) / cols;  // rows, inclusive
  const auto times = static_cast<float>(values.factor);
  parallel_for(last - first + 1, 16, [&](std::int64_t from, std::int64_t to) {
    std::vector<float> sum(static_cast<std::size_t>(cols));
    for (std::int64_t r = from; r < to; ++r) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (std::int64_t k = 0; k < rank; ++k) {
        const float weight = values.b[r * rank + k];
        const float* const row = values.a + k * cols;
        for (std::int64_t c = 0; c < cols; ++c) sum[static_cast<std::size_t>(c)] += weight * row[c];
      }
      const std::int64_t at = (first + r) * cols;
      for (std::int64_t i = std::max(begin, at); i < std::min(end, at + cols); ++i)
        out[i - begin] += times * sum[static_cast<std::size_t>(i - at)];
    }
  });
}

namespace {

// A parameter of the model's units that is an adapter.
struct Saved {
  const Unit* unit;
  const Param* param;
};

std::string header_of(const std::vector<model::AdapterTensor>& tensors, const std::string& prefix) {
  ordered_json header;
  header["__metadata__"]["format"] = "pt";
  std::int64_t at = 0;
  for (const model::AdapterTensor& tensor : tensors) {
    const std::int64_t bytes = tensor.rows * tensor.cols * std::int64_t{sizeof(float)};
    header[prefix + tensor.name] = {
        {"dtype", "F32"}, {"shape", {tensor.rows, tensor.cols}}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = header.dump();
  text.resize(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  const std::uint64_t length = text.size();
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + text;
}

// The elements of a tensor in the order of the file.
std::vector<float> values_of(const model::AdapterTensor& tensor, const std::map<std::string, Saved>& params,
                             const ReadParam& read) {
  std::vector<float> values(static_cast<std::size_t>(tensor.rows * tensor.cols)), one;
  const std::int64_t each = tensor.rows * tensor.cols / tensor.experts();
  for (std::int64_t e = 0; e < tensor.experts(); ++e) {
    const auto& [unit, param] = params.at(tensor.params[static_cast<std::size_t>(e)]);
    ZG_ASSERT_EQ(param->whole_count(), each);
    if (!tensor.b || tensor.experts() == 1) {
      read(*unit, *param, 0, each, values.data() + e * each);
      continue;
    }
    one.resize(static_cast<std::size_t>(each));
    read(*unit, *param, 0, each, one.data());
    model::join_expert(one.data(), each, e, tensor.experts(), values.data());
  }
  return values;
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
  std::map<std::string, Saved> params;
  for (const Unit& unit : model.units()) {
    for (const Param& param : unit.params) {
      if (param.adapter) params[param.name] = {&unit, &param};
    }
  }
  std::vector<model::AdapterTensor> tensors;
  for (std::int64_t layer = 0; layer < model.config().layers; ++layer) {
    for (model::AdapterTensor& tensor : model::adapter_tensors(model.config(), layer))
      tensors.push_back(std::move(tensor));
  }
  std::int64_t bytes = 0;
  for (const model::AdapterTensor& tensor : tensors)
    bytes += tensor.rows * tensor.cols * std::int64_t{sizeof(float)};
  const std::string header = header_of(tensors, prefix_of(model.config().arch)),
                    config = write_adapter_config(model.config(), base);
  auto at = static_cast<std::int64_t>(header.size());
  OutputFile weights(directory + "/" + kWeightsName, at + bytes);
  weights.write_at(0, header.data(), at);
  for (const model::AdapterTensor& tensor : tensors) {
    const std::vector<float> values = values_of(tensor, params, read);
    const auto size = static_cast<std::int64_t>(values.size() * sizeof(float));
    weights.write_at(at, values.data(), size);
    at += size;
  }
  weights.sync();
  OutputFile text(directory + "/" + kConfigName, static_cast<std::int64_t>(config.size()));
  text.write_at(0, config.data(), static_cast<std::int64_t>(config.size()));
  text.sync();
  weights.commit(), text.commit();
  sync_directory(directory);
}

}  // namespace zg
