// Weights and optimizer state between two steps: on their way into a checkpoint and back, with all that a
// later run needs to go on bit by bit, whatever the layout that it keeps them in; and read parameter by
// parameter, for a model that is saved.
#pragma once
#include <functional>
#include <optional>
#include <utility>

#include "engine/host_lease.hpp"
#include "engine/op_context.hpp"

namespace zg {

// Goes through the state of a rank: along a program that has an operation for each segment of it, or, without
// a program, through the elements of one parameter.
class StateStream {
 public:
  // The context must outlive it.
  explicit StateStream(OpContext& context)
      : context_(context), layout_(context.layout), device_(context.device), store_(context.store) {}

  using EachOp = std::function<void(const StepOp& op)>;
  void for_each_op(const ProgramStart& start, const EachOp& each);
  // Runs the program that gives the tensors their first contents, and then demotes them to their lowest
  // tiers. Returns the store's traffic until then.
  LinkBytes initialize(const ProgramStart& start, const EachOp& each);
  void restore(const StepOp& op, const TileVisitor& fill);
  void adopt(const StepOp& op);
  void save(const StepOp& op, const TileVisitor& take);

  // Visits elements [begin, end) of a parameter in its state and weight, one state segment after the other.
  using Visitor = std::function<void(const OptimizerState& state, View weight, std::int64_t first,
                                     std::int64_t skip, std::int64_t count)>;
  enum class Weights {
    kNeeded,
    kNotNeeded
  };  // whether the visitor reads the weight; frozen parameters: always kNeeded
  void visit(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end, Weights weights,
             const Visitor& visitor);

 private:
  void visit_tile(std::int32_t tile, const Param& param, std::int64_t begin, std::int64_t end,
                  Weights weights, const Visitor& visitor);
  using FrozenVisitor = std::function<void(const Param& param, std::int64_t first, std::int64_t count)>;
  void visit_frozen(const StepOp& op, const FrozenVisitor& visit);
  using Part = std::optional<HostLease::Part>;  // none: the whole segment
  HostLease on_host(Lease lease, Tier tier, Access access, const Part& part = std::nullopt);
  // What the operation has leased of an operand, at the host.
  HostLease leased(const StepOp& op, Operand operand, Tier tier, Access access,
                   const Part& part = std::nullopt) {
    return on_host(std::move(context_.lease(op, operand)), tier, access, part);
  }
  // The weight that the operation fills. Its first operation clears all of it, gaps too.
  HostLease weight_to_fill(const StepOp& op, Tier tier);
  // The part of the weight that belongs to the operation's segment of state. Each operation of a unit copies
  // that part alone to the host and back, since a large unit has hundreds of them.
  Part weight_part(const StepOp& op) const;
  HostLease host_lease(SegmentId segment, Access access, const Part& part = std::nullopt);
  Tier tier_of(const StepOp& op) const {
    return op.has(Operand::kState) ? layout_.update_at(op.unit) : Tier::kDevice;
  }

  OpContext& context_;
  const Layout& layout_;
  Device& device_;
  TensorStore& store_;
};

}  // namespace zg
