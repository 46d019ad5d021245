// Operations that call the model: the operands of the calls, their exchanges with the other parts of the
// model or of sequences, and dropout.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/context_parallel_comm.hpp"
#include "engine/op_context.hpp"
#include "engine/tensor_parallel_comm.hpp"
#include "engine/tile_call.hpp"

namespace zg {

class ModelOps {
 public:
  // The context must outlive it.
  ModelOps(OpContext& context, const StepExecutor::Options& options);

  // The step of training that runs; none: an evaluation, which drops nothing.
  void set_step(std::optional<std::int64_t> step) { step_ = step; }
  // The factor of the gradient with which the head starts the backward.
  void set_head_scale(double scale) { head_scale_ = scale; }
  double head_scale() const { return head_scale_; }

  // Called before each operation: exchanges from here on are counted for it.
  void begin(const StepOp& op);
  // Enqueues the operation, whose leases the context has. A call on a unit in tiles begins with the first of
  // its operations and ends with the last one; others that make its tiles, or finish their gradients, may be
  // issued between them.
  void issue(const StepOp& op);
  // Ends a call on a unit in tiles whose later operations will not come, since one has failed.
  void cancel() { call_.reset(); }
  // Whether a call on a unit in tiles is under way.
  bool within_call() const { return call_.has_value(); }
  // Whether the operation enqueues the same work in every step, on the compute stream alone. It does not with
  // dropout, whose masks differ, and with exchanges, each of which must meet the other parts' exchange.
  bool repeats(const StepOp& op) const;

  // The streams on which calls exchange: of sequences, and of parts of the model. Null: there is no such
  // stream.
  std::array<Stream*, 2> streams() const;
  void add_traffic(CommTraffics& all) const;

 private:
  void run(const StepOp& op, const UnitCall& call) const;
  void go_on(const StepOp& op);
  std::optional<DropoutPlace> dropout_of(const StepOp& op) const;
  UnitCall operands_of(const StepOp& op);
  View flat(const StepOp& op, Operand operand, TensorId id, const Layout::TileTensors& tile);
  View rows(const StepOp& op, Operand operand);

  OpContext& context_;
  std::unique_ptr<TensorParallelComm> parts_;       // null: the model is whole
  std::unique_ptr<ContextParallelComm> sequences_;  // null: sequences are whole
  const Model model_;                               // the layout's, with parts_
  // By unit; empty: nothing is ever dropped.
  std::vector<std::array<RandomKey, 2>> dropout_keys_;
  std::vector<RandomKey> adapter_keys_;
  std::optional<std::int64_t> step_;
  double head_scale_ = 1;
  std::optional<TileCall> call_;      // on a unit in tiles, under way
  std::vector<void*> call_operands_;  // its operands, which must not move while it is under way
};

}  // namespace zg
