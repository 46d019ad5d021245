// Low-rank adapters (LoRA) of matrices in every block: y = W x + factor() * B A x. Only A [rank, in] and B
// [out, rank] are trained. A begins random and B zero, so at first the model's outputs do not change.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zg {

// The modules of a block that can have an adapter. Where a family's files store several matrices as one
// tensor, they are one module, with one A.
enum class LoraModule : std::uint8_t {
  kQ,
  kK,
  kV,
  kQkv,
  kO,
  kGate,
  kUp,
  kGateUp,
  kDown,
  kCAttn,  // from here on: GPT-2's modules
  kAttnCProj,
  kCFc,
  kMlpCProj
};
inline constexpr int kLoraModules = 13;
// The module's name in Hugging Face: "q_proj". Where a block has two modules of one name, the parent's name
// comes first: "attn.c_proj".
const char* name_of(LoraModule module);

struct Lora {
  std::int64_t rank = 0;  // 0: no adapters
  double alpha = 0;
  bool rslora = false;        // rank-stabilised: alpha is divided by sqrt(rank) instead of rank
  double dropout = 0;         // dropout rate for a module's input before A, in training
  std::uint32_t modules = 0;  // one bit for each LoraModule

  bool on() const { return rank > 0; }
  bool has(LoraModule module) const { return on() && (modules >> static_cast<int>(module) & 1) != 0; }
  double factor() const {
    const auto r = static_cast<double>(rank);
    return alpha / (rslora ? std::sqrt(r) : r);
  }
  bool operator==(const Lora&) const = default;
};

struct ModelConfig;

// The modules of the model's blocks, in the order in which a forward uses them.
std::vector<LoraModule> lora_modules(const ModelConfig& model);
// The bits of the modules whose name, or its last component, matches a pattern with the shell's wildcards *
// and ?. The pattern "all-linear" matches all modules. 0: none matches.
std::uint32_t match_modules(const ModelConfig& model, const std::string& pattern);
// Texts that describe a Lora. shape_of(): the settings that decide the adapters' tensors, "rank 8, of q_proj
// and v_proj". arithmetic_of(): the other settings, "alpha 16, dropout 0.1". Both are "none" without
// adapters.
std::string shape_of(const Lora& lora);
std::string arithmetic_of(const Lora& lora);
// The Lora that these two texts describe. Empty if they are not such texts, or describe no adapters.
std::optional<Lora> parse_lora(const std::string& shape, const std::string& arithmetic);
// "q_proj, k_proj and v_proj"
std::string names_of(const std::vector<LoraModule>& modules);

}  // namespace zg
