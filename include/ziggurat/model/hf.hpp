// Hugging Face directories: config.json and safetensors (one file, or shards with an index), in and out.
//
// All of it is called at set-up or between steps. What is opened here is immutable afterwards, so its const
// members may be called from any thread at once.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg {

// A safetensors file, mapped and checked in full when opened: header length, JSON, dtypes, shapes, offsets
// (no hole, overlap or duplicate; the last one ends the file). Throws Error(kUsage) with file and reason.
//
// Owns the mapping, into which Entry::data points; `data` has no alignment to rely on. The file must not be
// cut short while it is open: the operating system answers a read beyond its end with SIGBUS.
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
  const std::string& path() const { return path_; }
  // In the order of their bytes in the file.
  const std::vector<Entry>& entries() const { return entries_; }
  const Entry* find(const std::string& name) const;
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }
  // These bytes of the mapping will not be needed soon: they leave this process's resident memory, and come
  // back from the page cache or the drive if they are read again.
  void drop(const void* data, std::int64_t bytes) const;

 private:
  void open_and_map();
  void parse();

  std::string path_;
  void* map_ = nullptr;
  std::int64_t map_bytes_ = 0;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> by_name_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

// config.json of GPT-2 or Llama (model_type, or architectures). Throws Error(kUsage) for another
// architecture, an activation or a RoPE scaling that is not supported, a missing or wrong key.
ModelConfig read_hf_config(const std::string& directory);
// The text of a config.json; dtype is what the weights beside it are stored as.
std::string write_hf_config(const ModelConfig& config, DType dtype = DType::kF32);

// The weights of a directory, checked against the model when opened: every parameter present with the right
// shape and a supported dtype (F64, F32, F16, BF16), with or without the prefix "transformer."; of two tied
// names one suffices (and if both are there they must be equal). Buffers that are no parameters (attn.bias,
// attn.masked_bias, rotary_emb.inv_freq) are ignored; anything else unknown is an error. Where there is
// model.safetensors, an index beside it is not looked at. Throws Error(kUsage). Owns the mappings; keeps
// nothing of `model`.
class HfWeights {
 public:
  HfWeights(const std::string& directory, const Model& model);
  ~HfWeights();
  // Elements [begin, end) of a parameter in the layout of Param (a Conv1D's are gathered from the transposed
  // file). A few MiB of the file at most become resident, and are dropped again. Ask for large ranges: each
  // call that gathers walks over the whole file part. Any thread, several at once.
  void read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes config.json and model.safetensors (or shards of at most `shard_bytes` with an index; a tensor larger
// than that has a shard of its own). Memory use is bounded (some 12 MiB, whatever the model's size).
// `read(unit, param, begin, end, out)` is asked for fp32 elements in the layout of Param, ascending per
// parameter, on the calling thread.
//
// Every file is written aside as "<name>.part", synced, and renamed only when all are complete; should
// anything fail before, `read` included, the directory is as it was. At the end, weights of an earlier save
// that the new ones do not overwrite are removed (model*.safetensors and the index), lest they be loaded
// instead. dtype: kF32 or kBF16. Throws Error(kIo).
using ReadParam = std::function<void(const Unit& unit, const Param& param, std::int64_t begin,
                                     std::int64_t end, float* out)>;
void save_hf(const std::string& directory, const Model& model, DType dtype, const ReadParam& read,
             std::int64_t shard_bytes = std::int64_t{5} << 30);

}  // namespace zg
