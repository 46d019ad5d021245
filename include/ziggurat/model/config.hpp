// The sizes of a model, and the options that decide how its blocks compute. Plain values; the functions are
// pure.
//
// A family (Arch) has a form (FamilyForm), which is the same for all its models, and a description
// (BlockDescription), which may differ from file to file. Code that computes depends on these two alone; only
// code for files and messages looks at the family.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/kernels/router.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/lora.hpp"

namespace zg {

enum class Arch {
  kGpt2,
  kLlama,
  kMistral,
  kQwen2,
  kQwen3,
  kPhi3,
  kOlmo2,
  kGemma2,
  kGemma3,
  kMixtral,
  kQwen2Moe,
  kQwen3Moe,
  kOlmoe,
  kGraniteMoe,
  kGptOss,
  kGlm4Moe,
  kErnie4Moe,
  kMinimaxM2,
  kDeepseekV2,
  kDeepseekV3
};
inline constexpr Arch kFamilies[] = {
    Arch::kGpt2,     Arch::kLlama,     Arch::kMistral,   Arch::kQwen2,      Arch::kQwen3,
    Arch::kPhi3,     Arch::kOlmo2,     Arch::kGemma2,    Arch::kGemma3,     Arch::kMixtral,
    Arch::kQwen2Moe, Arch::kQwen3Moe,  Arch::kOlmoe,     Arch::kGraniteMoe, Arch::kGptOss,
    Arch::kGlm4Moe,  Arch::kErnie4Moe, Arch::kMinimaxM2, Arch::kDeepseekV2, Arch::kDeepseekV3};

// Dropout rates of training, each at least 0 and below 1.
struct DropoutRates {
  double embedding = 0;  // for the sum of token and position embeddings (GPT-2's embd_pdrop)
  double residual = 0;   // for the outputs of attention and MLP before the residual sum (resid_pdrop)
  bool operator==(const DropoutRates&) const = default;
};

// How the frequencies of a rotary embedding deviate from theta^(-2i/d), so that a model can take longer
// sequences than it was first trained with. `original`: the context length of that first training.
struct RopeScaling {
  enum class Kind : std::uint8_t { kNone, kLinear, kLlama3, kYarn, kLongRope };
  Kind kind = Kind::kNone;
  double factor = 1;
  std::int64_t original = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  // Llama 3
  double beta_fast = 32, beta_slow = 1;              // YaRN
  bool truncate = true;                              // YaRN: the ramp begins and ends at whole pairs
  double mscale = 0, mscale_all_dim = 0;             // YaRN: terms of the amplitude; 0: not given
  double attention_factor = 0;                       // YaRN, LongRoPE: amplitude; 0: by their formulae
  // LongRoPE: a divisor for the frequency of each pair of columns: short_factor for sequences up to the
  // original context, long_factor for longer ones. Sequences are never longer here
  // (ModelConfig::longest_sequence()), so the long factors are only kept for saving.
  std::vector<double> short_factor = {}, long_factor = {};
  bool operator==(const RopeScaling&) const = default;
};

struct Rope {
  double theta = 10000;
  double partial = 1;        // fraction of a head's columns that rotate: the first ones
  bool interleaved = false;  // the columns of a pair lie side by side (RopeTable)
  RopeScaling scaling = {};
  bool operator==(const Rope&) const = default;
};

// Where a block has norms: on the input of each of its two branches, on the output of each, before the
// residual addition (OLMo 2), or on both (Gemma).
enum class NormPlacement : std::uint8_t { kBefore, kAfter, kBoth };
// How queries and keys are RMS-normalised before they rotate: not at all, each head by itself with one weight
// that all heads share, or all heads as one vector.
enum class HeadNorms : std::uint8_t { kNone, kEach, kAll };

// Multi-head latent attention (DeepSeek-V2). A product of the block's input gives a latent vector of kv_rank
// elements, which is RMS-normalised, and `rope` elements more. Another product makes of the latent each
// head's value, and the columns of its key that do not rotate; the `rope` elements are the rotating columns
// of all keys. Queries are made from a latent vector of q_rank elements in the same way, or from the input
// itself. The last `rope` columns of a head of queries or keys rotate.
struct LatentAttention {
  std::int64_t q_rank = 0;  // 0: queries are made from the input
  std::int64_t kv_rank = 0, rope = 0;
  std::int64_t value_size = 0;  // columns of a head of values
  bool operator==(const LatentAttention&) const = default;
};
// The eps of the norms of latent vectors; it is in no file.
inline constexpr double kLatentNormEps = 1e-6;

// How all models of a family compute, whatever their files say. The defaults are Llama.
struct FamilyForm {
  bool layer_norms = false;  // norms are LayerNorms, with biases, and not RMSNorms
  bool gated = true;         // the MLP is down(gate(g) * up), or else down(gelu(fc))
  bool rotates = true;  // positions rotate queries and keys; else a table of them is added to the embedding
  bool joint_qkv = false;  // q, k and v are one matrix of a unit
  bool biases = false;     // all matrix products of blocks have a bias
};
const FamilyForm& form_of(Arch arch);

// The options of a block's computation that a model's files set. The defaults are Llama 2.
struct BlockDescription {
  NormPlacement norms = NormPlacement::kBefore;
  NormWeight norm_weight = NormWeight::kPlain;  // for all norms, the final norm and head norms included
  HeadNorms head_norms = HeadNorms::kNone;
  std::optional<LatentAttention> latent = {};  // none: queries, keys and values are made from the input
  bool qkv_bias = false, o_bias = false;       // latent: qkv_bias is of the products that read the input
  bool mlp_bias = false;                       // on all three matrices of the MLP
  // Each head has a learned score that enters the softmax's denominator alone (AttentionRule::sinks).
  bool sinks = false;
  Gate gate = Gate::kSilu;
  double query_pre_attn_scalar = 0;  // scores are q k / sqrt(this); 0: head_size
  double attention_softcap = 0;      // scores become softcap * tanh(score / softcap); 0: no cap
  double final_softcap = 0;          // the same cap for logits
  bool scaled_embedding = false;     // the embedding is multiplied by sqrt(width)
  double embedding_multiplier = 1;   // the embedding is multiplied by this
  double attention_multiplier = 0;   // scores are q k times this; 0: as query_pre_attn_scalar says
  // The output of attention is multiplied by this before it is added to the residual stream. The block
  // multiplies the values (v) instead, which is the same. Experts have RouterRule::scale for it.
  double residual_multiplier = 1;
  double logits_divisor = 1;  // logits are divided by this
  // `window`: tokens that a query sees, itself included, in the layers for which `windowed` is true. Empty
  // `windowed`: no layer has a window.
  std::int64_t window = 0;
  std::vector<bool> windowed = {};
  Rope rope = {};
  std::optional<Rope> window_rope = {};  // for the layers with a window; none: they use `rope`
  bool fused = false;                    // files store q, k and v as one matrix, and gate and up as another
  bool operator==(const BlockDescription&) const = default;
};

// A mixture of experts. In the layers that have one, a router chooses for each token a few of many gated
// MLPs, the experts, and the layer adds their weighted outputs.
struct Experts {
  std::int64_t count = 0;  // of each such layer; 0: all layers are dense
  std::int64_t inner = 0;  // width inside an expert
  RouterRule router = {};
  // The width inside an MLP that all tokens pass besides their experts; 0: there is none. shared_gate: its
  // output is multiplied by the sigmoid of a learned product with the token.
  std::int64_t shared_inner = 0;
  bool shared_gate = false;
  bool biases = false;  // of the router, and of the matrices of experts
  // Whether experts are chosen by their scores plus a bias of each (Unit::choice_bias).
  bool choice_bias = false;
  std::vector<bool> dense = {};  // by layer: whether it has a plain MLP instead; empty: no layer has
  // Experts that are fetched, updated and released together, as one unit; 0: as many as their size suggests
  // (ModelConfig::experts_in_unit()).
  std::int64_t in_unit = 0;

