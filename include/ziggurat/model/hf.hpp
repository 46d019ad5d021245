// Reads and writes Hugging Face directories: config.json and safetensors (one file, or shards with an index).
//
// Call these functions at set-up or between steps. Objects that have been opened are immutable, so several
// threads may call their const members at once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ziggurat/base/file.hpp"
#include "ziggurat/model/model.hpp"
#include "ziggurat/model/param_code.hpp"
#include "ziggurat/model/saved_code.hpp"

namespace zg {

// A safetensors file. Opening it checks the whole header: its length, JSON, dtypes, shapes and offsets (no
// hole, overlap or duplicate; the last tensor ends the file). Throws Error(kUsage) with file and reason.
//
// Owns the open file. Its bytes are read with pread(): mapped memory would end the process if the drive
// failed, or if another program truncated the file.
class SafeTensors {
 public:
  struct Entry {
    std::string name;
    std::string dtype;  // as in the file: "F32", "BF16", ...
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0;  // position of the tensor's first byte in the file
    std::int64_t bytes = 0;
    std::int64_t count() const;
  };
  // `what` names the file's purpose in errors.
  explicit SafeTensors(const std::string& path, const std::string& what = "a safetensors file");
  SafeTensors(const SafeTensors&) = delete;
  SafeTensors& operator=(const SafeTensors&) = delete;
  const std::string& path() const { return file_.path(); }
  // The tensors, in the order of their bytes in the file. The references belong to this object; the overloads
  // for temporary objects are deleted, so that no loop can outlive the object.
  const std::vector<Entry>& entries() const& { return entries_; }
  const std::vector<Entry>& entries() const&& = delete;
  const Entry* find(const std::string& name) const&;  // null if there is no tensor of this name
  const Entry* find(const std::string& name) const&& = delete;
  const std::vector<std::pair<std::string, std::string>>& metadata() const& { return metadata_; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const&& = delete;
  // Reads bytes [begin, begin + bytes) of one of the tensors. Throws Error(kIo) with file, tensor, place and
  // cause for an error of the drive, and for a file that was truncated since it was opened.
  void read(const Entry& entry, std::int64_t begin, std::int64_t bytes, void* out) const;

 private:
  void parse();

  InputFile file_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> by_name_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

// Reads the config.json of a model, whose "model_type" or "architectures" names the family. Throws
// Error(kUsage) for an unknown family, for an unsupported key that would change the arithmetic, and for a
// missing or wrong key.
ModelConfig read_hf_config(const std::string& directory);
// The same from the text of a config.json; `where` names it in errors.
ModelConfig parse_hf_config(const std::string& json_text, const std::string& where);
// The end-of-text tokens of the model in a directory: "eos_token_id" of its generation_config.json, or else
// of its config.json; empty if neither names one. Throws Error(kUsage).
std::vector<std::int32_t> read_hf_end_ids(const std::string& directory);
// The dropout settings of a directory's config.json that differ from a run with the rates `ours`, as text:
// "embd_pdrop 0.1, attn_pdrop 0.1"; empty: none differs. read_hf_config() ignores these settings. A run never
// drops attention probabilities. Throws Error(kUsage) as read_hf_config() does if the file is missing or is
// no JSON object.
std::string read_hf_dropout(const std::string& directory, const DropoutRates& ours = {});
// The text of a config.json. `dtype` is the type of the weights stored next to it.
std::string write_hf_config(const ModelConfig& config, DType dtype = DType::kF32);

// The weights of a directory. Opening it checks them against the model: each parameter must be present with
// the right shape and a supported dtype (F64, F32, F16, BF16), or coded in 4 or 8 bits: NF4 of bitsandbytes,
// FP8 in blocks, INT4, MXFP4 and FP8 of compressed-tensors, GPTQ and AWQ, which each tensor tells for itself;
// the "quantization_config" of config.json has what tensors do not say. Names may have the prefix
// "transformer.", or lack "model.", as the names of models without a head do. Of two tied tensors one
// suffices; if both are present they must hold equal values. Buffers that are not parameters (attn.bias,
// attn.masked_bias, rotary_emb.inv_freq) are ignored; tensors outside of the trained model (another head, an
// image encoder) are left out, with one warning; any other unknown tensor is an error. An index is ignored if
// model.safetensors exists. Throws Error(kUsage). Owns the open files; does not refer to `model` afterwards.
class HfWeights {
 public:
  HfWeights(const std::string& directory, const Model& model);
  ~HfWeights();
  // Writes elements [begin, end) of a parameter, as Param holds them, to fp32 `out` [end - begin], through at
  // most a few MiB of memory. A Conv1D is gathered from the transposed tensor in the file, so each call walks
  // over the whole tensor: ask for large ranges. Any thread; several calls may run at once. Throws
  // Error(kIo).
  void read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const;
  // The choice biases of all layers' routers, [layers, experts], zero where a layer has none; empty if the model
  // has none. Throws Error(kIo).
  std::vector<float> choice_biases(const Model& model) const;
  bool any_coded() const;
  bool is_coded(const Param& param) const;  // also as a part of a coded matrix
  // How the matrix of the files is coded to which the parameter belongs; none: it has plain elements.
  std::optional<ParamCode> code_of(const Param& param) const;
  // Writes codes and scales of rows [first_row, first_row + rows) of a coded parameter to memory from `base`
  // on, in the places of their code_of_part(). Any thread. Throws Error(kIo).
  void read_codes(const Param& param, std::int64_t first_row, std::int64_t rows, const CodePlaces& places,
                  std::byte* base) const;
  std::vector<std::string> files() const;  // the paths of all weight files
  bool all_bf16() const;                   // whether all parameters in the files are BF16 or coded

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes config.json and model.safetensors, or shards of at most `shard_bytes` and an index; a larger tensor
// has a file shard of its own. `dtype` is kF32 or kBF16. `read` is called on the calling thread for fp32
// elements [begin, end) of a parameter in the layout of Param, in ascending order; also of choice biases, which
// are written in fp32. Whole parameters are written: even if `model` is a tensor shard, `read` is asked for elements of the whole parameters. Memory
// use is bounded (about 12 MiB, whatever the model's size).
//
// Every file is first written as "<name>.part" and synced; the files are renamed only when all are complete.
// If anything fails before that, `read` included, the directory is left as it was. At the end, weights of an
// earlier save that were not overwritten (model*.safetensors and the index) are removed, so that they are not
// loaded instead of the new ones. Throws Error(kIo).
using ReadParam = std::function<void(const Unit& unit, const Param& param, std::int64_t begin,
                                     std::int64_t end, float* out)>;
void save_hf(const std::string& directory, const Model& model, DType dtype, const ReadParam& read,
             std::int64_t shard_bytes = std::int64_t{5} << 30);

struct CodedSave {
  std::int64_t matrices = 0, bytes = 0;  // that are coded; bytes of all tensors
  double largest_error = 0;              // |element - decoded element|, over all matrices
  std::string largest_error_in;          // the tensor's name
};
// As save_hf(), but the matrices of all layers are coded; norms, biases, the embedding and the output matrix
// are written in `dtype`. `progress` (null: none) is called with the bytes of elements that are done and of
// all. Besides what save_hf() throws, Error(kUsage) with the place `from` for a family whose matrices no
// library reads coded (GPT-2), for a matrix that does not fit the format, and for an element that is not
// finite.
CodedSave save_hf_coded(const std::string& directory, const std::string& from, const Model& model,
                        SavedCode code, DType dtype, const ReadParam& read,
                        const std::function<void(std::int64_t done, std::int64_t all)>& progress);
// The bytes of all tensors that save_hf_coded() would write. Reads no element, so it does not refuse elements
// that are not finite; else it throws Error(kUsage) as save_hf_coded() does.
std::int64_t coded_bytes(const std::string& from, const Model& model, SavedCode code, DType dtype);

}  // namespace zg
