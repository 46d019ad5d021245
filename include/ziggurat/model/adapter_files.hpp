// Reads and writes directories of adapters as PEFT does: adapter_config.json and adapter_model.safetensors.
//
// Call these functions at set-up or between steps. Objects that have been opened are immutable, so several
// threads may call their const members at once.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "ziggurat/model/hf.hpp"

namespace zg {

namespace hf {
struct AdapterConfig;
}

// Reads an adapter_config.json for adapters of this model. Throws Error(kUsage) for another kind of adapters,
// for an unsupported key that would change the arithmetic, for modules that the model does not have, and for
// a missing or wrong key.
Lora read_adapter_config(const std::string& directory, const ModelConfig& model);
// The same from the text of an adapter_config.json; `where` names it in errors.
Lora parse_adapter_config(const std::string& json_text, const std::string& where, const ModelConfig& model);
// The text of an adapter_config.json for model.lora. base: the directory of the model that the adapters
// belong to.
std::string write_adapter_config(const ModelConfig& model, const std::string& base);

// The adapter of a matrix of the model: the names of its A and B (Param::name) without ".lora_A.weight", and
// the row of B at which the matrix's rows begin, since several matrices may share an adapter.
struct AdapterOfParam {
  std::string name;
  std::int64_t first_row = 0;
};
// Empty: adapters of this kind (model.lora) have none for the parameter, whatever the layer.
std::optional<AdapterOfParam> adapter_of(const ModelConfig& model, const Param& param);

// The adapters of a directory. Opening it checks both files against the model: for each module and layer that
// the configuration names there must be an A and a B of the right shape and a supported type, and there may
// be no other tensor. Throws Error(kUsage). Owns the open file.
class AdapterWeights {
 public:
  // model: the model that the adapters belong to. Its own Lora settings are ignored.
  AdapterWeights(const std::string& directory, const ModelConfig& model);
  ~AdapterWeights();
  const Lora& lora() const { return model_.lora; }
  // Writes elements [begin, end) of an adapter's parameter (Param::adapter) to fp32 `out` [end - begin]. In
  // layers whose module the directory does not adapt, A and B are zero: they then add nothing, and their
  // gradients are zero, too.
  void read(const Param& param, std::int64_t begin, std::int64_t end, float* out) const;
  // Adds factor() * B A, computed in fp32, to elements [begin, end) of a parameter of the model, `out` [end -
  // begin], if that parameter has an adapter. Returns whether it has.
  bool merge(const Param& param, std::int64_t begin, std::int64_t end, float* out) const;

 private:
  class Fused;
  // The tensor that holds an A or B: all of it, or what it has of one of the layer's experts.
  struct Place {
    const SafeTensors::Entry* entry = nullptr;
    std::int64_t expert = 0, experts = 1;
    bool b = false;
  };
  AdapterWeights(const std::string& directory, const ModelConfig& model, hf::AdapterConfig config);
  // The tensor of that name, which must have this shape.
  const SafeTensors::Entry& check(const std::string& name, const std::vector<std::int64_t>& shape) const;
  // Null: the directory does not adapt this module in this layer.
  const Place* find(const std::string& param) const;
  void read(const Place& place, std::int64_t begin, std::int64_t end, float* out) const;

  ModelConfig model_;  // with the directory's Lora
  SafeTensors file_;
  std::map<std::string, Place> places_;  // by Param::name of A and B
  std::unique_ptr<Fused> fused_;
};

// The values of A and B that belong to some consecutive rows of an adapter's matrix.
struct AdapterValues {
  const float* a = nullptr;  // [rank, cols]
  const float* b = nullptr;  // [.., rank], from the first of the matrix's rows on
  std::int64_t rank = 0, cols = 0;
  double factor = 1;
};
// Adds factor * B A, computed in fp32, to elements [begin, end) of a row-major matrix with `cols` columns.
// values.b begins with the row that contains element `begin`.
void add_adapter(const AdapterValues& values, std::int64_t begin, std::int64_t end, float* out);

// Writes a directory of adapters. `model` must have a Lora. `read` is called on the calling thread for the
// parameters with Param::adapter. Files appear whole or not at all, as save_hf() writes them. Throws
// Error(kIo).
void save_adapters(const std::string& directory, const Model& model, const std::string& base,
                   const ReadParam& read);

}  // namespace zg
