// What is done with a unit's weight and gradient (or a tile's) between its passes: the weight is gathered
// from its shards, the gradient is summed over the ranks and cast for the optimizer, and the optimizer
// updates the weight.
#pragma once
#include "engine/timer.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

class StepExecutor::WeightOps {
 public:
  WeightOps(StepExecutor& engine, const StepOp& op)
      : engine_(engine), layout_(engine.layout_), device_(engine.device_), groups_(engine.groups_), op_(op) {}

  void materialize();
  void finish_gradient();
  void update();

 private:
  void gather_quantized(const View& shard, const View& weight);
  View sum_quantized(Communicator& group, const View& sum);
  void sum_copies();
  void* data(Operand operand) const { return engine_.lease(op_, operand).data(); }

  StepExecutor& engine_;
  const Layout& layout_;
  Device& device_;
  const Groups& groups_;
  const StepOp& op_;
};

}  // namespace zg
