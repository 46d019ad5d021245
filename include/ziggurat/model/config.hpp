// The sizes of a model and its few architectural choices. Plain values; the functions are pure.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

enum class Arch { kGpt2, kLlama };

// The shares of elements that training drops, each from 0 to below 1.
struct DropoutRates {
  double embedding = 0;  // of the sum of token and position embeddings (GPT-2's embd_pdrop)
  double residual = 0;   // of what each attention and each MLP adds to the residual stream (resid_pdrop)
  bool operator==(const DropoutRates&) const = default;
};

struct ModelConfig {
  Arch arch = Arch::kGpt2;
  std::int64_t vocab_size = 50257;
  std::int64_t context = 1024;  // largest number of positions (GPT-2: rows of wpe)
  std::int64_t width = 768;     // of the residual stream
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t kv_heads = 12;   // heads of keys and values; GPT-2: as many as heads
  std::int64_t head_size = 64;  // width / heads, unless a Llama's file says otherwise
  std::int64_t inner = 3072;    // width inside the MLP
  double norm_eps = 1e-5;
  double rope_theta = 10000;
  double init_std = 0.02;  // standard deviation of the initial weights
  bool tied = true;        // the output matrix is the embedding
  DropoutRates dropout = {};
};

// Throws Error(kUsage) when sizes do not fit together. The error's place is the key as the family's
// config.json calls it.
void validate(const ModelConfig& config);

// Reads the "model" section of a run: the text of a JSON object with the keys of the family's config.json,
// and with "arch" ("gpt2" or "llama") instead of model_type. `where` names the section in errors. Throws
// Error(kUsage), also for an unknown key.
ModelConfig parse_model_config(const std::string& json_text, const std::string& where);

}  // namespace zg