  bool on() const { return count > 0; }
  bool operator==(const Experts&) const = default;
};

struct ModelConfig {
  Arch arch = Arch::kGpt2;
  std::int64_t vocab_size = 50257;
  std::int64_t context = 1024;  // largest number of positions (GPT-2: rows of wpe)
  std::int64_t width = 768;     // columns of the residual stream
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t kv_heads = 12;   // heads of keys and values; GPT-2: as many as heads
  std::int64_t head_size = 64;  // of queries and keys: width / heads, unless a file says otherwise
  std::int64_t inner = 3072;    // width inside the MLP
  double norm_eps = 1e-5;
  double init_std = 0.02;  // standard deviation of the initial weights
  bool tied = true;        // the output matrix is the embedding
  // GPT-2: scaled_scores divides attention scores by the square root of the head size; scores_by_layer also
  // divides the scores of layer l, counted from 0, by l + 1.
  bool scaled_scores = true, scores_by_layer = false;
  DropoutRates dropout = {};
  BlockDescription block = {};
  Experts experts = {};
  Lora lora = {};  // adapters added to the model's own matrices

  const FamilyForm& form() const { return form_of(arch); }
  // Columns of the queries, keys, values and results of all heads.
  std::int64_t query_columns() const { return heads * head_size; }
  std::int64_t key_columns() const { return kv_heads * head_size; }
  std::int64_t value_columns() const { return kv_heads * value_size(); }
  std::int64_t result_columns() const { return heads * value_size(); }
  std::int64_t value_size() const { return block.latent ? block.latent->value_size : head_size; }
  // Columns of a head for which there are rotary angles: its last ones.
  std::int64_t rotary_size() const { return block.latent ? block.latent->rope : head_size; }
  // The sizes of heads in latent attention.
  LatentHeads latent_heads() const;
  bool qkv_bias() const { return form().biases || block.qkv_bias; }
  bool o_bias() const { return form().biases || block.o_bias; }
  bool mlp_bias() const { return form().biases || block.mlp_bias; }
  bool has_window(std::int64_t layer) const {
    return layer < static_cast<std::int64_t>(block.windowed.size()) &&
           block.windowed[static_cast<std::size_t>(layer)];
  }
  bool any_window() const;
  bool has_experts(std::int64_t layer) const {
    return experts.on() && (layer >= static_cast<std::int64_t>(experts.dense.size()) ||
                            !experts.dense[static_cast<std::size_t>(layer)]);
  }
  // Experts of a unit; the last unit of a layer may have fewer. By default the fewest that have 4 Mi elements
  // together.
  std::int64_t experts_in_unit() const;
  // Units of a layer that hold its experts; 0 if the layer is dense.
  std::int64_t expert_units(std::int64_t layer) const {
    return has_experts(layer) ? (experts.count + experts_in_unit() - 1) / experts_in_unit() : 0;
  }
  bool norms_after() const { return block.norms != NormPlacement::kBefore; }
  bool norms_before() const { return block.norms != NormPlacement::kAfter; }
  // Most tokens that a sequence may have: the context, or the original context of LongRoPE.
  std::int64_t longest_sequence() const;
  bool operator==(const ModelConfig&) const = default;
};

// The family's name in configurations ("llama"), and its title for people ("Llama").
const char* name_of(Arch arch);
const char* title_of(Arch arch);

// Throws Error(kUsage) when sizes do not fit together. The error's place is the key's name in the family's
// config.json.
void validate(const ModelConfig& config);

// Parses the "model" section of a run's configuration: a JSON object with the keys of the family's
// config.json, and "arch" (name_of()) instead of model_type. `where` names the section in errors. Throws
// Error(kUsage), also for an unknown key.
ModelConfig parse_model_config(const std::string& json_text, const std::string& where);

}  // namespace zg
