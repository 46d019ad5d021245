// The state that operations of all kinds share: the layout and the device of the run, its streams and
// communicators, and the leases of the operation that is being issued.
//
// The rank's thread alone uses it, but for `position`, `timer` and `stall`, which say which threads may.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "engine/position.hpp"
#include "engine/stall_meter.hpp"
#include "engine/timer.hpp"
#include "ziggurat/step/workspace.hpp"

namespace zg {

class OpContext {
 public:
  explicit OpContext(const StepExecutor::Options& options);

  const Layout& layout;
  Device& device;
  TensorStore& store;
  const std::unique_ptr<Stream> compute, optimizer;
  const std::unique_ptr<Stream> comm;           // null: there is one rank
  const std::unique_ptr<Stream> send, receive;  // null: there is one stage
  // The communicators of axes (CommAxis); null where this rank is alone.
  std::unique_ptr<Communicator> numbers, shards, replicas, pieces, copies, stages;
  Position position;
  OpTimer timer;
  StallMeter stall;
  std::vector<Lease> leases;  // of the operation that is being issued

  RankPlace place() const { return layout.options.place(); }
  Workspace workspace() const { return {layout, memory_.get()}; }
  // The communicator of an axis, which its members make together; null where this rank is alone.
  std::unique_ptr<Communicator> make_group(CommRank* comm, CommAxis axis) const;
  // The stream on which an operation runs.
  Stream& stream_of(const StepOp& op) const;
  Lease& lease(const StepOp& op, Operand operand) {
    ZG_ASSERT(op.has(operand), "{} has no operand {}", name_of(op.kind), static_cast<int>(operand));
    return leases[static_cast<std::size_t>(op.access[static_cast<std::size_t>(operand)])];
  }
  void* data(const StepOp& op, Operand operand) { return lease(op, operand).data(); }
  // Null where the operation does not have the operand.
  void* data_if_any(const StepOp& op, Operand operand) {
    return op.has(operand) ? data(op, operand) : nullptr;
  }

 private:
  std::unique_ptr<void, std::function<void(void*)>> memory_;  // of the workspace, in the device's arena
};

}  // namespace zg
