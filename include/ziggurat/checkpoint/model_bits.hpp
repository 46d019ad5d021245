// A checkpoint's model, described by keys of its manifest.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/model/config.hpp"

namespace zg {

// Resolved keys of a run's configuration, and similar keys, on which the run's bits depend.
using BitKeys = std::vector<std::pair<std::string, std::string>>;

// Keys that a checkpoint may lack. Without kBlockKey its value is kPlainBlock: GPT-2, or a Llama without
// options. compare_bits() and model_of() know the default values of the others.
inline constexpr const char* kBlockKey = "model.block";
inline constexpr const char* kPlainBlock = "plain";
inline constexpr const char* kEmbeddingDropoutKey = "model.dropout.embedding";
inline constexpr const char* kResidualDropoutKey = "model.dropout.residual";
inline constexpr const char* kLoraKey = "lora";
inline constexpr const char* kLoraArithmeticKey = "lora.arithmetic";
inline constexpr const char* kBaseKey = "lora.base";
inline constexpr const char* kBaseInElements = "elements";

// The keys that the model contributes.
BitKeys model_bits(const ModelConfig& model);
// The model that these keys describe. Throws Error(kUsage) at `where` for a key that is missing or
// wrong.
ModelConfig model_of(const BitKeys& bits, const std::string& where);

}  // namespace zg
