#include <algorithm>
#include <cmath>
#include <optional>

#include "model/hf_text.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/model/keys.hpp"

namespace zg {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxLayers = 1 << 16;

// Where the keys come from. A config.json has many keys that do not concern the engine (dropout, special
// tokens, versions); the "model" section of a run must have none.
enum class Origin { kConfigJson, kModelSection };

// Typed access to the keys of one JSON object. A null value counts as absent.
class Keys {
 public:
  Keys(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  bool has(const std::string& key) const { return object_.contains(key) && !object_[key].is_null(); }
  const json& at(const std::string& key) const { return object_[key]; }

  // A whole number in [1, max]. Without a fallback the key is required.
  std::int64_t size(const std::string& key, std::optional<std::int64_t> fallback = {},
                    std::int64_t max = kMaxSize) const {
    if (!has(key)) return absent(key, fallback, "a whole number");
    const json& value = at(key);
    // An unsigned number from 2^63 on would become negative as an int64.
    const bool fits =
        value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= kMaxSize);
    const std::int64_t n = fits ? value.get<std::int64_t>() : 0;
    if (n < 1 || n > max) wrong(key, fmt::format("a whole number from 1 to {}", max));
    return n;
  }
  double positive(const std::string& key, double fallback) const {
    if (!has(key)) return fallback;
    const double x = at(key).is_number() ? at(key).get<double>() : 0;
    if (!(x > 0) || !std::isfinite(x)) wrong(key, "a number > 0");
    return x;
  }
  double deviation(const std::string& key, double fallback) const {
    if (has(key) && at(key) == 0) return 0;
    return positive(key, fallback);
  }
  bool flag(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_boolean()) wrong(key, "true or false");
    return at(key).get<bool>();
  }
  std::string text(const std::string& key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_string()) wrong(key, "a text");
    return at(key).get<std::string>();
  }
  // Refuses a switch that would change what is computed: the engine has one way.
  void demand(const std::string& key, bool wanted) const {
    if (flag(key, wanted) != wanted) unsupported(key, wanted ? "true" : "false");
  }

  [[noreturn]] void wrong(const std::string& key, const std::string& expected) const {
    throw Error(Errc::kUsage, where_, fmt::format("\"{}\" is {}; {} is expected", key, shown(key), expected),
                fmt::format("correct \"{}\"", key));
  }
  [[noreturn]] void unsupported(const std::string& key, const std::string& supported) const {
    throw Error(Errc::kUsage, where_,
                fmt::format("\"{}\" is {}; only {} is supported", key, shown(key), supported),
                "the model computes something else than this engine does; choose another model");
  }

 private:
  std::string shown(const std::string& key) const {
    constexpr std::size_t kShown = 100;
    const std::string value = at(key).dump(-1, ' ', true, json::error_handler_t::replace);
    return value.size() > kShown ? value.substr(0, kShown) + "..." : value;
  }
  std::int64_t absent(const std::string& key, std::optional<std::int64_t> fallback,
                      const char* expected) const {
    if (fallback) return *fallback;
    throw Error(Errc::kUsage, where_, fmt::format("\"{}\" is missing; {} is expected", key, expected),
                fmt::format("add \"{}\"", key));
  }

  const json& object_;
  std::string where_;
};

// A "model" section may leave the size of the vocabulary to the tokenizer (0).
std::int64_t vocabulary(const Keys& keys, Origin origin) {
  if (origin == Origin::kModelSection) return keys.size("vocab_size", 0);
  return keys.size("vocab_size");
}

std::int64_t divided(const Keys& keys, const char* total_key, std::int64_t total, const char* parts_key,
                     std::int64_t parts) {
  if (total % parts == 0) return total / parts;
  throw Error(Errc::kUsage, keys.where(),
              fmt::format("\"{}\" {} is no multiple of \"{}\" {}", total_key, total, parts_key, parts),
              fmt::format("choose \"{}\" so that it divides \"{}\"", parts_key, total_key));
}

