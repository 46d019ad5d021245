// Low-rank adapters (LoRA): y = W x + factor() * B A x beside matrices of every block, of which A [rank, in]
// and B [out, rank] alone are trained. With A random and B zero, as they begin, the model computes what it
// did.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zg {

// The modules of a block that an adapter may stand beside. Those of families whose files have several
// matrices as one are one module, with one A for all of it.
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
  kCAttn,  // of GPT-2, and so on
  kAttnCProj,
  kCFc,
  kMlpCProj
};
inline constexpr int kLoraModules = 13;
// As Hugging Face calls it: "q_proj"; of two in a block with one name, with that of what they are in:
// "attn.c_proj".
const char* name_of(LoraModule module);

struct Lora {
  std::int64_t rank = 0;  // 0: there are no adapters
  double alpha = 0;
  bool rslora = false;        // rank-stabilised: alpha is divided by the root of the rank
  double dropout = 0;         // share of the elements of a module's input that training drops before A
  std::uint32_t modules = 0;  // bits, by LoraModule

  bool on() const { return rank > 0; }
  bool has(LoraModule module) const { return on() && (modules >> static_cast<int>(module) & 1) != 0; }
  double factor() const {
    const auto r = static_cast<double>(rank);
    return alpha / (rslora ? std::sqrt(r) : r);
  }
  bool operator==(const Lora&) const = default;
};

struct ModelConfig;

// The modules that the model's blocks have, in the order in which they compute.
std::vector<LoraModule> lora_modules(const ModelConfig& model);
// The bits of the modules whose name, or the last part of it, a pattern matches, in which * and ? match as in
// a shell; "all-linear": all of them. 0: none.
std::uint32_t match_modules(const ModelConfig& model, const std::string& pattern);
// "rank 8, of q_proj and v_proj": what decides the adapters' tensors; and "alpha 16, dropout 0.1": what else
// there is to say of them. "none" without adapters.
std::string shape_of(const Lora& lora);
std::string arithmetic_of(const Lora& lora);
// What two such texts of one Lora, that is on, say; none: they are not such.
std::optional<Lora> parse_lora(const std::string& shape, const std::string& arithmetic);
// "q_proj, k_proj and v_proj"
std::string names_of(const std::vector<LoraModule>& modules);

}  // namespace zg
