// Operations on a tile's weight and gradient before and after its forwards and backwards: the weight is made
// from its stored form, the gradient is summed over the ranks and cast for the optimizer, and the optimizer
// updates the stored form.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/op_context.hpp"

namespace zg {

class WeightOps {
 public:
  // The context must outlive it. The random numbers of stochastic rounding depend on `seed` and the names of
  // parameters.
  WeightOps(OpContext& context, std::uint64_t seed);

  UpdateRule rule;  // of the updates that are being issued

  void materialize(const StepOp& op);
  void finish_gradient(const StepOp& op);
  void update(const StepOp& op);

 private:
  void decode(const StepOp& op);
  void gather_quantized(Communicator& shards, const View& shard, const View& weight);
  View sum_quantized(Communicator& group, const View& sum);
  void sum_copies(const StepOp& op);
  UpdateParams params_of(const StepOp& op, const Layout::StateRange& range) const;

  OpContext& context_;
  const Layout& layout_;
  std::vector<std::vector<RandomKey>> random_;  // by unit and parameter
};

}  // namespace zg
