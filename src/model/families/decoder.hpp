// The families whose config.json has Llama's keys: the rules by which they differ, and what reads, writes and
// documents the keys by these rules.
#pragma once
#include <optional>
#include <vector>

#include "model/families/family.hpp"
#include "model/hf_rope.hpp"

namespace zg::model {

// The keys that say which layers have a window.
struct WindowKeys {
  bool allowed = true;          // whether "sliding_window" may be a number
  bool needed = false;          // whether it must be one
  bool absent_is_none = false;  // without the key no layer has a window; else its size is 4096
  bool switched = false;        // "use_sliding_window" turns it on
  bool everywhere = false;      // all layers have it, or none
  bool typed = false;           // saved files say by "layer_types" which layers have it
  // Whether a layer has it in files without "layer_types", and the keys that this rule reads.
  bool (*rule)(const hf::Keys& keys, std::int64_t layer) = nullptr;
  std::vector<ModelKey> keys = {};
};

// Gemma's keys of scores and logits.
struct GemmaKeys {
  bool caps_scores = true;  // whether "attn_logit_softcapping" may be a number, and caps have these defaults
  double attention_softcap = 50, final_softcap = 30;
};

struct DecoderRules {
  BlockDescription block = {};   // of all models, whatever their files say
  std::int64_t head_size = 0;    // where a file does not say it; 0: the width over the heads
  double norm_eps = 1e-6;        // where a file does not say it
  bool tied = false;             // likewise
  bool kv_heads_needed = false;  // whether config.json must say "num_key_value_heads"
  bool attention_bias = false;   // whether there is the key that says that q, k, v and o have biases
  bool mlp_bias = false;         // likewise of the MLP
  bool has_pad_token = true;  // whether transformers has a default token of padding, which may be none here
  hf::RopeKeys rope = hf::RopeKeys::kOne;
  WindowKeys windows = {};
  std::optional<GemmaKeys> gemma = {};
};

// The family with Llama's keys and names of files.
Family decoder_family(Arch arch, const char* name, const char* model_type, const char* architecture,
                      const char* title, const DecoderRules& rules);

ModelConfig read_decoder(const Family& family, const hf::Keys& keys, hf::Origin origin);
void write_decoder(const Family& family, const ModelConfig& config, nlohmann::ordered_json& out);
std::vector<ModelKey> decoder_keys(const Family& family);

// Qwen 2 and 3: the rule of their windows, with the keys that it reads.
WindowKeys qwen_windows();
// Gemma 2, and but for the norms of heads Gemma 3.
BlockDescription gemma_block();

}  // namespace zg::model
