// Operations that are calls of the model: what the calls are given, what they exchange with the other parts
// of a model or of sequences, and what they drop.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/context_parts.hpp"
#include "engine/op_context.hpp"
#include "engine/part_exchange.hpp"
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

  // Before any operation of a program: what is exchanged from here on is for it.
  void begin(const StepOp& op);
  // Enqueues the operation, whose leases the context has. A call on a unit in tiles begins with the first of
  // its operations and ends with the last one; others that make its tiles, or finish their gradients, may be
  // issued between them.
  void issue(const StepOp& op);
  // Whether a call on a unit in tiles is under way.
  bool within_call() const { return call_.has_value(); }
  // Whether the same operation with the same leases enqueues the same in every step, on the compute stream
  // alone. What drops elements drops others in every step, and exchanges must meet those of the other parts.
  bool repeats(const StepOp& op) const;

  // Streams of exchanges, beside those of the context; null: there is none.
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
  std::unique_ptr<GroupExchange> parts_;     // null: the model is whole
  std::unique_ptr<ContextParts> sequences_;  // null: sequences are whole
  const Model model_;                        // the layout's, with parts_
  // By unit; empty: nothing is ever dropped.
  std::vector<std::array<RandomKey, 2>> dropout_keys_;
  std::vector<RandomKey> adapter_keys_;
  std::optional<std::int64_t> step_;
  double head_scale_ = 1;
  std::optional<TileCall> call_;      // on a unit in tiles, under way
  std::vector<void*> call_operands_;  // of it, which stay where they are
};

}  // namespace zg
