// The tensors of an adapter's file: their names and shapes, and which A and B of a model's units they hold.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/model/config.hpp"

namespace zg::model {

// A tensor that holds one A or B, or those of all experts of a layer. With E experts, A is [E * rank, in],
// the expert slowest; B is [out, rank * E], the expert fastest.
struct AdapterTensor {
  std::string name;  // without the prefix of PEFT's names
  std::int64_t rows = 0, cols = 0;
  bool b = false;
  std::vector<std::string> params;  // Param::name of the A or B, by expert if there are several

  std::int64_t experts() const { return static_cast<std::int64_t>(params.size()); }
};

// The tensors of a layer for the adapters of model.lora, in the order of a file. PEFT wraps the module of all
// experts once for each of its parameters, so the names of the wrapped parameter's tensors depend on whether
// the other one is adapted, too.
std::vector<AdapterTensor> adapter_tensors(const ModelConfig& model, std::int64_t layer);

// The path of an expert's modules within the layer: "mlp.experts.7".
std::string expert_path(const ModelConfig& model, std::int64_t expert);

// Copies all experts' elements of B between a file's order, [out, rank, E], and theirs, [E, out, rank].
void split_experts(const float* file, std::int64_t pairs, std::int64_t experts, float* by_expert);
void join_expert(const float* one, std::int64_t pairs, std::int64_t expert, std::int64_t experts,
                 float* file);

}  // namespace zg::model
