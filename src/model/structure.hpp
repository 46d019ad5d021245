// The immutable data of a model, which copies of a Model share.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "ziggurat/model/model.hpp"

namespace zg::model {

// Values that all units of a model share.
struct ModelShape {
  ModelConfig whole;  // of the whole model
  ModelConfig here;   // with the sizes of this tensor shard
  // The same for blocks of layers with experts: the MLP is the one that all tokens pass.
  ModelConfig routed;
  TensorShard shard;
  DType dtype;
  const OpSizes* sizes;
};

struct Structure {
  ModelShape shape;
  std::vector<Unit> units;
  RopeTable rope, window_rope;  // of layers without and with a window, where positions rotate
  std::vector<std::unique_ptr<const Block>> blocks;  // of units 1, 2, ...; they refer to the members above
  std::vector<std::size_t> layer_units;              // by layer: the unit of its block; then the head's

  Structure(const ModelConfig& config, DType dtype, const OpSizes& sizes, const TensorShard& shard,
            BlockTiling tiling);
  Structure(const Structure&) = delete;
  Structure& operator=(const Structure&) = delete;

  // The most bytes that f says of a block. The sizes of experts' buffers depend on the configuration alone,
  // so one unit with experts stands for all, of which there may be tens of thousands.
  template <class F>
  std::int64_t most(const F& f) const {
    std::int64_t bytes = 0;
    bool experts = false;
    for (const auto& block : blocks) {
      if (block->unit().is_experts() && std::exchange(experts, true)) continue;
      bytes = std::max(bytes, f(*block));
    }
    return bytes;
  }
  const Unit& output_unit() const { return shape.whole.tied ? units.front() : units.back(); }
};

}  // namespace zg::model
