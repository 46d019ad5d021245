// A forward or backward of a unit, with the operands that its operation has.
#pragma once
#include <optional>

#include "engine/tile_walk.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

class StepExecutor::Pass {
 public:
  Pass(StepExecutor& engine, const StepOp& op);
  void issue();

 private:
  void embedding();
  void forward(const View& out, void* saved);
  void head_loss();
  void head();
  void backward();
  void backward_input();
  void backward_weight();
  void embedding_backward();

  void* data(Operand operand) const { return engine_.lease(op_, operand).data(); }
  View flat(Operand operand, TensorId id) const;  // of the unit, or of the one that has the table
  View rows(Operand operand) const;
  View weight() const { return flat(Operand::kWeight, unit_.weight); }
  // Null: the unit's own parameters are frozen.
  View accumulator() const {
    return op_.has(Operand::kAccumulator) ? flat(Operand::kAccumulator, unit_.accumulator) : View();
  }
  // Null where the unit has no adapters, as are those that the operation does not have.
  AdapterViews adapters() const;
  // The output matrix: of the embedding's weight if the head is tied, otherwise of the head's own weight.
  View table() const;
  TileAccess* tiles() { return walk_ ? &*walk_ : nullptr; }
  const DropoutPlace* dropout() const { return dropout_ ? &*dropout_ : nullptr; }

  StepExecutor& engine_;
  const StepOp& op_;
  const Model& model_;
  const Workspace workspace_;
  const BatchShape shape_;
  const Layout::UnitTensors& unit_;  // of a unit in tiles, the first one
  Stream& stream_;
  const Gradients into_;  // what the first micro-batch finds in an accumulator is left over from others
  std::optional<TileWalk> walk_;
  const std::optional<DropoutPlace> dropout_;
  const std::int64_t layer_;  // of a block
  const View documents_;
};

}  // namespace zg