ModelConfig gpt2_config(const Keys& keys, Origin origin) {
  ModelConfig c;
  c.arch = Arch::kGpt2;
  c.vocab_size = vocabulary(keys, origin);
  c.context = keys.size(keys.has("n_positions") || !keys.has("n_ctx") ? "n_positions" : "n_ctx");
  if (origin == Origin::kModelSection && keys.size("n_ctx", c.context) != c.context) {
    keys.wrong("n_ctx", fmt::format("the same as \"n_positions\", {},", c.context));
  }
  c.width = keys.size("n_embd");
  c.layers = keys.size("n_layer", {}, kMaxLayers);
  c.heads = keys.size("n_head");
  c.kv_heads = c.heads;
  c.head_size = divided(keys, "n_embd", c.width, "n_head", c.heads);
  c.inner = keys.size("n_inner", 4 * c.width);
  c.norm_eps = keys.positive("layer_norm_epsilon", 1e-5);
  c.init_std = keys.deviation("initializer_range", 0.02);
  c.tied = keys.flag("tie_word_embeddings", true);
  const std::string activation = keys.text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {
    keys.unsupported("activation_function", "gelu_new (or gelu_pytorch_tanh, the same)");
  }
  keys.demand("scale_attn_weights", true);
  keys.demand("scale_attn_by_inverse_layer_idx", false);
  keys.demand("reorder_and_upcast_attn", false);
  keys.demand("add_cross_attention", false);
  return c;
}

// Refuses any but plain RoPE in rope_scaling, or in rope_parameters, which newer files have instead.
void demand_plain_rope(const Keys& keys, const std::string& key) {
  if (!keys.has(key)) return;
  const json& value = keys.at(key);
  if (!value.is_object()) keys.wrong(key, "null or an object");
  for (const char* name : {"rope_type", "type"}) {
    if (value.contains(name) && value[name] != "default")
      keys.unsupported(key, "null or rope_type \"default\"");
  }
  if (!value.contains("rope_type") && !value.contains("type") && key == "rope_scaling") {
    keys.unsupported(key, "null or rope_type \"default\"");
  }
}

ModelConfig llama_config(const Keys& keys, Origin origin) {
  ModelConfig c;
  c.arch = Arch::kLlama;
  c.vocab_size = vocabulary(keys, origin);
  c.context = keys.size("max_position_embeddings");
  c.width = keys.size("hidden_size");
  c.layers = keys.size("num_hidden_layers", {}, kMaxLayers);
  c.heads = keys.size("num_attention_heads");
  c.kv_heads = keys.size("num_key_value_heads", c.heads);
  (void)divided(keys, "num_attention_heads", c.heads, "num_key_value_heads", c.kv_heads);
  c.head_size = keys.has("head_dim") ? keys.size("head_dim")
                                     : divided(keys, "hidden_size", c.width, "num_attention_heads", c.heads);
  if (c.head_size % 2 != 0) {
    throw Error(
        Errc::kUsage, keys.where(),
        fmt::format("the heads have a size of {}; RoPE turns pairs and needs an even one", c.head_size),
        "change \"head_dim\", or \"hidden_size\" and \"num_attention_heads\"");
  }
  c.inner = keys.size("intermediate_size");
  c.norm_eps = keys.positive("rms_norm_eps", 1e-6);
  c.init_std = keys.deviation("initializer_range", 0.02);
  c.tied = keys.flag("tie_word_embeddings", false);
  demand_plain_rope(keys, "rope_scaling");
  demand_plain_rope(keys, "rope_parameters");
  const bool nested = keys.has("rope_parameters") && keys.at("rope_parameters").contains("rope_theta");
  c.rope_theta =
      nested ? Keys(keys.at("rope_parameters"), keys.where() + ": rope_parameters").positive("rope_theta", 0)
             : keys.positive("rope_theta", 10000);
  if (keys.positive("partial_rotary_factor", 1) != 1) keys.unsupported("partial_rotary_factor", "1");
  if (keys.text("hidden_act", "silu") != "silu") keys.unsupported("hidden_act", "silu");
  keys.demand("attention_bias", false);
  keys.demand("mlp_bias", false);
  return c;
}

