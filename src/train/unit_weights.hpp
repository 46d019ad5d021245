// The weights of a model's units in fp32, for whoever goes through them again and again in order.
//
// Where memory does not hold all of them, the last blocks are read from the model's own files for each pass,
// each while the one before it is used.
//
// Threads: one at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg {

class UnitWeights {
 public:
  // `memory`: the most bytes that weights may take; 0: most of what the process may have. `model` must
  // outlive the weights. Throws Error(kUsage) for files that do not fit the model, Error(kMemory) where not
  // even the embedding, the head and two blocks fit.
  // `adapters`: a directory of adapters that are merged into the weights; empty: none.
  UnitWeights(const std::string& directory, const Model& model, std::int64_t memory,
              const std::string& adapters = "");
  ~UnitWeights();

  // The unit's flat tensor. Of a block that is read anew it is there until the next such block is asked for.
  View use(std::size_t unit);
  std::size_t read_anew() const {
    return model_.units().size() - 1 - resident_blocks_ - 1;
  }  // blocks, per pass

 private:
  void choose_residents(std::int64_t memory);
  void read(std::size_t unit, Buffer& into) const;
  bool is_resident(std::size_t unit) const {
    return unit <= resident_blocks_ || unit + 1 == model_.units().size();
  }
  std::size_t behind(std::size_t unit) const;  // the block that is read after it

  const Model& model_;
  const HfWeights source_;
  std::optional<AdapterWeights> adapters_;
  std::size_t resident_blocks_ = 0;  // units 1 to this one
  std::vector<Buffer> residents_;    // by unit
  // The block in use, and the one that is being read.
  Buffer slots_[2];
  std::size_t used_ = 0, coming_ = 0;  // units; 0: none
  int coming_slot_ = 0;
  std::future<void> reading_;
};

}  // namespace zg
