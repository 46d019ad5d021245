// What the "quantization_config" of a config.json says, as far as the tensors of the files do not. Private to
// src/model.
#pragma once
#include <cstdint>
#include <string>

#include "model/hf_keys.hpp"

namespace zg::hf {

struct Quantization {
  enum class Method { kNone, kBitsAndBytes, kFp8, kCompressedTensors, kGptq, kAwq, kMxfp4 };
  Method method = Method::kNone;
  // kFp8: elements that share a scale; 0: a matrix has one scale, or one for each row.
  std::int64_t block_rows = 0, block_cols = 0;
  std::int64_t group = 0;  // kGptq, kAwq: consecutive inputs that share a scale; 0: all
  // kGptq: files of the first version store each zero point less one.
  bool zeros_less_one = false;
};

// The quantization of a config.json; kNone if it names none. Throws Error(kUsage) for a kind that cannot be
// read, with the kinds that can.
Quantization read_quantization(const Keys& config);
// The same for the config.json of a directory; kNone if there is no such file.
Quantization read_quantization(const std::string& directory);

}  // namespace zg::hf
