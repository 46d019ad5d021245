// The keys of the "model" section of decoder families, as the documentation shows them.
#include <fmt/format.h>

#include "model/families/decoder.hpp"

namespace zg::model {
namespace {

using Rows = std::vector<ModelKey>;

constexpr const char* kObject = "`null`, or an object";
constexpr const char* kLayers = "a list of `\"full_attention\"` and `\"sliding_attention\"`, one a layer";

void add_rope(const DecoderRules& rules, Rows& rows) {
  const bool phi = rules.rope == hf::RopeKeys::kLong, nested = rules.rope == hf::RopeKeys::kLocalAndGlobal;
  rows.push_back({"rope_theta", kNumberText, nested ? "1000000" : "10000", "Base of the rotary embedding."});
  if (nested) {
    rows.push_back({"rope_local_base_freq", kNumberText, "10000",
                    "Base of the rotary embedding in layers with a window."});
    rows.push_back({"rope_scaling", kObject, "null",
                    "How frequencies of layers without a window are scaled: `rope_type` `\"linear\"`, "
                    "`\"llama3\"` or `\"yarn\"`, with the keys of transformers."});
    rows.push_back({"rope_parameters", kObject, "null",
                    "The form of newer `config.json` files: objects `full_attention` and "
                    "`sliding_attention`."});
    return;
  }
  rows.push_back(
      {"rope_scaling", kObject, "null",
       phi ? "`rope_type` `\"longrope\"` with `short_factor` and `long_factor`: sequences are never "
             "longer than the original context, so `short_factor` alone is used."
           : "How frequencies are scaled: `rope_type` `\"linear\"`, `\"llama3\"` or `\"yarn\"`, with the "
             "keys of transformers."});
  rows.push_back({"rope_parameters", kObject, "null",
                  "The form of newer `config.json` files: the keys of `rope_scaling`, and `rope_theta`."});
  if (rules.rope == hf::RopeKeys::kPartial) {
    rows.push_back({"partial_rotary_factor", "number above 0, 1 at most",
                    fmt::format("{}", rules.partial_rotary),
                    "Share of a head that is rotated: its first columns."});
    rows.push_back({"rotary_dim", kSizeText, "by `partial_rotary_factor`", "The number of these columns."});
  } else if (phi) {
    rows.push_back(
        {"original_max_position_embeddings", kSizeText, "4096", "The original context of LongRoPE."});
    rows.push_back({"partial_rotary_factor", "number above 0, 1 at most", "1",
                    "Share of a head that is rotated: its first columns."});
  } else {
    rows.push_back({"partial_rotary_factor", "`1`", "1", "All of a head is rotated."});
  }
}

void add_latent(const LatentKeys& latent, Rows& rows) {
  rows.push_back({"q_lora_rank", "`null`, or a whole number", "1536",
                  "Width of the queries' latent; `null`: queries are made from the input."});
  rows.push_back({"kv_lora_rank", kSizeText, "512", "Width of the latent of keys and values."});
  rows.push_back(
      {"qk_nope_head_dim", kSizeText, "128", "Columns of a head of queries or keys that do not rotate."});
  rows.push_back({"qk_rope_head_dim", kSizeText, "64",
                  "Columns of a head that rotate, the same for the keys of all heads; even."});
  rows.push_back({"v_head_dim", kSizeText, "128", "Columns of a head of values."});
  if (latent.tells_pairs)
    rows.push_back({"rope_interleave", kBoolText, "true",
                    "Rotating pairs are neighbouring columns; else column i of the first half and of the "
                    "second."});
}

void add_windows(const WindowKeys& windows, Rows& rows) {
  if (!windows.allowed) return;
  rows.push_back({"sliding_window", "`null`, or a whole number", windows.absent_is_none ? "null" : "4096",
                  "Tokens that a query sees in layers with a window, itself among them."});
  rows.insert(rows.end(), windows.keys.begin(), windows.keys.end());
  if (windows.typed)
    rows.push_back({"layer_types", kLayers, "by the family's rule", "Which layers have the window."});
}

void add_gemma(const GemmaKeys& gemma, Rows& rows) {
  constexpr const char* kCap = "`null`, or a number above 0";
  rows.push_back({"hidden_activation", "`\"gelu_pytorch_tanh\"`, `\"gelu_new\"`, `\"gelu_fast\"`",
                  "\"gelu_pytorch_tanh\"", "The activation of the MLP's gate; all names mean the same."});
  rows.push_back(
      {"query_pre_attn_scalar", kNumberText, "256", "Scores of attention are divided by its square root."});
  if (gemma.caps_scores) {
    rows.push_back(
        {"attn_logit_softcapping", kCap, "50.0", "Scores s count as cap * tanh(s / cap), before the mask."});
    rows.push_back({"final_logit_softcapping", kCap, "30.0", "Logits l count as cap * tanh(l / cap)."});
  } else {
    rows.push_back({"attn_logit_softcapping", "`null`", "null", "Scores have no cap."});
    rows.push_back({"final_logit_softcapping", kCap, "null", "Logits l count as cap * tanh(l / cap)."});
  }
  rows.push_back({"use_bidirectional_attention", "`false`", "false", "Attention is causal."});
}

void add_experts(const ExpertKeys& experts, Rows& rows) {
  const auto text = [](std::int64_t n) { return std::to_string(n); };
  rows.push_back({experts.count, fmt::format("whole number from 1 to {}", kMaxExperts), text(experts.experts),
                  "Experts of each layer that has some."});
  rows.push_back(
      {experts.per_token_key, kSizeText, text(experts.per_token), "Experts that each token passes."});
  if (experts.inner_default > 0)
    rows.push_back({experts.inner, kSizeText, text(experts.inner_default), "Width inside an expert."});
  if (!experts.renormalizes && !experts.never_renormalizes)
    rows.push_back({"norm_topk_prob", kBoolText, experts.renormalizes_by_default ? "true" : "false",
                    "The weights of a token's experts add up to 1."});
  if (experts.dense_layers) {
    rows.push_back(
        {"decoder_sparse_step", kSizeText, "1",
         "Each layer whose number, counted from 1, is a multiple of it has experts; the other layers "
         "have a plain MLP."});
    rows.push_back(
        {"mlp_only_layers", "a list of layers, counted from 0", "[]", "More layers that have a plain MLP."});
  }
  if (experts.shared > 0)
    rows.push_back({"shared_expert_intermediate_size", kSizeText, text(experts.shared),
                    "Width inside the MLP that all tokens pass besides their experts."});
  if (experts.jitter) rows.push_back({"router_jitter_noise", "`0`", "0", "The router has no noise."});
  rows.insert(rows.end(), experts.keys.begin(), experts.keys.end());
}

}  // namespace

Rows decoder_keys(const Family& family) {
  const DecoderRules& rules = *family.rules;

  Rows rows = {{"arch", fmt::format("`\"{}\"`", family.name), "required", "The family."},
               {"vocab_size", kSizeText, "the tokenizer's", "Size of the vocabulary."},
               {"max_position_embeddings", kSizeText, "required", "Most tokens of a sequence: the context."},
               {"hidden_size", kSizeText, "required", "Width."},
               {"num_hidden_layers", kSizeText, "required", "Layers."},
               {"num_attention_heads", kSizeText, "required", "Heads of attention."},
               {"num_key_value_heads", kSizeText, "as `num_attention_heads`",
                rules.latent ? "Heads of keys and values: as `num_attention_heads`."
                             : "Heads of keys and values; `num_attention_heads` is a multiple of it."}};
  if (rules.latent) {
    add_latent(*rules.latent, rows);
  } else {
    rows.push_back(
        {"head_dim", kSizeText,
         rules.head_size > 0 ? fmt::format("{}", rules.head_size) : "`hidden_size` / `num_attention_heads`",
         "Size of a head; even."});
  }
  rows.push_back({"intermediate_size", kSizeText, "required",
                  rules.experts && rules.experts->inner == std::string("intermediate_size")
                      ? "Width inside an expert."
                      : "Width inside the MLP."});
  rows.push_back({"rms_norm_eps", kNumberText, rules.norm_eps == 1e-5 ? "1e-5" : "1e-6",
                  "What is added to the mean square in RMS norms."});
  add_rope(rules, rows);
  add_windows(rules.windows, rows);
  if (rules.gemma) {
    add_gemma(*rules.gemma, rows);
  } else {
    rows.push_back({"hidden_act", "`\"silu\"`, `\"swish\"`", "\"silu\"",
                    "The activation of the MLP; both names mean the same."});
  }
  rows.push_back({"tie_word_embeddings", kBoolText, rules.tied ? "true" : "false",
                  "The output matrix is the embedding."});
  if (rules.attention_bias)
    rows.push_back({"attention_bias", kBoolText, "false",
                    rules.o_has_bias ? "The projections of attention have biases."
                                     : "Queries, keys and values have biases."});
  if (!rules.always_sinks)
    rows.push_back({"attention_sinks", kBoolText, "false",
                    "Each head has a learned score that takes part in the softmax's denominator alone. "
                    "Hugging Face's transformers has no dense model with it, and refuses to load one "
                    "that is saved with it."});
  if (rules.mlp_bias)
    rows.push_back({"mlp_bias", kBoolText, "false", "The three matrices of the MLP have biases."});
  if (rules.experts) add_experts(*rules.experts, rows);
  rows.push_back({"initializer_range", kDeviationText, "0.02", "Standard deviation of the initial weights."});
  return rows;
}

}  // namespace zg::model
