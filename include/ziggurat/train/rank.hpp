// One device of a run with what belongs to it alone: its tensors, its store over the node's memory and
// drives, and the engine that runs the plan's programs over them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/base/watchdog.hpp"
#include "ziggurat/engine/engine.hpp"
#include "ziggurat/train/node.hpp"

namespace zg {

class Rank {
 public:
  // All outlive it; the node's volume is open. `gpu` null: the host device, which is made here. Of the node's
  // host memory it uses what the plan says.
  Rank(const RunPlan& plan, Node& node, Device* gpu, Trace* trace, Watchdog* watchdog);
  Rank(const Rank&) = delete;

  Device& device() { return device_; }
  TensorStore& store() { return *store_; }
  Engine& engine() { return *engine_; }

  // Fills the weights, from the model directory that the plan's configuration names or at random. Once,
  // first.
  void initialize();
  // Per step, the engine's own bytes included.
  Traffic planned_traffic() const;
  // What the plan says that the programs run so far move, the engine's own bytes not included.
  Traffic forecast() const;
  // A Hugging Face directory with the fp32 master weights. Throws Error(kIo).
  void save_model(const std::string& directory);

 private:
  const RunPlan& plan_;
  std::unique_ptr<Device> host_device_;  // null: a GPU computes
  Device& device_;
  std::unique_ptr<TensorStore> store_;
  std::unique_ptr<Engine> engine_;
  std::vector<Watchdog::Registration> watched_;  // last: nothing is watched that is gone
};

}  // namespace zg
