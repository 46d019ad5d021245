// Reads and writes config.json; src/model/families knows the keys.
#include <algorithm>
#include <cmath>
#include <optional>

#include "model/families/decoder.hpp"
#include "model/foreign_files.hpp"
#include "model/hf_keys.hpp"
#include "model/hf_text.hpp"
#include "model/quantization.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/keys.hpp"

namespace zg {
namespace {

using hf::Keys;
using hf::Origin;
using nlohmann::json;

// Prefix of the model_type of a model that transformers cannot compute, so that transformers refuses it
// instead of computing something else.
constexpr std::string_view kOwnType = "ziggurat_";

ModelConfig config_of(Arch arch, const Keys& keys, Origin origin) {
  const model::Family& family = model::family_of(arch);
  return family.read(family, keys, origin);
}

// Families of mixtures of experts that have something that is not computed here, with what it is.
std::string why_not(const std::string& model_type) {
  static constexpr std::pair<std::string_view, const char*> kReasons[] = {
      {"phimoe", "Phi-3.5-MoE, whose routers are trained by sampling (SparseMixer)"},
      {"llama4",
       "Llama 4, whose router weighs the inputs of experts, and some of whose layers have no positions"},
      {"qwen3_next", "Qwen3-Next, most of whose layers have linear attention (Gated DeltaNet)"},
      {"qwen3_5_moe", "Qwen3.5-MoE, most of whose layers have linear attention (Gated DeltaNet)"}};
  for (const auto& [type, reason] : kReasons) {
    if (model_type == type || model_type == std::string(type) + "_text") return fmt::format(": {}", reason);
  }
  return "";
}

// The family according to "model_type" or else the first of "architectures".
Arch arch_of_config_json(const Keys& keys) {
  std::string name = keys.text("model_type", "");
  if (name.rfind(kOwnType, 0) == 0) name.erase(0, kOwnType.size());
  for (const model::Family* const family : model::families()) {
    if (name == family->model_type || (!name.empty() && name == family->other_type)) return family->arch;
  }
  if (name == "gemma3" && keys.has("text_config")) {
    throw Error(Errc::kUsage, keys.where(),
                "is of a Gemma 3 with images, whose text model is nested in \"text_config\"",
                "of Gemma 3 the text models (model_type \"gemma3_text\") are supported");
  }
  if (name.empty() && keys.has("architectures")) {
    const json& list = keys.at("architectures");
    if (!list.is_array() || list.empty() || !list[0].is_string())
      keys.wrong("architectures", "a list of names");
    name = list[0].get<std::string>();
    // "LlamaForCausalLM", "LlamaModel" and the like.
    for (const model::Family* const family : model::families()) {
      const std::string whole = family->architecture;
      const std::string start = whole.substr(0, std::min(whole.find("For"), whole.find("LMHead")));
      if (name.rfind(start + "For", 0) == 0 || name.rfind(start + "LMHead", 0) == 0 ||
          name.rfind(start + "Model", 0) == 0 || name.rfind(start + "Double", 0) == 0) {
        return family->arch;
      }
    }
  }
  if (name.empty()) {
    throw Error(
        Errc::kUsage, keys.where(), "has neither \"model_type\" nor \"architectures\"",
        "is this the config.json of a model? then add \"model_type\": " + model::family_names("\"", " or "));
  }
  throw Error(Errc::kUsage, keys.where(),
              fmt::format("the architecture is {}{}", hf::in_quotes(name), why_not(name)),
              model::family_names() + " are supported");
}

Arch arch_of_section(const Keys& keys) {
  const std::string name = keys.text("arch", ""), all = model::family_names("\"", " or ");
  for (const model::Family* const family : model::families()) {
    if (name == family->name) return family->arch;
  }
  if (name.empty()) {
    throw Error(Errc::kUsage, keys.where(), "\"arch\" is missing", "add \"arch\": " + all);
  }
  keys.wrong("arch", all);
}

void refuse_unknown_keys(const json& object, Arch arch, const std::string& where) {
  std::vector<std::string> known;
  for (const ModelKey& key : model_keys(arch)) known.emplace_back(key.name);
  const std::string family = name_of(arch);
  for (const auto& item : object.items()) {
    if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
    const auto nearest = nearest_name(item.key(), known);
    std::string hint = nearest ? "did you mean \"" + *nearest + "\"?" : "known for " + family + ":";
    if (!nearest) {
      for (const std::string& key : known) hint += " " + key;
    }
    throw Error(Errc::kUsage, where, fmt::format("unknown key {} for {}", hf::in_quotes(item.key()), family),
                hint);
  }
}

}  // namespace

ModelConfig read_hf_config(const std::string& directory) {
  const std::string path = directory + "/config.json";
  if (!hf::is_there(path)) hf::refuse_without_config(directory);
  const json object = hf::parse_object(hf::read_json_text(path, "the model's configuration"), path);
  const Keys keys(object, path);
  const Arch arch = arch_of_config_json(keys);
  hf::read_quantization(keys);  // refuses what cannot be read
  return config_of(arch, keys, Origin::kConfigJson);
}

ModelConfig parse_hf_config(const std::string& json_text, const std::string& where) {
  const json object = hf::parse_object(json_text, where);
  const Keys keys(object, where);
  return config_of(arch_of_config_json(keys), keys, Origin::kConfigJson);
}

std::vector<std::int32_t> read_hf_end_ids(const std::string& directory) {
  for (const char* name : {"/generation_config.json", "/config.json"}) {
    const std::string path = directory + name;
    if (!hf::is_there(path)) continue;
    const json object = hf::parse_object(hf::read_json_text(path, "the model's configuration"), path);
    const auto found = object.find("eos_token_id");
    if (found == object.end() || found->is_null()) continue;
    const json list = found->is_array() ? *found : json::array({*found});
    std::vector<std::int32_t> ids;
    for (const json& id : list) {
      if (!id.is_number_integer() || id < 0 || id > hf::kMaxSize)
        Keys(object, path).wrong("eos_token_id", "the number of a token, or a list of such");
      ids.push_back(id.get<std::int32_t>());
    }
    return ids;
  }
  return {};
}

std::string read_hf_dropout(const std::string& directory, const DropoutRates& ours) {
  const std::string path = directory + "/config.json";
  const json object = hf::parse_object(hf::read_json_text(path, "the model's configuration"), path);
  std::string text;
  for (const auto& [key, rate] :
       {std::pair("embd_pdrop", ours.embedding), std::pair("resid_pdrop", ours.residual),
        std::pair("attn_pdrop", 0.0), std::pair("attention_dropout", 0.0)}) {
    if (!object.contains(key) || !object[key].is_number() || object[key].get<double>() == rate) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key, object[key].get<double>());
  }
  return text;
}

