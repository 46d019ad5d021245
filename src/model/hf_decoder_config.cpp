// The config.json of all families but GPT-2: what each of them has, and what of it is not in its files.
#include <algorithm>
#include <string_view>

#include "model/hf_keys.hpp"
#include "model/hf_rope.hpp"

namespace zg::hf {
namespace {

constexpr const char *kLocal = "sliding_attention", *kGlobal = "full_attention";

bool is_gemma(Arch arch) {
  return arch == Arch::kGemma2 || arch == Arch::kGemma3;
}
bool is_qwen(Arch arch) {
  return arch == Arch::kQwen2 || arch == Arch::kQwen3;
}
// Whether "attention_bias" of the family's files says that q, k, v and o have biases.
bool has_bias_key(Arch arch) {
  return arch == Arch::kLlama || arch == Arch::kQwen3 || arch == Arch::kOlmo2 || is_gemma(arch);
}

// What a family has whatever its files say.
BlockDescription block_of(Arch arch) {
  BlockDescription block;
  block.qkv_bias = arch == Arch::kQwen2;
  block.fused = arch == Arch::kPhi3;
  if (arch == Arch::kQwen3 || arch == Arch::kGemma3) block.head_norms = HeadNorms::kEach;
  if (arch == Arch::kOlmo2) {
    block.head_norms = HeadNorms::kAll;
    block.norms = NormPlacement::kAfter;
  }
  if (is_gemma(arch)) {
    block.norms = NormPlacement::kBoth;
    block.norm_weight = NormWeight::kPlusOne;
    block.gate = Gate::kGeluTanh;
    block.scaled_embedding = true;
  }
  return block;
}

// The size of a head where a file does not say it; 0: the width over the heads.
std::int64_t head_size_of(Arch arch) {
  return arch == Arch::kQwen3 ? 128 : is_gemma(arch) ? 256 : 0;
}

double norm_eps_of(Arch arch) {
  return arch == Arch::kPhi3 || arch == Arch::kOlmo2 ? 1e-5 : 1e-6;
}

void read_sizes(const Keys& keys, Origin origin, ModelConfig& c) {
  c.vocab_size = vocabulary(keys, origin);
  c.context = keys.size("max_position_embeddings");
  c.width = keys.size("hidden_size");
  c.layers = keys.size("num_hidden_layers", {}, kMaxLayers);
  c.heads = keys.size("num_attention_heads");
  // Some families have a number of their own where a file says nothing.
  const bool as_queries = origin == Origin::kModelSection || c.arch == Arch::kLlama ||
                          c.arch == Arch::kPhi3 || c.arch == Arch::kOlmo2;
  c.kv_heads = as_queries ? keys.size("num_key_value_heads", c.heads) : keys.size("num_key_value_heads");
  (void)divided(keys, "num_attention_heads", c.heads, "num_key_value_heads", c.kv_heads);
  const std::int64_t size = head_size_of(c.arch);
  c.head_size = keys.has("head_dim") || size > 0
                    ? keys.size("head_dim", size)
                    : divided(keys, "hidden_size", c.width, "num_attention_heads", c.heads);
  if (c.head_size % 2 != 0) {
    throw Error(
        Errc::kUsage, keys.where(),
        fmt::format("the heads have a size of {}; RoPE turns pairs and needs an even one", c.head_size),
        "change \"head_dim\", or \"hidden_size\" and \"num_attention_heads\"");
  }
  c.inner = keys.size("intermediate_size");
  c.norm_eps = keys.positive("rms_norm_eps", norm_eps_of(c.arch));
  c.init_std = keys.deviation("initializer_range", 0.02);
  c.tied = keys.flag("tie_word_embeddings", is_gemma(c.arch));
}

// What families that are not known here have: such a file is of one of them, whatever it calls itself.
constexpr const char* kOfOthers[] = {"num_experts",          "num_local_experts",    "n_routed_experts",
                                     "attention_multiplier", "embedding_multiplier", "residual_multiplier",
                                     "logits_scaling",       "logit_scale",          "no_rope_layers",
                                     "lm_head_bias"};

void demand_idle(const Keys& keys, const char* key) {
  if (!keys.has(key)) return;
  const json& value = keys.at(key);
  if (value != false && value != 0 && value != 1 && !value.empty()) keys.unsupported(key, "null");
}

// Refuses what would change arithmetic.
void demand_known(const Keys& keys, Arch arch) {
  if (is_gemma(arch)) {
    // hidden_activation is heeded; hidden_act is left over from Gemma 1.
    demand_gelu(keys, "hidden_activation");
    if (keys.has("use_bidirectional_attention")) keys.demand("use_bidirectional_attention", false);
  } else if (const std::string act = keys.text("hidden_act", "silu"); act != "silu" && act != "swish") {
    keys.unsupported("hidden_act", "SiLU (\"silu\" or \"swish\")");
  }
  if (arch != Arch::kLlama) keys.demand("mlp_bias", false);
  if (!has_bias_key(arch) && arch != Arch::kQwen2) keys.demand("attention_bias", false);
  for (const char* key : {"clip_qkv", "llama_4_scaling"}) {
    if (keys.has(key)) keys.unsupported(key, "null");
  }
  for (const char* key : kOfOthers) demand_idle(keys, key);
  if (is_gemma(arch)) return;
  for (const char* key : {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
    demand_idle(keys, key);
}

// layer_types, which wins over any rule; empty: the file has none.
std::vector<bool> read_layer_types(const Keys& keys, std::int64_t layers) {
  constexpr const char* kKey = "layer_types";
  std::vector<bool> windowed;
  if (!keys.has(kKey)) return windowed;
  const json& list = keys.at(kKey);
  const std::string expected =
      fmt::format("a list of \"{}\" and \"{}\" for {} layers", kGlobal, kLocal, layers);
  if (!list.is_array() || static_cast<std::int64_t>(list.size()) != layers) keys.wrong(kKey, expected);
  for (const json& type : list) {
    if (type != kLocal && type != kGlobal) keys.wrong(kKey, expected);
    windowed.push_back(type == kLocal);
  }
  return windowed;
}

// The family's rule for files without layer_types.
bool rule_says_window(const Keys& keys, const ModelConfig& c, std::int64_t layer) {
  switch (c.arch) {
    case Arch::kMistral:
    case Arch::kPhi3:
      return true;
    case Arch::kQwen2:
    case Arch::kQwen3:
      return layer >= (keys.has("max_window_layers") && keys.at("max_window_layers") == 0
                           ? 0
                           : keys.size("max_window_layers", 28));
    case Arch::kGemma2:
      return layer % 2 == 0;
    case Arch::kGemma3:
      return (layer + 1) % keys.size("sliding_window_pattern", 6) != 0;
    default:
      return false;
  }
}

// Whether all layers have the window, where sliding_window alone says so.
bool by_window_alone(Arch arch) {
  return arch == Arch::kMistral || arch == Arch::kPhi3;
}

void read_windows(const Keys& keys, ModelConfig& c) {
  constexpr const char *kWindow = "sliding_window", *kTypes = "layer_types";
  BlockDescription& block = c.block;
  const bool never = c.arch == Arch::kLlama || c.arch == Arch::kOlmo2;
  if (never && keys.has(kWindow)) keys.unsupported(kWindow, "null");
  const bool null = keys.is_null(kWindow) || (c.arch == Arch::kPhi3 && !keys.has(kWindow));
  if (is_gemma(c.arch)) {
    if (null) keys.wrong(kWindow, "a whole number");
    block.window = keys.size(kWindow, 4096);
  }
  const bool off = never || null || (is_qwen(c.arch) && !keys.flag("use_sliding_window", false));
  std::vector<bool> windowed = read_layer_types(keys, c.layers);
  const bool listed = !windowed.empty();
  for (std::int64_t l = 0; !listed && l < c.layers; ++l)
    windowed.push_back(!off && rule_says_window(keys, c, l));
  const auto has = [&](bool window) {
    return std::find(windowed.begin(), windowed.end(), window) != windowed.end();
  };
  if (listed && by_window_alone(c.arch) && has(off)) {
    keys.unsupported(kTypes,
                     fmt::format("\"{}\" for all layers, as \"{}\" says,", off ? kGlobal : kLocal, kWindow));
  }
  if (!has(true)) return;
  if (off) keys.wrong(kTypes, fmt::format("without a window \"{}\" for all layers", kGlobal));
  block.window = keys.size(kWindow, 4096);
  block.windowed = std::move(windowed);
}

void read_gemma(const Keys& keys, ModelConfig& c) {
  const bool second = c.arch == Arch::kGemma2;
  const auto cap = [&](const char* key, double fallback) {
    return keys.is_null(key) || !second ? keys.positive_or_zero(key) : keys.positive(key, fallback);
  };
  c.block.query_pre_attn_scalar = keys.positive("query_pre_attn_scalar", 256);
  // transformers reads a cap of Gemma 3's scores, and does not apply it.
  if (!second && keys.has("attn_logit_softcapping")) keys.unsupported("attn_logit_softcapping", "null");
  c.block.attention_softcap = cap("attn_logit_softcapping", 50);
  c.block.final_softcap = cap("final_logit_softcapping", 30);
}

json number(double x) {
  if (x == std::floor(x) && std::abs(x) < 1e15) return static_cast<std::int64_t>(x);
  return x;
}
json cap_or_null(double cap) {
  return cap > 0 ? json(cap) : json();
}

void write_windows(const ModelConfig& c, nlohmann::ordered_json& out) {
  const bool any = c.any_window();
  if (is_qwen(c.arch)) out["use_sliding_window"] = any;
  out["sliding_window"] = any || is_gemma(c.arch) ? json(c.block.window) : json();
  if (is_qwen(c.arch) || is_gemma(c.arch)) {
    json types = json::array();
    for (std::int64_t l = 0; l < c.layers; ++l) types.push_back(c.has_window(l) ? kLocal : kGlobal);
    out["layer_types"] = types;
  }
}

}  // namespace

ModelConfig decoder_config(Arch arch, const Keys& keys, Origin origin) {
  ModelConfig c;
  c.arch = arch;
  c.block = block_of(arch);
  read_sizes(keys, origin, c);
  read_rope(keys, c);
  demand_known(keys, arch);
  if (has_bias_key(arch)) c.block.qkv_bias = c.block.o_bias = keys.flag("attention_bias", false);
  if (arch == Arch::kLlama) c.block.mlp_bias = keys.flag("mlp_bias", false);
  c.block.sinks = keys.flag("attention_sinks", false);
  read_windows(keys, c);
  if (is_gemma(arch)) read_gemma(keys, c);
  return c;
}

void write_decoder_config(const ModelConfig& c, nlohmann::ordered_json& out) {
  out["vocab_size"] = c.vocab_size;
  out["max_position_embeddings"] = c.context;
  out["hidden_size"] = c.width;
  out["num_hidden_layers"] = c.layers;
  out["num_attention_heads"] = c.heads;
  out["num_key_value_heads"] = c.kv_heads;
  out["head_dim"] = c.head_size;
  out["intermediate_size"] = c.inner;
  out["rms_norm_eps"] = c.norm_eps;
  write_rope(c, out);
  out["hidden_act"] = is_gemma(c.arch) ? "gelu_pytorch_tanh" : "silu";
  if (is_gemma(c.arch)) out["hidden_activation"] = "gelu_pytorch_tanh";
  if (has_bias_key(c.arch)) out["attention_bias"] = c.block.qkv_bias;
  if (c.block.sinks) out["attention_sinks"] = true;
  if (c.arch == Arch::kLlama) out["mlp_bias"] = c.block.mlp_bias;
  if (c.arch != Arch::kLlama && c.arch != Arch::kOlmo2) write_windows(c, out);
  if (is_gemma(c.arch)) {
    out["query_pre_attn_scalar"] = number(c.block.query_pre_attn_scalar);
    out["attn_logit_softcapping"] = cap_or_null(c.block.attention_softcap);
    out["final_logit_softcapping"] = cap_or_null(c.block.final_softcap);
  }
  // Without it transformers would assume the families' own, which may be no token of this vocabulary.
  if (c.arch != Arch::kLlama) out["pad_token_id"] = nullptr;
}

}  // namespace zg::hf
