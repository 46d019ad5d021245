// A family of models: its names in files, in configurations and for people, and the properties that all its
// models share. Each file of this folder describes one family; families.cpp lists them.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/hf_keys.hpp"
#include "ziggurat/model/config.hpp"
#include "ziggurat/model/keys.hpp"

namespace zg::model {

// A matrix of a block, as files and adapters name it: its path within the layer, without ".weight", and the
// module by which adapters name it.
struct MatrixName {
  const char* path;
  LoraModule module;
};

// The names of a block's parameters. The defaults are Llama's.
struct BlockNames {
  // The norms before the two branches, without ".weight". If a block also has norms on the outputs of its
  // branches, norm2 is pre_feedforward_layernorm.
  const char *norm1 = "input_layernorm", *norm2 = "post_attention_layernorm";
  MatrixName q{"self_attn.q_proj", LoraModule::kQ}, k{"self_attn.k_proj", LoraModule::kK},
      v{"self_attn.v_proj", LoraModule::kV};
  MatrixName qkv{"self_attn.qkv_proj", LoraModule::kQkv};  // where q, k and v are one matrix
  // Latent attention's products: to the latents, and from them.
  MatrixName q_a{"self_attn.q_a_proj", LoraModule::kQA}, q_b{"self_attn.q_b_proj", LoraModule::kQB},
      kv_a{"self_attn.kv_a_proj_with_mqa", LoraModule::kKvA}, kv_b{"self_attn.kv_b_proj", LoraModule::kKvB};
  const char *q_a_norm = "self_attn.q_a_layernorm", *kv_a_norm = "self_attn.kv_a_layernorm";
  MatrixName o{"self_attn.o_proj", LoraModule::kO};
  // gate: the MLP's first matrix, even if the MLP has no gate. gate_up: where gate and up are one matrix.
  MatrixName gate{"mlp.gate_proj", LoraModule::kGate}, up{"mlp.up_proj", LoraModule::kUp},
      gate_up{"mlp.gate_up_proj", LoraModule::kGateUp};
  MatrixName down{"mlp.down_proj", LoraModule::kDown};
  // In layers with experts: the router, the path before an expert's number and the names of an expert's
  // matrices after it; the MLP that all tokens pass, and its gate.
  const char *router = "mlp.gate", *experts = "mlp.experts";
  const char *expert_gate = "gate_proj", *expert_up = "up_proj", *expert_down = "down_proj";
  // The modules by which adapters name these three; the path of the module whose parameters hold all experts
  // of a layer in transformers.
  LoraModule expert_modules[3] = {LoraModule::kExpertGate, LoraModule::kExpertUp, LoraModule::kExpertDown};
  const char* all_experts = "mlp.experts";
  const char *shared = "mlp.shared_expert", *shared_gate = "mlp.shared_expert_gate";
  // The tensors with the matrices of all experts of a layer: of gate and up, and of down; a bias has "_bias"
  // behind its matrix's name. fused: files have these. Else files have a tensor for each matrix, and the
  // others are read where transformers has written them.
  const char *all_gate_up = "mlp.experts.gate_up_proj", *all_down = "mlp.experts.down_proj";
  bool fused_experts = false, transposed_experts = false;
  // The choice bias of a router, and whether its shape is [1, experts] instead of [experts].
  const char* choice_bias = "mlp.gate.e_score_correction_bias";
  bool choice_bias_is_row = false;
  bool transposed = false;  // files hold the matrices as [in, out]
};

// The names of parameters in a family's files.
struct FileNames {
  // model: the prefix of the model's own parameters, which files of models with a head have and others lack.
  // kept: whether Param::name includes it.
  const char* model;
  bool kept;
  std::vector<std::string_view> own;  // the beginnings of the model's own names, without the prefix
  const char* layers;                 // the text before a layer's number in Param::name
  const char* embedding;              // the table of tokens
  const char* norm;                   // the final norm, without ".weight"
  BlockNames block = {};
  // Parts of names that transformers writes by other names than the family's released files have: read as
  // the second of each pair.
  std::vector<std::pair<std::string_view, std::string_view>> renamed = {};
  // Files may have layers after the model's last one, which predict further tokens and are left out.
  bool extra_layers = false;
};

// The keys of config.json for the model's sizes, for use in errors.
struct SizeNames {
  const char *context, *width, *layers, *heads, *kv_heads, *inner, *eps;
};

struct DecoderRules;

struct Family {
  Arch arch;
  const char* name;          // in the "model" section of a run
  const char* model_type;    // in config.json
  const char* architecture;  // the first of "architectures" in config.json
  const char* title;         // for people
  FileNames files;
  FamilyForm form;
  SizeNames sizes;
  // Read a config.json or a "model" section, write a config.json's keys, and document the section's.
  ModelConfig (*read)(const Family& family, const hf::Keys& keys, hf::Origin origin);
  void (*write)(const Family& family, const ModelConfig& config, nlohmann::ordered_json& out);
  std::vector<ModelKey> (*keys)(const Family& family);
  const DecoderRules* rules = nullptr;  // rules for the functions of decoder.hpp; null in other families
  const char* other_type = "";          // another model_type of models that are computed in the same way
};

// Texts of documented keys.
inline constexpr const char* kSizeText = "whole number, 1 or more";
inline constexpr const char* kNumberText = "number above 0";
inline constexpr const char* kDeviationText = "number, 0 or more";
inline constexpr const char* kBoolText = "`true`, `false`";

std::span<const Family* const> families();  // all, as kFamilies lists them
const Family& family_of(Arch arch);
// All names, each in quotes: "gpt2, llama ... and gemma3", with `last` between the last two.
std::string family_names(const char* quote = "", const char* last = " and ");
// The text before a layer's number in the parameter names of a model with a head: "transformer.h",
// "model.layers".
std::string layers_with_head(const Family& family);

const Family& gpt2();
const Family& llama();
const Family& mistral();
const Family& qwen2();
const Family& qwen3();
const Family& phi3();
const Family& olmo2();
const Family& gemma2();
const Family& gemma3();
const Family& mixtral();
const Family& qwen2_moe();
const Family& qwen3_moe();
const Family& olmoe();
const Family& granite_moe();
const Family& gpt_oss();
const Family& glm4_moe();
const Family& ernie4_moe();
const Family& minimax_m2();
const Family& deepseek_v2();
const Family& deepseek_v3();

}  // namespace zg::model
