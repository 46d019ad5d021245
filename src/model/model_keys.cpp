// The keys of the "model" section of a run, family by family, as documents show them.
#include "ziggurat/model/keys.hpp"

#include <map>

#include "model/families.hpp"

namespace zg {
namespace {

using Rows = std::vector<ModelKey>;

constexpr const char* kSize = "whole number, 1 or more";
constexpr const char* kNumber = "number above 0";
constexpr const char* kDeviation = "number, 0 or more";
constexpr const char* kBool = "`true`, `false`";
constexpr const char* kObject = "`null`, or an object";
constexpr const char* kLayers = "a list of `\"full_attention\"` and `\"sliding_attention\"`, one a layer";

Rows gpt2_keys() {
  return {{"arch", "`\"gpt2\"`", "required", "The family."},
          {"vocab_size", kSize, "the tokenizer's", "Size of the vocabulary."},
          {"n_positions", kSize, "required", "Most tokens of a sequence: the context."},
          {"n_ctx", kSize, "as `n_positions`", "Another name of `n_positions`."},
          {"n_embd", kSize, "required", "Width; a multiple of `n_head`."},
          {"n_layer", kSize, "required", "Layers."},
          {"n_head", kSize, "required", "Heads of attention."},
          {"n_inner", kSize, "4 * `n_embd`", "Width inside the MLP."},
          {"layer_norm_epsilon", kNumber, "1e-5", "What is added to the variance in layer norms."},
          {"activation_function", "`\"gelu_new\"`, `\"gelu_pytorch_tanh\"`, `\"gelu_fast\"`", "\"gelu_new\"",
           "The activation of the MLP; all names mean the same."},
          {"initializer_range", kDeviation, "0.02", "Standard deviation of the initial weights."},
          {"tie_word_embeddings", kBool, "true", "The output matrix is the embedding."},
          {"scale_attn_weights", kBool, "true",
           "Scores of attention are divided by the square root of the head's size."},
          {"scale_attn_by_inverse_layer_idx", kBool, "false",
           "Scores of attention are also divided by the layer's number, from 1."},
          {"reorder_and_upcast_attn", "`false`", "false", "Attention sums in fp32 in any case."},
          {"add_cross_attention", "`false`", "false", "There is no cross-attention."}};
}

bool is_gemma(Arch arch) {
  return arch == Arch::kGemma2 || arch == Arch::kGemma3;
}
bool is_qwen(Arch arch) {
  return arch == Arch::kQwen2 || arch == Arch::kQwen3;
}

const char* arch_type(Arch arch) {
  switch (arch) {
    case Arch::kGpt2:
      return "`\"gpt2\"`";
    case Arch::kLlama:
      return "`\"llama\"`";
    case Arch::kMistral:
      return "`\"mistral\"`";
    case Arch::kQwen2:
      return "`\"qwen2\"`";
    case Arch::kQwen3:
      return "`\"qwen3\"`";
    case Arch::kPhi3:
      return "`\"phi3\"`";
    case Arch::kOlmo2:
      return "`\"olmo2\"`";
    case Arch::kGemma2:
      return "`\"gemma2\"`";
    case Arch::kGemma3:
      return "`\"gemma3\"`";
  }
  return "";
}

void add_rope(Arch arch, Rows& rows) {
  const bool phi = arch == Arch::kPhi3, nested = arch == Arch::kGemma3;
  rows.push_back({"rope_theta", kNumber, nested ? "1000000" : "10000", "Base of the rotary embedding."});
  if (nested) {
    rows.push_back(
        {"rope_local_base_freq", kNumber, "10000", "Base of the rotary embedding in layers with a window."});
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
  if (phi) {
    rows.push_back({"original_max_position_embeddings", kSize, "4096", "The original context of LongRoPE."});
    rows.push_back({"partial_rotary_factor", "number above 0, 1 at most", "1",
                    "Share of a head that is rotated: its first columns."});
  } else {
    rows.push_back({"partial_rotary_factor", "`1`", "1", "All of a head is rotated."});
  }
}

void add_windows(Arch arch, Rows& rows) {
  const char* const kWindow = "`null`, or a whole number";
  if (arch == Arch::kLlama || arch == Arch::kOlmo2) return;
  rows.push_back({"sliding_window", kWindow, arch == Arch::kPhi3 ? "null" : "4096",
                  "Tokens that a query sees in layers with a window, itself among them."});
  if (is_qwen(arch)) {
    rows.push_back(
        {"use_sliding_window", kBool, "false", "Layers from `max_window_layers` on have the window."});
    rows.push_back(
        {"max_window_layers", "whole number, 0 or more", "28", "The first layer with the window."});
  }
  if (arch == Arch::kGemma3)
    rows.push_back({"sliding_window_pattern", kSize, "6",
                    "Every layer whose number, from 1, is a multiple of it has no window."});
  if (is_qwen(arch) || is_gemma(arch))
    rows.push_back({"layer_types", kLayers, "by the family's rule", "Which layers have the window."});
}

void add_gemma(Arch arch, Rows& rows) {
  const bool second = arch == Arch::kGemma2;
  constexpr const char* kCap = "`null`, or a number above 0";
  rows.push_back({"hidden_activation", "`\"gelu_pytorch_tanh\"`, `\"gelu_new\"`, `\"gelu_fast\"`",
                  "\"gelu_pytorch_tanh\"", "The activation of the MLP's gate; all names mean the same."});
  rows.push_back(
      {"query_pre_attn_scalar", kNumber, "256", "Scores of attention are divided by its square root."});
  if (second) {
    rows.push_back(
        {"attn_logit_softcapping", kCap, "50.0", "Scores s count as cap * tanh(s / cap), before the mask."});
    rows.push_back({"final_logit_softcapping", kCap, "30.0", "Logits l count as cap * tanh(l / cap)."});
  } else {
    rows.push_back({"attn_logit_softcapping", "`null`", "null", "Scores have no cap."});
    rows.push_back({"final_logit_softcapping", kCap, "null", "Logits l count as cap * tanh(l / cap)."});
  }
  rows.push_back({"use_bidirectional_attention", "`false`", "false", "Attention is causal."});
}

Rows decoder_keys(Arch arch) {
  const bool gemma = is_gemma(arch), wide = arch == Arch::kQwen3;
  Rows rows = {{"arch", arch_type(arch), "required", "The family."},
               {"vocab_size", kSize, "the tokenizer's", "Size of the vocabulary."},
               {"max_position_embeddings", kSize, "required", "Most tokens of a sequence: the context."},
               {"hidden_size", kSize, "required", "Width."},
               {"num_hidden_layers", kSize, "required", "Layers."},
               {"num_attention_heads", kSize, "required", "Heads of attention."},
               {"num_key_value_heads", kSize, "as `num_attention_heads`",
                "Heads of keys and values; `num_attention_heads` is a multiple of it."},
               {"head_dim", kSize,
                gemma  ? "256"
                : wide ? "128"
                       : "`hidden_size` / `num_attention_heads`",
                "Size of a head; even."},
               {"intermediate_size", kSize, "required", "Width inside the MLP."},
               {"rms_norm_eps", kNumber, arch == Arch::kPhi3 || arch == Arch::kOlmo2 ? "1e-5" : "1e-6",
                "What is added to the mean square in RMS norms."}};
  add_rope(arch, rows);
  add_windows(arch, rows);
  if (gemma) {
    add_gemma(arch, rows);
  } else {
    rows.push_back({"hidden_act", "`\"silu\"`, `\"swish\"`", "\"silu\"",
                    "The activation of the MLP; both names mean the same."});
  }
  rows.push_back(
      {"tie_word_embeddings", kBool, gemma ? "true" : "false", "The output matrix is the embedding."});
  if (arch == Arch::kLlama || arch == Arch::kQwen3 || arch == Arch::kOlmo2 || gemma)
    rows.push_back({"attention_bias", kBool, "false", "The projections of attention have biases."});
  rows.push_back({"attention_sinks", kBool, "false",
                  "Each head has a learned score that takes part in the softmax's denominator alone. "
                  "Hugging Face's transformers has no dense model with it, and refuses to load one "
                  "that is saved with it."});
  if (arch == Arch::kLlama)
    rows.push_back({"mlp_bias", kBool, "false", "The three matrices of the MLP have biases."});
  rows.push_back({"initializer_range", kDeviation, "0.02", "Standard deviation of the initial weights."});
  return rows;
}

}  // namespace

const std::vector<ModelKey>& model_keys(Arch arch) {
  static const std::map<Arch, Rows> kRows = [] {
    std::map<Arch, Rows> all;
    for (const Arch family : kFamilies)
      all[family] = family == Arch::kGpt2 ? gpt2_keys() : decoder_keys(family);
    return all;
  }();
  return kRows.at(arch);
}

}  // namespace zg
