// The state that all kinds of operations share: the run's layout, device, streams and communicators, and the
// leases of the operation that is being issued.
//
// Only the rank's thread uses it, except `position`, `timer` and `stall`, whose comments say which threads
// may.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "engine/position.hpp"
#include "engine/stall_meter.hpp"
#include "engine/timer.hpp"
#include "ziggurat/step/workspace.hpp"

namespace zg {

// The communicators of the axes of sharding, for the weights that the same ranks share; null where this rank
// is alone. shards: kShards; replicas: kReplicas; pieces: kDataParallel.
struct ShardingGroups {
  std::unique_ptr<Communicator> shards, replicas, pieces;
};

class OpContext {
 public:
  explicit OpContext(const StepExecutor::Options& options);

  const Layout& layout;
  Device& device;
  TensorStore& store;
  const std::unique_ptr<Stream> compute, optimizer;
  const std::unique_ptr<Stream> comm;           // null if there is one rank
  const std::unique_ptr<Stream> send, receive;  // null if there is one stage
  // The communicators of the axes (CommAxis); null where this rank is alone. numbers: kScalars; copies:
  // kReplicated.
  std::unique_ptr<Communicator> numbers, copies, stages;
  ShardingGroups of_all;      // SharedWeights::kAll
  ShardingGroups of_experts;  // SharedWeights::kExperts, where ranks divide the experts
  Position position;
  OpTimer timer;
  StallMeter stall;
  std::vector<Lease> leases;  // of the operation that is being issued

  RankPlace place() const { return layout.options.place(); }
  Workspace workspace() const { return {layout, memory_.get()}; }
  // Makes the communicator of an axis; all members of the group must call this. Null where this rank is
  // alone.
  std::unique_ptr<Communicator> make_group(CommRank* comm, CommAxis axis,
                                           SharedWeights weights = SharedWeights::kAll) const;
  // The groups of the unit's weights.
  const ShardingGroups& groups_of(std::int32_t unit) const {
    const bool experts = layout.model->units()[static_cast<std::size_t>(unit)].is_experts();
    return experts && place().parts.experts > 1 ? of_experts : of_all;
  }
  // The stream on which an operation runs.
  Stream& stream_of(const StepOp& op) const;
  Lease& lease(const StepOp& op, Operand operand) {
    ZG_ASSERT(op.has(operand), "{} has no operand {}", name_of(op.kind), static_cast<int>(operand));
    return leases[static_cast<std::size_t>(op.access[static_cast<std::size_t>(operand)])];
  }
  void* data(const StepOp& op, Operand operand) { return lease(op, operand).data(); }
  // Null if the operation does not have the operand.
  void* data_if_any(const StepOp& op, Operand operand) {
    return op.has(operand) ? data(op, operand) : nullptr;
  }

 private:
  std::unique_ptr<void, std::function<void(void*)>> memory_;  // the workspace, in the device's arena
};

}  // namespace zg
