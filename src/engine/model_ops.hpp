// Operations that call the model: the operands of the calls, their exchanges with ranks that compute other
// parts of the same call, and dropout.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/context_parallel_comm.hpp"
#include "engine/op_context.hpp"
#include "engine/router_ops.hpp"
#include "engine/tensor_parallel_comm.hpp"
#include "engine/tile_call.hpp"

namespace zg {

class ModelOps {
 public:
  // The context must outlive it.
  ModelOps(OpContext& context, const StepExecutor::Options& options);

  // The training step that runs; empty: an evaluation, which drops nothing.
  void set_step(std::optional<std::int64_t> step) { step_ = step; }
  // The factor by which the head multiplies the gradient of the loss at the start of the backward.
  void set_head_scale(double scale) { head_scale_ = scale; }
  double head_scale() const { return head_scale_; }

  // Called before each operation: the exchanges that follow are counted for it.
  void begin(const StepOp& op);
  // Enqueues the operation, whose leases are in the context. A call on a unit in tiles begins with its first
  // operation and ends with its last one. Operations that materialize its tiles, or finish their gradients,
  // may be issued between them.
  void issue(const StepOp& op);
  // Ends a call on a unit in tiles whose later operations will not be issued, since an operation failed.
  void cancel() { call_.reset(); }
  // Whether a call on a unit in tiles is under way.
  bool within_call() const { return call_.has_value(); }
  // Whether the operation enqueues the same work in every step, on the compute stream alone. It does not with
  // dropout, since masks differ, nor with exchanges, each of which must meet the exchanges of the other
  // ranks.
  bool repeats(const StepOp& op) const;

  // The streams of the exchanges with context-parallel ranks, with tensor-parallel ranks and with the expert
  // group, in this order; null if this rank makes no such exchanges.
  std::array<Stream*, 3> streams() const;
  void add_traffic(CommTraffics& all) const;
  // Null if the model has no experts.
  RouterOps* routers() const { return routers_.get(); }

 private:
  void run(const StepOp& op, const UnitCall& call) const;
  void go_on(const StepOp& op);
  std::optional<DropoutPlace> dropout_of(const StepOp& op) const;
  UnitCall operands_of(const StepOp& op);
  View flat(const StepOp& op, Operand operand, TensorId id, const Layout::TileTensors& tile);
  View rows(const StepOp& op, Operand operand);

  OpContext& context_;
  std::unique_ptr<TensorParallelComm> parts_;       // null without tensor parallelism
  std::unique_ptr<TensorParallelComm> experts_;     // null if each rank has all experts
  std::unique_ptr<ContextParallelComm> sequences_;  // null without context parallelism
  std::unique_ptr<RouterOps> routers_;              // null if the model has no experts
  const Model model_;                               // the layout's model, using parts_ and experts_
  // Indexed by unit; empty if the model has no dropout.
  std::vector<std::array<RandomKey, 2>> dropout_keys_;
  std::vector<RandomKey> adapter_keys_;
  std::optional<std::int64_t> step_;
  double head_scale_ = 1;
  std::optional<TileCall> call_;      // the call on a unit in tiles that is under way, if any
  std::vector<void*> call_operands_;  // its operands; they must not move meanwhile
};

}  // namespace zg
