// What a model is made of: sizes and a few choices. Plain values; the functions are pure.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

enum class Arch { kGpt2, kLlama };

struct ModelConfig {
  Arch arch = Arch::kGpt2;
  std::int64_t vocab_size = 50257;
  std::int64_t context = 1024;  // most positions (GPT-2: rows of wpe)
  std::int64_t width = 768;
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t kv_heads = 12;   // = heads for GPT-2
  std::int64_t head_size = 64;  // width / heads unless the file says otherwise (Llama)
  std::int64_t inner = 3072;
  double norm_eps = 1e-5;
  double rope_theta = 10000;
  double init_std = 0.02;
  bool tied = true;
};

// Throws Error(kUsage), whose place is the key as the family's config.json calls it, when sizes do not fit
// together.
void validate(const ModelConfig& config);

// From the text of a JSON object with the key names of the family's config.json, and "arch" ("gpt2", "llama")
// instead of model_type: the "model" section of a run. An unknown key is an error. `where` names it in
// messages. Throws Error(kUsage).
ModelConfig parse_model_config(const std::string& json_text, const std::string& where);

}  // namespace zg
