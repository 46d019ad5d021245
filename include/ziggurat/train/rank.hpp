// One device of a run, with its tensors, its store over the node's memory and drives, and the engine that
// runs the plan's programs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/train/node.hpp"

namespace zg {

class Rank {
 public:
  // All arguments outlive the rank, and the node's volume is open. The rank uses as much of the node's host
  // memory as its plan's budget says. `gpu`: null if the rank is to make a host device. `comm`: null if it is
  // the only rank. `adopted`: state that lies in the drives' files; null: none.
  Rank(const RunPlan& plan, Node& node, Device* gpu, CommRank* comm, Trace* trace, Watchdog* watchdog,
       const AdoptedVersions* adopted = nullptr);
  Rank(const Rank&) = delete;

  Device& device() { return device_; }
  TensorStore& store() { return *store_; }
  StepExecutor& engine() { return *engine_; }

  // Exactly one of the next three functions must be called, once, before the first step.
  // Fills the weights from the model directory that the configuration names, or at random.
  void initialize();
  // Fills all state from a checkpoint, and a base in codes, which no checkpoint has, from its directory.
  void restore(const TileVisitor& fill);
  // Takes over the adopted state; a base in codes comes from its directory.
  void adopt();
  // The traffic forecast for the programs that have run so far, without the engine's own copies.
  LinkBytes forecast() const;

 private:
  const RunPlan& plan_;
  std::unique_ptr<Device> host_device_;  // null: a GPU computes
  Device& device_;
  std::unique_ptr<TensorStore> store_;
  std::unique_ptr<StepExecutor> engine_;
  std::vector<Watchdog::Registration> watched_;  // last: destroyed before the objects that it watches
};

}  // namespace zg
