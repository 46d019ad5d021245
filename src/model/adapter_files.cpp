#include "ziggurat/model/adapter_files.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "model/adapter_config.hpp"
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
      file_(weights_of(directory), "the weights of adapters") {
  const hf::AdapterConfig config = read_adapters(directory, model);
  ModelConfig adapted = model;
  adapted.lora = lora_;
  const model::AdapterList list(adapted);
  std::set<std::string> known;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    for (const model::Adapter& one : list.all()) {
      if (!config.has(layer, one.module)) continue;
      const std::string module =
          fmt::format("{}.{}.{}", model::family_of(model.arch).files.layers, layer, one.path);
      for (const auto& [which, shape] : {std::pair("lora_A", std::vector<std::int64_t>{lora_.rank, one.in}),
                                         {"lora_B", std::vector<std::int64_t>{one.out, lora_.rank}}}) {
        known.insert(check(prefix_ + module + "." + which + ".weight", shape));
      }
    }
  }
  for (const SafeTensors::Entry& entry : file_.entries()) {
    if (known.count(entry.name) != 0) continue;
    throw Error(Errc::kUsage, file_.path(), hf::in_quotes(entry.name) + " is no tensor of these adapters",
                kTogether);
  }
}

std::string AdapterWeights::check(const std::string& name, const std::vector<std::int64_t>& shape) const {
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
  return name;
}

const SafeTensors::Entry* AdapterWeights::find(const std::string& module, const char* which) const {
  return file_.find(prefix_ + module + which);
}

void AdapterWeights::read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const {
  const SafeTensors::Entry* entry = find(param.name, "");
  ZG_ASSERT(param.adapter, "{} is no adapter", param.name);
  if (entry == nullptr) return std::fill(out, out + (end - begin), 0.0f);
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
  add_adapter({.a = all_a.data(), .b = rows_b.data(), .rank = rank, .cols = cols, .factor = lora_.factor()},
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
