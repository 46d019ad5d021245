// Low-rank adapters (LoRA) of matrices in every layer: y = W x + factor() * B A x. Only A [rank, in] and B
// [out, rank] are trained. A begins random and B zero, so at first the model's outputs do not change.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zg {

// The modules of a layer that can have an adapter. Where a family's files store several matrices as one
// tensor, they are one module, with one A. A module of experts stands for the same matrix of every expert of
// a layer; each expert has an A and a B of its own.
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
  kCAttn,  // GPT-2's modules
  kAttnCProj,
  kCFc,
  kMlpCProj,
  kSharedGate,  // modules of the MLP that all tokens pass besides their experts
  kSharedUp,
  kSharedDown,
  kExpertGate,  // modules of experts
  kExpertUp,
  kExpertDown,
  kExpertW1,  // Mixtral's: gate, down, up
  kExpertW2,
  kExpertW3,
  kAllExpertsGateUp,  // parameters that hold all experts of a layer; gate and up share one A
  kAllExpertsDown,
  kQA,  // latent attention's modules
  kQB,
  kKvA,
  kKvB
};
inline constexpr int kLoraModules = 28;
constexpr std::uint32_t bit_of(LoraModule module) {
  return 1u << static_cast<int>(module);
}
// The modules of single experts, and the parameters of all experts of a layer.
inline constexpr std::uint32_t kExpertModules =
    bit_of(LoraModule::kExpertGate) | bit_of(LoraModule::kExpertUp) | bit_of(LoraModule::kExpertDown) |
    bit_of(LoraModule::kExpertW1) | bit_of(LoraModule::kExpertW2) | bit_of(LoraModule::kExpertW3);
inline constexpr std::uint32_t kExpertParameters =
    bit_of(LoraModule::kAllExpertsGateUp) | bit_of(LoraModule::kAllExpertsDown);
// The module's name in Hugging Face: "q_proj". Where a model may have several modules of one name, their
// parents' names come first: "attn.c_proj", "experts.*.up_proj" with * for an expert's number.
const char* name_of(LoraModule module);

// How adapters see the experts of a layer, which decides their names in files. kModules: each matrix of each
// expert is a module ("mlp.experts.7.up_proj"), as files store them. kParameters: all experts of a layer are
// one module with two parameters ("mlp.experts.gate_up_proj"), as transformers has them since version 5.
enum class ExpertsAs : std::uint8_t { kModules, kParameters };

struct Lora {
  std::int64_t rank = 0;  // 0: no adapters
  double alpha = 0;
  bool rslora = false;        // rank-stabilised: alpha is divided by sqrt(rank) instead of rank
  double dropout = 0;         // dropout rate for a module's input before A, in training
  std::uint32_t modules = 0;  // one bit for each LoraModule

  bool on() const { return rank > 0; }
  bool has(LoraModule module) const { return on() && (modules & bit_of(module)) != 0; }
  // With kParameters, adapters of experts have no dropout, as in PEFT.
  ExpertsAs experts_as() const {
    return (modules & kExpertParameters) != 0 ? ExpertsAs::kParameters : ExpertsAs::kModules;
  }
  double factor() const {
    const auto r = static_cast<double>(rank);
    return alpha / (rslora ? std::sqrt(r) : r);
  }
  bool operator==(const Lora&) const = default;
};

struct ModelConfig;

// The modules of the model's layers, in the order in which a forward uses them.
std::vector<LoraModule> lora_modules(const ModelConfig& model, ExpertsAs experts = ExpertsAs::kModules);
// The parameters that hold all experts of a layer; empty for models without experts.
std::vector<LoraModule> lora_parameters(const ModelConfig& model);
// The bits of the modules whose path within the layer, or a part of it that begins after a dot, matches a
// pattern with the shell's wildcards * and ?. An expert's number is a * there: "mlp.experts.*.up_proj". The
// pattern "all-linear" matches all modules. 0: none matches.
std::uint32_t match_modules(const ModelConfig& model, const std::string& pattern,
                            ExpertsAs experts = ExpertsAs::kModules);
// The same for lora_parameters(), whose paths are those of transformers: "mlp.experts.gate_up_proj".
std::uint32_t match_parameters(const ModelConfig& model, const std::string& pattern);
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