// The family by model_type, else by the first of "architectures".
Arch arch_of_config_json(const Keys& keys) {
  std::string name = keys.text("model_type", "");
  if (name == "gpt2") return Arch::kGpt2;
  if (name == "llama") return Arch::kLlama;
  if (name.empty() && keys.has("architectures")) {
    const json& list = keys.at("architectures");
    if (!list.is_array() || list.empty() || !list[0].is_string())
      keys.wrong("architectures", "a list of names");
    name = list[0].get<std::string>();
    if (name.rfind("GPT2", 0) == 0) return Arch::kGpt2;
    if (name.rfind("Llama", 0) == 0) return Arch::kLlama;
  }
  if (name.empty()) {
    throw Error(
        Errc::kUsage, keys.where(), "has neither \"model_type\" nor \"architectures\"",
        "is this the config.json of a GPT-2 or Llama model? then add \"model_type\": \"gpt2\" or \"llama\"");
  }
  throw Error(Errc::kUsage, keys.where(), fmt::format("the architecture is {}", hf::in_quotes(name)),
              "gpt2 and llama are supported");
}

Arch arch_of_section(const Keys& keys) {
  const std::string name = keys.text("arch", "");
  if (name == "gpt2") return Arch::kGpt2;
  if (name == "llama") return Arch::kLlama;
  if (name.empty()) {
    throw Error(Errc::kUsage, keys.where(), "\"arch\" is missing", "add \"arch\": \"gpt2\" or \"llama\"");
  }
  keys.wrong("arch", "\"gpt2\" or \"llama\"");
}

