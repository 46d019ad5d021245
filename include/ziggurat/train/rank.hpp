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
  // All arguments outlive the rank, and the node's volume is open. `gpu` null: the rank makes a host device.
  // Of the node's host memory the rank uses the plan's budget.
  // `comm`: null where it is the only rank. `adopted`: state that lies in the drives' files; null: none.
  Rank(const RunPlan& plan, Node& node, Device* gpu, CommRank* comm, Trace* trace, Watchdog* watchdog,
       const AdoptedVersions* adopted = nullptr);
  Rank(const Rank&) = delete;

  Device& device() { return device_; }
  TensorStore& store() { return *store_; }
  StepExecutor& engine() { return *engine_; }

  // Fills the weights, from the model directory that the configuration names or at random. Once, before
  // anything else.
  void initialize();
  // The same with what a checkpoint holds.
  void restore(const TileVisitor& fill);
  // The same from the state that was adopted.
  void adopt();
  // The forecast for the programs that have run so far, without the engine's own bytes.
  LinkBytes forecast() const;

 private:
  void begin_adapter(const Param& p, std::int64_t begin, std::int64_t end, float* out) const;

  const RunPlan& plan_;
  std::unique_ptr<Device> host_device_;  // null: a GPU computes
  Device& device_;
  std::unique_ptr<TensorStore> store_;
  std::unique_ptr<StepExecutor> engine_;
  std::vector<Watchdog::Registration> watched_;  // last, so that nothing is watched that is gone
};

}  // namespace zg