ModelConfig parse_model_config(const std::string& json_text, const std::string& where) {
  const json object = hf::parse_object(json_text, where);
  const Keys keys(object, where);
  const Arch arch = arch_of_section(keys);
  refuse_unknown_keys(object, arch, where);
  return config_of(arch, keys, Origin::kModelSection);
}

std::string write_hf_config(const ModelConfig& c, DType dtype) {
  nlohmann::ordered_json out;
  const model::Family& family = model::family_of(c.arch);
  // transformers computes sinks in gpt-oss alone.
  const bool own = c.block.sinks && !family.rules->always_sinks;
  if (!own) out["architectures"] = json::array({family.architecture});
  out["model_type"] = (own ? std::string(kOwnType) : "") + family.model_type;
  family.write(family, c, out);
  out["initializer_range"] = c.init_std;
  out["tie_word_embeddings"] = c.tied;
  // Without these keys transformers would assume default ids, which may be any token of this vocabulary.
  const bool openai_vocabulary = c.arch == Arch::kGpt2 && c.vocab_size == 50257;
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    out[key] = openai_vocabulary ? nlohmann::ordered_json(50256) : nlohmann::ordered_json();
  }
  out["torch_dtype"] = dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF64 ? "float64" : "float32";
  return out.dump(2) + "\n";
}

}  // namespace zg
