// The families whose config.json has Llama's keys: the rules in which they differ, and the functions that
// read, write and document the keys by these rules.
#pragma once
#include <optional>
#include <vector>

#include "model/families/family.hpp"
#include "model/hf_rope.hpp"

namespace zg::model {

// The rules for the keys that decide which layers have a window.
struct WindowKeys {
  bool allowed = true;          // whether "sliding_window" may be a number
  bool needed = false;          // whether it must be one
  bool absent_is_none = false;  // without the key: no window if true, else size 4096
  bool switched = false;        // "use_sliding_window" turns it on
  bool everywhere = false;      // all layers have a window, or none
  bool typed = false;           // saved files say by "layer_types" which layers have it
  // rule: whether a layer has a window, for files without "layer_types". keys: the keys that the rule reads.
  bool (*rule)(const hf::Keys& keys, std::int64_t layer) = nullptr;
  std::vector<ModelKey> keys = {};
};

// Gemma's keys for caps of scores and logits.
struct GemmaKeys {
  bool caps_scores = true;  // whether "attn_logit_softcapping" may be a number; then caps have these defaults
  double attention_softcap = 50, final_softcap = 30;
};

// The keys of a family of mixtures of experts, and its rules for files without them.
struct ExpertKeys {
  const char* count = "num_experts";
  const char* also = "num_local_experts";  // another name of the key: transformers writes either of the two
  std::int64_t experts = 0;                // the default for files without the key, as is per_token
  const char* per_token_key = "num_experts_per_tok";
  std::int64_t per_token = 0;
  // The key of the width inside an expert. "intermediate_size": no layer is dense.
  const char* inner = "moe_intermediate_size";
  std::int64_t inner_default = 0;
  RouterRule router = {};     // of all models, besides what files say
  bool renormalizes = false;  // always; else "norm_topk_prob" says it
  bool renormalizes_by_default = false, never_renormalizes = false;
  bool biases = false, choice_bias = false;  // as Experts has them, of all models
  bool dense_layers = false;  // "decoder_sparse_step" and "mlp_only_layers" say which layers are dense
  // The default width inside the MLP that all tokens pass, with its gate; 0: the family has no such MLP.
  std::int64_t shared = 0;
  bool jitter = false;  // there is a key for noise in the router, which must be 0
  // Further keys: read into a configuration that has all the others, written, and listed. Where reading
  // leaves no layer with experts, it clears ModelConfig::experts.
  void (*read)(const hf::Keys& keys, ModelConfig& config) = nullptr;
  void (*write)(const ModelConfig& config, nlohmann::ordered_json& out) = nullptr;
  std::vector<ModelKey> keys = {};
};

// The keys of latent attention, and a family's rules for files without them.
struct LatentKeys {
  bool tells_pairs = false;  // "rope_interleave" may say that rotating pairs are not side by side
};

struct DecoderRules {
  BlockDescription block = {};   // of all models, whatever their files say
  std::int64_t head_size = 0;    // default for files without the key; 0: width / heads
  double norm_eps = 1e-6;        // default for files without the key
  bool tied = false;             // default for files without the key
  bool kv_heads_needed = false;  // whether config.json must say "num_key_value_heads"
  bool attention_bias = false;   // whether there is a key for biases of q, k and v
  bool o_has_bias = true;        // whether that key is for o, too
  bool always_sinks = false;     // whether there is no key for sinks, since all models have them
  bool mlp_bias = false;         // whether there is a key for biases of the MLP
  bool has_pad_token = true;     // whether transformers has a default padding token, which may be null here
  hf::RopeKeys rope = hf::RopeKeys::kOne;
  double partial_rotary = 1;  // with RopeKeys::kPartial: the default
  WindowKeys windows = {};
  std::optional<GemmaKeys> gemma = {};
  std::optional<ExpertKeys> experts = {};
  std::optional<LatentKeys> latent = {};
};

// A family with Llama's keys and Llama's names in files.
Family decoder_family(Arch arch, const char* name, const char* model_type, const char* architecture,
                      const char* title, const DecoderRules& rules);

ModelConfig read_decoder(const Family& family, const hf::Keys& keys, hf::Origin origin);
void write_decoder(const Family& family, const ModelConfig& config, nlohmann::ordered_json& out);
std::vector<ModelKey> decoder_keys(const Family& family);

// The window rules of Qwen 2 and 3, with the keys that they read.
WindowKeys qwen_windows();
// The description of Gemma 2's blocks; Gemma 3 adds head norms.
BlockDescription gemma_block();

}  // namespace zg::model
