// Access to weights and optimizer state between two steps. Checkpoints save and restore all of them, so that
// a later run continues with the same bits, even with a different layout. For a saved model, they are read
// parameter by parameter.
#pragma once
#include <functional>
#include <optional>
#include <utility>

#include "engine/host_lease.hpp"
#include "engine/op_context.hpp"

namespace zg {

// Iterates over the state of a rank: with a program, which has one operation for each segment of state; or,
// without a program, over the elements of one parameter.
class StateStream {
 public:
  // The context must outlive it.
  explicit StateStream(OpContext& context)
      : context_(context), layout_(context.layout), device_(context.device), store_(context.store) {}

  using EachOp = std::function<void(const StepOp& op)>;
  void for_each_op(const ProgramStart& start, const EachOp& each);
  // Runs the program that gives the tensors their first contents, and then demotes the tensors to their
  // lowest tiers. Returns the store's traffic so far.
  LinkBytes initialize(const ProgramStart& start, const EachOp& each);
  void restore(const StepOp& op, const TileVisitor& fill);
  void adopt(const StepOp& op, const TileVisitor& base);
  void save(const StepOp& op, const TileVisitor& take);

  // Visits elements [begin, end) of a parameter, one state segment after the other. The visitor receives the
  // state (and weight, if needed) of `skip` + `count` elements. Its elements from `skip` on are elements
  // `first` to `first` + `count` of the range, counted from `begin`.
  using Visitor = std::function<void(const OptimizerState& state, View weight, std::int64_t first,
                                     std::int64_t skip, std::int64_t count)>;
  enum class Weights {
    kNeeded,
    kNotNeeded
  };  // whether the visitor reads the weight; it always does for frozen parameters
  void visit(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end, Weights weights,
             const Visitor& visitor);

 private:
  void visit_tile(std::int32_t tile, const Param& param, std::int64_t begin, std::int64_t end,
                  Weights weights, const Visitor& visitor);
  using FrozenVisitor = std::function<void(const Param& param, std::int64_t first, std::int64_t count)>;
  void restore_codes(const StepOp& op, const TileVisitor& fill);
  void visit_frozen(const StepOp& op, const FrozenVisitor& visit);
  using Part = std::optional<HostLease::Part>;  // empty: the whole segment
  HostLease on_host(Lease lease, Tier tier, Access access, const Part& part = std::nullopt);
  // The operation's lease on an operand, with the bytes at the host.
  HostLease leased(const StepOp& op, Operand operand, Tier tier, Access access,
                   const Part& part = std::nullopt) {
    return on_host(std::move(context_.lease(op, operand)), tier, access, part);
  }
  // The weight that the operation fills. The first operation of a tile zeroes the whole weight, including
  // gaps.
  HostLease weight_to_fill(const StepOp& op, Tier tier);
  // The bytes of the weight that belong to the operation's segment of state. Each operation copies only these
  // bytes to the host and back, since a large unit has hundreds of operations.
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
