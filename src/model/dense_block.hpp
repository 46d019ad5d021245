// The block of a layer, of all families: attention, and an MLP that every token passes or, in a layer with
// experts, the router, with an MLP beside the experts if the model has one.
#pragma once
#include <cstdint>
#include <vector>

#include "model/structure.hpp"

namespace zg::model {

class DenseBlock final : public Block {
 public:
  // rope: null if positions do not rotate. All must outlive the block.
  DenseBlock(const ModelShape& shape, const RopeTable* rope, const Unit& unit)
      : Block(unit, shape.whole.has_experts(unit.layer) ? shape.routed : shape.here),
        shape_(shape),
        rope_(rope) {}

  std::int64_t saved_bytes(BatchShape batch, Backward how) const override;
  std::int64_t workspace_bytes(BatchShape batch, Backward how) const override;
  std::vector<TensorParallelCall> exchanges(ModelCall call, BatchShape batch) const override;
  std::vector<ContextCall> context_calls(BatchShape batch, Direction direction) const override;
  std::vector<TileUse> tile_uses(ModelCall call) const override;
  // The elements of the matrices for the products with weights, and (q + o) / 2 * time for the two of
  // attention, of which half is masked away; a window w shorter than `time` leaves (q + o) / 2 * w *
  // (2 - w / time). Here q and o are the columns of queries and of attention's result.
  double forward_products(std::int64_t time) const override;
  void run(const Call& call) const override;

 private:
  std::int64_t layer() const { return unit().layer; }
  bool routes() const { return shape_.whole.has_experts(layer()); }
  // Bytes of the workspace without tile_sums(), which follow it.
  std::int64_t scratch_bytes(BatchShape batch, Backward how) const;
  // The buffer for sums of products over a block's tiles: A [N, widest input]; null if it needs none.
  View tile_sums(BatchShape batch, void* at) const;

  const ModelShape& shape_;
  const RopeTable* rope_;
};

}  // namespace zg::model
