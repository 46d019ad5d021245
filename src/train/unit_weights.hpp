// The fp32 weights of a model's units, for callers that use the units in order, pass after pass.
//
// If memory cannot hold all weights, the last blocks are read from the model's files in each pass, each while
// the block before it is used. Experts are read when they are first used, and kept while there is room for
// them: the one that was not used for the longest time goes first.
//
// Threads: one at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <future>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg {

class UnitWeights {
 public:
  // `memory`: the most bytes that weights may take; 0: most of the memory that the process may have. `model`
  // must outlive the weights. `adapters`: a directory of adapters that are merged into the weights; empty:
  // none. Throws Error(kUsage) for files that do not fit the model, Error(kMemory) if not even the embedding,
  // the head and two blocks fit or, in a model with experts, all that is no expert and one unit of experts.
  UnitWeights(const std::string& directory, const Model& model, std::int64_t memory,
              const std::string& adapters = "");
  ~UnitWeights();

  // The unit's flat tensor. If the block is not resident, the tensor stays valid only until the next block
  // that is not resident is used.
  View use(std::size_t unit);
  // The choice bias of a layer's router; null if it has none.
  View choice_bias(std::int64_t layer) const {
    if (choice_biases_.empty()) return View();
    const std::int64_t n = model_.config().experts.count;
    return {const_cast<float*>(choice_biases_.data()) + layer * n, DType::kF32, 1, n};
  }
  // Blocks that are read in each pass, experts aside.
  std::size_t read_anew() const {
    return model_.config().experts.on() ? 0 : model_.units().size() - 1 - resident_blocks_ - 1;
  }
  std::int64_t experts_read() const { return experts_read_; }  // units of experts that were read so far

 private:
  void choose_residents(std::int64_t memory);
  void read(std::size_t unit, Buffer& into) const;
  void make_room_for_experts(std::int64_t room);
  View use_experts(std::size_t unit);
  bool is_resident(std::size_t unit) const {
    if (model_.config().experts.on()) return !model_.units()[unit].is_experts();
    return unit <= resident_blocks_ || unit + 1 == model_.units().size();
  }
  std::size_t behind(std::size_t unit) const;  // the block that is read after `unit`

  const Model& model_;
  const HfWeights source_;
  const std::vector<float> choice_biases_;  // [layers, experts], or empty
  std::optional<AdapterWeights> adapters_;
  std::size_t resident_blocks_ = 0;  // units 1 to this one
  std::vector<Buffer> residents_;    // indexed by unit
  // The block in use, and the block that is being read.
  Buffer slots_[2];
  std::size_t used_ = 0, coming_ = 0;  // units; 0: none
  int coming_slot_ = 0;
  std::future<void> reading_;
  // Units of experts in memory, the one that was used last in front.
  std::list<std::size_t> cached_;
  std::int64_t cached_bytes_ = 0, cache_bytes_ = 0, experts_read_ = 0;
};

}  // namespace zg