void refuse_unknown_keys(const json& object, Arch arch, const std::string& where) {
  std::vector<std::string> known;
  for (const ModelKey& key : model_keys(arch)) known.emplace_back(key.name);
  const std::string family = arch == Arch::kGpt2 ? "gpt2" : "llama";
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

const std::vector<ModelKey>& model_keys(Arch arch) {
  constexpr const char* kSize = "whole number, 1 or more";
  constexpr const char* kNumber = "number above 0";
  constexpr const char* kDeviation = "number, 0 or more";
  constexpr const char* kBool = "`true`, `false`";
  constexpr const char* kObject = "`null`, or an object";
  static const std::vector<ModelKey> gpt2 = {
      {"arch", "`\"gpt2\"`", "required", "The family."},
      {"vocab_size", kSize, "the tokenizer's", "Size of the vocabulary."},
      {"n_positions", kSize, "required", "Most tokens of a sequence: the context."},
      {"n_ctx", kSize, "as `n_positions`", "Another name of `n_positions`."},
      {"n_embd", kSize, "required", "Width; a multiple of `n_head`."},
      {"n_layer", kSize, "required", "Layers."},
      {"n_head", kSize, "required", "Heads of attention."},
      {"n_inner", kSize, "4 * `n_embd`", "Width inside the MLP."},
      {"layer_norm_epsilon", kNumber, "1e-5", "What is added to the variance in layer norms."},
      {"activation_function", "`\"gelu_new\"`, `\"gelu_pytorch_tanh\"`", "\"gelu_new\"",
       "The activation of the MLP; both names mean the same."},
      {"initializer_range", kDeviation, "0.02", "Standard deviation of the first weights."},
      {"tie_word_embeddings", kBool, "true", "The output matrix is the embedding."},
      {"scale_attn_weights", "`true`", "true", "Attention is scaled by the root of the head's size."},
      {"scale_attn_by_inverse_layer_idx", "`false`", "false",
       "Attention is not scaled by the layer's number."},
      {"reorder_and_upcast_attn", "`false`", "false", "Sums of attention are fp32 anyway."},
      {"add_cross_attention", "`false`", "false", "There is no cross-attention."}};
  static const std::vector<ModelKey> llama = {
      {"arch", "`\"llama\"`", "required", "The family."},
      {"vocab_size", kSize, "the tokenizer's", "Size of the vocabulary."},
      {"max_position_embeddings", kSize, "required", "Most tokens of a sequence: the context."},
      {"hidden_size", kSize, "required", "Width."},
      {"num_hidden_layers", kSize, "required", "Layers."},
      {"num_attention_heads", kSize, "required", "Heads of attention."},
      {"num_key_value_heads", kSize, "as `num_attention_heads`",
       "Heads of keys and values; `num_attention_heads` is a multiple of it."},
      {"head_dim", kSize, "`hidden_size` / `num_attention_heads`", "Size of a head; even."},
      {"intermediate_size", kSize, "required", "Width inside the MLP."},
      {"rms_norm_eps", kNumber, "1e-6", "What is added to the mean square in RMS norms."},
      {"rope_theta", kNumber, "10000", "Base of the rotary embedding."},
      {"rope_scaling", kObject, "null", "Plain RoPE alone: `null`, or `rope_type` `\"default\"`."},
      {"rope_parameters", kObject, "null", "The form of newer files: plain RoPE alone, and `rope_theta`."},
      {"partial_rotary_factor", "`1`", "1", "All of a head is rotated."},
      {"hidden_act", "`\"silu\"`", "\"silu\"", "The activation of the MLP."},
      {"tie_word_embeddings", kBool, "false", "The output matrix is the embedding."},
      {"attention_bias", "`false`", "false", "Attention has no biases."},
      {"mlp_bias", "`false`", "false", "The MLP has no biases."},
      {"initializer_range", kDeviation, "0.02", "Standard deviation of the first weights."}};
  return arch == Arch::kGpt2 ? gpt2 : llama;
}

ModelConfig read_hf_config(const std::string& directory) {
  const std::string path = directory + "/config.json";
  const json object = hf::parse_object(read_text_file(path, "the model's configuration"), path);
  const Keys keys(object, path);
  const Arch arch = arch_of_config_json(keys);
  if (keys.has("quantization_config")) keys.unsupported("quantization_config", "null (plain weights)");
  return arch == Arch::kGpt2 ? gpt2_config(keys, Origin::kConfigJson)
                             : llama_config(keys, Origin::kConfigJson);
}

std::string read_hf_dropout(const std::string& directory, const DropoutRates& ours) {
  const std::string path = directory + "/config.json";
  const json object = hf::parse_object(read_text_file(path, "the model's configuration"), path);
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
  return arch == Arch::kGpt2 ? gpt2_config(keys, Origin::kModelSection)
                             : llama_config(keys, Origin::kModelSection);
}

std::string write_hf_config(const ModelConfig& c, DType dtype) {
  nlohmann::ordered_json out;
  const bool gpt2 = c.arch == Arch::kGpt2;
  out["architectures"] = json::array({gpt2 ? "GPT2LMHeadModel" : "LlamaForCausalLM"});
  out["model_type"] = gpt2 ? "gpt2" : "llama";
  if (gpt2) {
    out["vocab_size"] = c.vocab_size;
    out["n_positions"] = c.context;
    out["n_ctx"] = c.context;
    out["n_embd"] = c.width;
    out["n_layer"] = c.layers;
    out["n_head"] = c.heads;
    out["n_inner"] = c.inner;
    out["layer_norm_epsilon"] = c.norm_eps;
    out["activation_function"] = "gelu_new";
    // What the model was trained with; without these keys Hugging Face's library would take 0.1 for each.
    out["attn_pdrop"] = 0.0;
    out["embd_pdrop"] = c.dropout.embedding;
    out["resid_pdrop"] = c.dropout.residual;
  } else {
    out["vocab_size"] = c.vocab_size;
    out["max_position_embeddings"] = c.context;
    out["hidden_size"] = c.width;
    out["num_hidden_layers"] = c.layers;
    out["num_attention_heads"] = c.heads;
    out["num_key_value_heads"] = c.kv_heads;
    out["head_dim"] = c.head_size;
    out["intermediate_size"] = c.inner;
    out["rms_norm_eps"] = c.norm_eps;
    out["rope_theta"] = c.rope_theta;
    out["hidden_act"] = "silu";
    out["attention_bias"] = false;
    out["mlp_bias"] = false;
  }
  out["initializer_range"] = c.init_std;
  out["tie_word_embeddings"] = c.tied;
  // Without these keys the library would assume ids of its own, which may be any token of this vocabulary.
  const bool openai_vocabulary = gpt2 && c.vocab_size == 50257;
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    out[key] = openai_vocabulary ? nlohmann::ordered_json(50256) : nlohmann::ordered_json();
  }
  out["torch_dtype"] = dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF64 ? "float64" : "float32";
  return out.dump(2) + "\n";
}

}  // namespace zg
