// Some experts of a layer: gated MLPs, each of which computes the rows of the tokens that the router has
// chosen it for.
#pragma once
#include "model/structure.hpp"

namespace zg::model {

class ExpertBlock final : public Block {
 public:
  // Both must outlive the block.
  ExpertBlock(const ModelShape& shape, const Unit& unit) : Block(unit, shape.routed), shape_(shape) {}

  std::int64_t saved_bytes(BatchShape, Backward) const override { return 0; }
  std::int64_t workspace_bytes(BatchShape batch, Backward how) const override;
  std::vector<TensorParallelCall> exchanges(ModelCall call, BatchShape batch) const override;
  std::vector<ContextCall> context_calls(BatchShape, Direction) const override { return {}; }
  std::vector<TileUse> tile_uses(ModelCall) const override { return {}; }
  double forward_products(std::int64_t time) const override;
  void run(const Call& call) const override;

 private:
  // Whether the unit has the last experts that this rank has of the layer: the last of a forward, and the
  // first of a backward.
  bool is_last() const {
    const ExpertShard& own = shape_.shard.experts;
    const std::int64_t all = config().experts.count;
    return unit().first_expert + unit().expert_count == own.first(all) + own.count(all);
  }
  void forward(const Call& call) const;
  void backward(const Call& call) const;

  const ModelShape& shape_;
};

}  // namespace zg::model
