#include "model/families/decoder.hpp"

#include <algorithm>
#include <string_view>

namespace zg::model {
namespace {

using hf::Keys;
using hf::Origin;
using nlohmann::json;

constexpr const char *kLocal = "sliding_attention", *kGlobal = "full_attention";

// size: default for files without the key; 0: width / heads.
void read_head_size(const Keys& keys, std::int64_t size, ModelConfig& c) {
  c.head_size = keys.has("head_dim") || size > 0
                    ? keys.size("head_dim", size)
                    : hf::divided(keys, "hidden_size", c.width, "num_attention_heads", c.heads);
  if (c.head_size % 2 == 0) return;
  throw Error(Errc::kUsage, keys.where(),
              fmt::format("the heads have a size of {}; RoPE turns pairs and needs an even one", c.head_size),
              "change \"head_dim\", or \"hidden_size\" and \"num_attention_heads\"");
}

// The sizes of heads in latent attention. transformers writes the number of rotating columns as "head_dim".
void read_latent(const Keys& keys, ModelConfig& c) {
  LatentAttention latent;
  latent.q_rank = keys.is_null("q_lora_rank") ? 0 : keys.size("q_lora_rank", 1536);
  latent.kv_rank = keys.size("kv_lora_rank", 512);
  latent.rope = keys.size("qk_rope_head_dim", 64);
  latent.value_size = keys.size("v_head_dim", 128);
  if (keys.size("head_dim", latent.rope) != latent.rope)
    keys.wrong("head_dim", fmt::format("{}, as \"qk_rope_head_dim\",", latent.rope));
  c.head_size = keys.size("qk_nope_head_dim", 128) + latent.rope;
  c.block.latent = latent;
  if (c.kv_heads != c.heads)
    keys.wrong("num_key_value_heads", fmt::format("{}, as \"num_attention_heads\",", c.heads));
  if (latent.rope % 2 != 0) keys.wrong("qk_rope_head_dim", "an even number");
}

// How the pairs of latent attention rotate. transformers scales scores by "mscale_all_dim" of any kind of
// scaling; here only YaRN has it.
void read_latent_rope(const Keys& keys, const LatentKeys& rules, Rope& rope) {
  rope.interleaved = !rules.tells_pairs || keys.flag("rope_interleave", true);
  const RopeScaling::Kind kind = rope.scaling.kind;
  if (kind == RopeScaling::Kind::kNone || kind == RopeScaling::Kind::kYarn) return;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(key) || !keys.at(key).contains("mscale_all_dim")) continue;
    const json& amplitude = keys.at(key)["mscale_all_dim"];
    if (!amplitude.is_null() && amplitude != 0)
      keys.unsupported(key, "\"mscale_all_dim\" of \"rope_type\" \"yarn\"");
  }
}

void read_sizes(const Keys& keys, Origin origin, const DecoderRules& rules, ModelConfig& c) {
  c.vocab_size = hf::vocabulary(keys, origin);
  c.context = keys.size("max_position_embeddings");
  c.width = keys.size("hidden_size");
  c.layers = keys.size("num_hidden_layers", {}, hf::kMaxLayers);
  c.heads = keys.size("num_attention_heads");
  // Some families have a default of their own for a file without the key, so it is required.
  const bool as_queries = origin == Origin::kModelSection || !rules.kv_heads_needed;
  c.kv_heads = as_queries ? keys.size("num_key_value_heads", c.heads) : keys.size("num_key_value_heads");
  (void)hf::divided(keys, "num_attention_heads", c.heads, "num_key_value_heads", c.kv_heads);
  rules.latent ? read_latent(keys, c) : read_head_size(keys, rules.head_size, c);
  c.inner = keys.size("intermediate_size");
  c.norm_eps = keys.positive("rms_norm_eps", rules.norm_eps);
  c.init_std = keys.deviation("initializer_range", 0.02);
  c.tied = keys.flag("tie_word_embeddings", rules.tied);
}

// Keys of families that are not supported: a file with one of these keys is of such a family, whatever its
// model_type.
constexpr const char* kOfOthers[] = {"attention_multiplier", "embedding_multiplier", "residual_multiplier",
                                     "logits_scaling",       "logit_scale",          "no_rope_layers",
                                     "lm_head_bias"};
// Keys of mixtures of experts; a family with experts has one of these numbers of experts.
constexpr const char* kOfExperts[] = {
    "num_experts",        "num_local_experts", "n_routed_experts",
    "n_shared_experts",   "n_group",           "shared_expert_intermediate_size",
    "router_jitter_noise"};

