// Hugging Face directories: config.json and safetensors (one file, or shards with an index), in and out.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg {

// A safetensors file, mapped and checked in full when opened: header length, JSON, dtypes, shapes, offsets (no hole,
// overlap or duplicate; the last one ends the file). Throws Error(kUsage) with file and reason.
class SafeTensors {
 public:
  struct Entry {
    std::string name;
    std::string dtype;  // as in the file: "F32", "BF16", ...
    std::vector<std::int64_t> shape;
    const void* data = nullptr;
    std::int64_t bytes = 0;
    std::int64_t count() const;
  };
  explicit SafeTensors(const std::string& path);
  ~SafeTensors();
  SafeTensors(const SafeTensors&) = delete;
  SafeTensors& operator=(const SafeTensors&) = delete;
  const std::vector<Entry>& entries() const { return entries_; }
  const Entry* find(const std::string& name) const;
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }

 private:
  std::string path_;
  void* map_ = nullptr;
  std::int64_t map_bytes_ = 0;
  std::vector<Entry> entries_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

// config.json of GPT-2 or Llama (model_type, or architectures). Throws Error(kUsage) for another architecture, an
// activation or a RoPE scaling that is not supported, a missing or wrong key.
ModelConfig read_hf_config(const std::string& directory);
// From an already parsed text with the same key names (the "model" section: "arch" instead of model_type).
ModelConfig parse_model_config(const std::string& json_text, const std::string& where);
std::string write_hf_config(const ModelConfig& config);  // the text of config.json

// The weights of a directory, checked against the model when opened: every parameter present with the right shape and
// a supported dtype (F64, F32, F16, BF16), with or without the prefix "transformer."; of two tied names one suffices
// (and if both are there they must be equal). Buffers that are no parameters (attn.bias, attn.masked_bias,
// rotary_emb.inv_freq) are ignored; anything else unknown is an error.
class HfWeights {
 public:
  HfWeights(const std::string& directory, const Model& model);
  ~HfWeights();
  // Elements [begin, end) of a parameter in the layout of Param (a Conv1D's are gathered from the transposed file).
  void read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes config.json and model.safetensors (or shards of at most `shard_bytes` with an index). Memory use is
// bounded (a few MiB, whatever the model's size). `read(unit, param, begin, end, out)` is asked for
// fp32 elements in the layout of Param, ascending per parameter. Files are written aside and renamed; nothing is left
// half-written. dtype: kF32 or kBF16. Throws Error(kIo).
using ReadParam = std::function<void(const Unit& unit, const Param& param, std::int64_t begin, std::int64_t end, float* out)>;
void save_hf(const std::string& directory, const Model& model, DType dtype, const ReadParam& read,
             std::int64_t shard_bytes = std::int64_t{5} << 30);

}  // namespace zg