void demand_idle(const Keys& keys, const char* key) {
  if (!keys.has(key)) return;
  const json& value = keys.at(key);
  if (value != false && value != 0 && value != 1 && !value.empty()) keys.unsupported(key, "null");
}

// Whether a family of mixtures of experts reads the key.
bool is_of(const ExpertKeys& rules, const std::string& key) {
  return key == rules.count || key == rules.also ||
         (key == "shared_expert_intermediate_size" && rules.shared > 0) ||
         (key == "router_jitter_noise" && rules.jitter) ||
         std::any_of(rules.keys.begin(), rules.keys.end(), [&](const ModelKey& k) { return k.name == key; });
}

// Refuses keys and values that would change the arithmetic.
void demand_known(const Keys& keys, const DecoderRules& rules) {
  if (rules.gemma) {
    // hidden_activation counts; hidden_act is a leftover of Gemma 1, and ignored.
    hf::demand_gelu(keys, "hidden_activation");
    if (keys.has("use_bidirectional_attention")) keys.demand("use_bidirectional_attention", false);
  } else if (const std::string act = keys.text("hidden_act", "silu"); act != "silu" && act != "swish") {
    keys.unsupported("hidden_act", "SiLU (\"silu\" or \"swish\")");
  }
  if (!rules.mlp_bias) keys.demand("mlp_bias", false);
  // Qwen 2 and gpt-oss have biases whatever the key's value is.
  if (!rules.attention_bias && !rules.block.qkv_bias) keys.demand("attention_bias", false);
  for (const char* key : {"clip_qkv", "llama_4_scaling"}) {
    if (keys.has(key)) keys.unsupported(key, "null");
  }
  for (const char* key : kOfOthers) {
    if (!rules.experts || !is_of(*rules.experts, key)) demand_idle(keys, key);
  }
  for (const char* key : kOfExperts) {
    if (!rules.experts || !is_of(*rules.experts, key)) demand_idle(keys, key);
  }
  if (rules.gemma) return;
  for (const char* key : {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
    demand_idle(keys, key);
}

// The key layer_types, which overrides any rule. Empty: the file does not have it.
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

void read_windows(const Keys& keys, const WindowKeys& rules, ModelConfig& c) {
  constexpr const char *kWindow = "sliding_window", *kTypes = "layer_types";
  BlockDescription& block = c.block;
  if (!rules.allowed && keys.has(kWindow)) keys.unsupported(kWindow, "null");
  const bool null = keys.is_null(kWindow) || (rules.absent_is_none && !keys.has(kWindow));
  if (rules.needed) {
    if (null) keys.wrong(kWindow, "a whole number");
    block.window = keys.size(kWindow, 4096);
  }
  const bool off = !rules.allowed || null || (rules.switched && !keys.flag("use_sliding_window", false));
  std::vector<bool> windowed = read_layer_types(keys, c.layers);
  const bool listed = !windowed.empty();
  for (std::int64_t l = 0; !listed && l < c.layers; ++l) windowed.push_back(!off && rules.rule(keys, l));
  const auto has = [&](bool window) {
    return std::find(windowed.begin(), windowed.end(), window) != windowed.end();
  };
  if (listed && rules.everywhere && has(off)) {
    keys.unsupported(kTypes,
                     fmt::format("\"{}\" for all layers, as \"{}\" says,", off ? kGlobal : kLocal, kWindow));
  }
  if (!has(true)) return;
  if (off) keys.wrong(kTypes, fmt::format("without a window \"{}\" for all layers", kGlobal));
  block.window = keys.size(kWindow, 4096);
  block.windowed = std::move(windowed);
}

void read_gemma(const Keys& keys, const GemmaKeys& rules, ModelConfig& c) {
  const auto cap = [&](const char* key, double fallback) {
    return keys.is_null(key) || !rules.caps_scores ? keys.positive_or_zero(key)
                                                   : keys.positive(key, fallback);
  };
  c.block.query_pre_attn_scalar = keys.positive("query_pre_attn_scalar", 256);
  // transformers reads Gemma 3's cap for scores, but does not apply it.
  if (!rules.caps_scores && keys.has("attn_logit_softcapping"))
    keys.unsupported("attn_logit_softcapping", "null");
  c.block.attention_softcap = cap("attn_logit_softcapping", rules.attention_softcap);
  c.block.final_softcap = cap("final_logit_softcapping", rules.final_softcap);
}

// The layers that have a plain MLP, by the keys that say it; empty: none has.
std::vector<bool> read_dense_layers(const Keys& keys, std::int64_t layers) {
  constexpr const char *kStep = "decoder_sparse_step", *kList = "mlp_only_layers";
  const std::int64_t step = keys.size(kStep, 1);
  std::vector<bool> dense(static_cast<std::size_t>(layers));
  for (std::int64_t l = 0; l < layers; ++l) dense[static_cast<std::size_t>(l)] = (l + 1) % step != 0;
  if (keys.has(kList)) {
    const std::string expected = fmt::format("a list of layers from 0 to {}", layers - 1);
    if (!keys.at(kList).is_array()) keys.wrong(kList, expected);
    for (const json& layer : keys.at(kList)) {
      if (!layer.is_number_integer() || layer < 0 || layer >= layers) keys.wrong(kList, expected);
      dense[layer.get<std::size_t>()] = true;
    }
  }
  if (std::find(dense.begin(), dense.end(), true) == dense.end()) return {};
  return dense;
}

void read_experts(const Keys& keys, const ExpertKeys& rules, ModelConfig& c) {
  const char* const kPerToken = rules.per_token_key;
  Experts& e = c.experts;
  e.router = rules.router;
  e.biases = rules.biases, e.choice_bias = rules.choice_bias;
  e.count = keys.size(rules.count, keys.size(rules.also, rules.experts, kMaxExperts), kMaxExperts);
  if (keys.has(rules.count) && keys.has(rules.also) && keys.at(rules.count) != keys.at(rules.also))
    keys.wrong(rules.also, fmt::format("{}, as \"{}\" says,", e.count, rules.count));
  e.router.per_token = keys.size(kPerToken, rules.per_token);
  if (e.router.per_token > e.count) {
    throw Error(
        Errc::kUsage, keys.where(),
        fmt::format("\"{}\" is {}, but \"{}\" is {}", kPerToken, e.router.per_token, rules.count, e.count),
        fmt::format("choose \"{}\" from 1 to {}", kPerToken, e.count));
  }
  e.router.renormalize = rules.renormalizes || (!rules.never_renormalizes &&
                                                keys.flag("norm_topk_prob", rules.renormalizes_by_default));
  e.inner = rules.inner_default > 0 ? keys.size(rules.inner, rules.inner_default) : keys.size(rules.inner);
  if (rules.dense_layers) e.dense = read_dense_layers(keys, c.layers);
  if (rules.shared > 0) {
    e.shared_inner = keys.size("shared_expert_intermediate_size", rules.shared);
    e.shared_gate = true;
  }
  if (rules.jitter && keys.has("router_jitter_noise") && keys.at("router_jitter_noise") != 0)
    keys.unsupported("router_jitter_noise", "0");
  if (rules.read != nullptr) rules.read(keys, c);
}

json number(double x) {
  if (x == std::floor(x) && std::abs(x) < 1e15) return static_cast<std::int64_t>(x);
  return x;
}
json cap_or_null(double cap) {
  return cap > 0 ? json(cap) : json();
}

void write_experts(const ModelConfig& c, const ExpertKeys& rules, nlohmann::ordered_json& out) {
  const Experts& e = c.experts;
  if (!e.on()) return rules.write(c, out);  // which says that no layer has experts
  out[rules.count] = e.count;
  out[rules.per_token_key] = e.router.per_token;
  out[rules.inner] = e.inner;
  if (!rules.renormalizes && !rules.never_renormalizes) out["norm_topk_prob"] = e.router.renormalize;
  if (rules.dense_layers) {
    out["decoder_sparse_step"] = 1;
    json dense = json::array();
    for (std::int64_t l = 0; l < c.layers; ++l) {
      if (!c.has_experts(l)) dense.push_back(l);
    }
    out["mlp_only_layers"] = dense;
  }
  if (rules.shared > 0) out["shared_expert_intermediate_size"] = e.shared_inner;
  if (rules.write != nullptr) rules.write(c, out);
}

void write_latent(const ModelConfig& c, const LatentKeys& rules, nlohmann::ordered_json& out) {
  const LatentAttention& latent = *c.block.latent;
  out["q_lora_rank"] = latent.q_rank > 0 ? json(latent.q_rank) : json();
  out["kv_lora_rank"] = latent.kv_rank;
  out["qk_nope_head_dim"] = c.head_size - latent.rope;
  out["qk_rope_head_dim"] = latent.rope;
  out["v_head_dim"] = latent.value_size;
  if (rules.tells_pairs) out["rope_interleave"] = c.block.rope.interleaved;
}

void write_windows(const ModelConfig& c, const WindowKeys& rules, nlohmann::ordered_json& out) {
  const bool any = c.any_window();
  if (rules.switched) out["use_sliding_window"] = any;
  out["sliding_window"] = any || rules.needed ? json(c.block.window) : json();
  if (rules.typed) {
    json types = json::array();
    for (std::int64_t l = 0; l < c.layers; ++l) types.push_back(c.has_window(l) ? kLocal : kGlobal);
    out["layer_types"] = types;
  }
}

}  // namespace

Family decoder_family(Arch arch, const char* name, const char* model_type, const char* architecture,
                      const char* title, const DecoderRules& rules) {
  return {.arch = arch,
          .name = name,
          .model_type = model_type,
          .architecture = architecture,
          .title = title,
          .files = {.model = "model.",
                    .kept = true,
                    .own = {"layers.", "embed_tokens.", "norm."},
                    .layers = "model.layers",
                    .embedding = "model.embed_tokens.weight",
                    .norm = "model.norm"},
          .form = {},
          .sizes = {"max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "intermediate_size", "rms_norm_eps"},
          .read = read_decoder,
          .write = write_decoder,
          .keys = decoder_keys,
          .rules = &rules};
}

WindowKeys qwen_windows() {
  return {
      .switched = true,
      .typed = true,
      .rule =
          [](const Keys& keys, std::int64_t layer) {
            constexpr const char* kFirst = "max_window_layers";
            return layer >= (keys.has(kFirst) && keys.at(kFirst) == 0 ? 0 : keys.size(kFirst, 28));
          },
      .keys = {
          {"use_sliding_window", kBoolText, "false", "Layers from `max_window_layers` on have the window."},
          {"max_window_layers", "whole number, 0 or more", "28", "The first layer with the window."}}};
}

BlockDescription gemma_block() {
  BlockDescription block;
  block.norms = NormPlacement::kBoth;
  block.norm_weight = NormWeight::kPlusOne;
  block.gate = Gate::kGeluTanh;
  block.scaled_embedding = true;
  return block;
}

ModelConfig read_decoder(const Family& family, const Keys& keys, Origin origin) {
  const DecoderRules& rules = *family.rules;
  ModelConfig c;
  c.arch = family.arch;
  c.block = rules.block;
  read_sizes(keys, origin, rules, c);
  hf::read_rope(keys, rules.rope, c, rules.partial_rotary);
  if (rules.latent) read_latent_rope(keys, *rules.latent, c.block.rope);
  demand_known(keys, rules);
  if (rules.attention_bias) {
    c.block.qkv_bias = keys.flag("attention_bias", false);
    c.block.o_bias = c.block.qkv_bias && rules.o_has_bias;
  }
  if (rules.mlp_bias) c.block.mlp_bias = keys.flag("mlp_bias", false);
  c.block.sinks = rules.always_sinks || keys.flag("attention_sinks", false);
  read_windows(keys, rules.windows, c);
  if (rules.gemma) read_gemma(keys, *rules.gemma, c);
  if (rules.experts) read_experts(keys, *rules.experts, c);
  return c;
}

void write_decoder(const Family& family, const ModelConfig& c, nlohmann::ordered_json& out) {
  const DecoderRules& rules = *family.rules;
  out["vocab_size"] = c.vocab_size;
  out["max_position_embeddings"] = c.context;
  out["hidden_size"] = c.width;
  out["num_hidden_layers"] = c.layers;
  out["num_attention_heads"] = c.heads;
  out["num_key_value_heads"] = c.kv_heads;
  if (rules.latent) {
    write_latent(c, *rules.latent, out);
  } else {
    out["head_dim"] = c.head_size;
  }
  out["intermediate_size"] = c.inner;
  out["rms_norm_eps"] = c.norm_eps;
  hf::write_rope(c, rules.rope, out);
  out["hidden_act"] = rules.gemma ? "gelu_pytorch_tanh" : "silu";
  if (rules.gemma) out["hidden_activation"] = "gelu_pytorch_tanh";
  if (rules.attention_bias) out["attention_bias"] = c.block.qkv_bias;
  if (c.block.sinks && !rules.always_sinks) out["attention_sinks"] = true;
  if (rules.mlp_bias) out["mlp_bias"] = c.block.mlp_bias;
  if (rules.windows.allowed) write_windows(c, rules.windows, out);
  if (rules.experts) write_experts(c, *rules.experts, out);
  if (rules.gemma) {
    out["query_pre_attn_scalar"] = number(c.block.query_pre_attn_scalar);
    out["attn_logit_softcapping"] = cap_or_null(c.block.attention_softcap);
    out["final_logit_softcapping"] = cap_or_null(c.block.final_softcap);
  }
  // Without this key transformers would assume the family's default token, which this vocabulary may not
  // have.
  if (rules.has_pad_token) out["pad_token_id"] = nullptr;
}

}  // namespace zg::model
