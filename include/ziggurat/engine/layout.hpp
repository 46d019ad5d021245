// The tensors of a training run: which there are, how they are cut, how far each may sink.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "ziggurat/engine/options.hpp"
#include "ziggurat/model/model.hpp"
#include "ziggurat/optim/state.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

inline constexpr int kFrozen = -1;  // group of a parameter that keeps its value and has no state

inline constexpr std::int32_t kAllUnits = std::numeric_limits<std::int32_t>::max();

struct LayoutOptions {
  BatchShape micro_batch;
  std::int64_t micro_batches = 1;  // per step
  Accumulation accumulation = Accumulation::kLayerMajor;
  bool recompute = true;          // keep only each block's input, run its forward again in backward
  DType gradient = DType::kBF16;  // of gradients on their way to the optimizer
  Placement weights = Placement::kAuto, optimizer = Placement::kAuto, activations = Placement::kAuto;
  StateFormat state = {};  // `full` is the model's accumulator type, whatever is given
  // By unit and parameter: its group (an index into UpdateRule::groups), or kFrozen. Empty: all in group 0.
  std::vector<std::vector<int>> groups = {};
  // Updates run where the state lives: of units [0, device_updates) on the device, of the others on the host
  // over host copies. The first units are those that the next forward waits for.
  std::int32_t device_updates = 0;
  std::int64_t state_segment_bytes = 12 << 20;  // the unit of the streaming update
  int state_versions = 1;  // copies of state on NVMe: with 2, a write leaves the version before intact
  int drives = 0;          // of the NVMe tier; 0: none
  std::int64_t device_granule = 4096;  // Arena::granule() of the device
};

struct Layout {
  Layout(const Model& model, const LayoutOptions& options);

  static constexpr TensorId kNone = -1;
  // Consecutive elements of a parameter that is trained, its gap included; begins at a multiple of
  // kQuantBlock in the unit and in the state.
  struct StateRange {
    std::int32_t param = 0;  // index in the unit
    int group = 0;
    std::int64_t unit_first = 0, state_first = 0, count = 0;
  };
  struct UnitTensors {
    TensorId weight = 0, accumulator = 0;
    TensorId gradient = kNone, state = kNone;  // of units in which something is trained
    std::vector<StateRange> ranges;            // in the order of both
    std::int64_t state_elements = 0;
  };

  const Model* model;
  LayoutOptions options;
  TensorTable table;
  std::vector<UnitTensors> units;
  // [layer][micro-batch]: input of block `layer` (the last one: of the head), and what its backward needs.
  std::vector<std::vector<TensorId>> activation, saved;
  std::vector<TensorId> activation_gradient;  // [micro-batch]

  std::int64_t layers() const { return model->config().layers; }
  std::int32_t head_unit() const { return static_cast<std::int32_t>(units.size()) - 1; }
  // Micro-batches whose activations live at the same time.
  std::int64_t live_micro_batches() const;
  SegmentId whole(TensorId id) const;  // the one segment of an uncut tensor
  const UnitTensors& unit(std::int32_t u) const { return units[static_cast<std::size_t>(u)]; }
  const StateLayout& state() const { return state_; }
  std::int32_t state_segments(std::int32_t unit) const;
  // Which elements of the unit's state segment `i` of it holds.
  struct Elements {
    std::int64_t first = 0, count = 0;
  };
  Elements state_elements(std::int32_t unit, std::int32_t i) const;
  SegmentId state_segment(std::int32_t unit, std::int32_t i) const;
  Tier update_at(std::int32_t unit) const {
    return unit < options.device_updates ? Tier::kDevice : Tier::kHost;
  }
  // Whether an update makes all of the unit's weight from its masters, so that its bytes need not be kept
  // until then.
  bool update_rebuilds_weight(std::int32_t unit) const;

  // Device memory besides tensors: scratch of the largest operation, tokens, sums.
  std::int64_t workspace_bytes() const;
  // What it takes of the device's budget.
  std::int64_t workspace_charge() const;
  // Bytes of weights, gradients and optimizer state.
  std::int64_t state_bytes() const;

 private:
  void add_state(std::int32_t unit, Tier lowest);

  StateLayout state_;
  std::int64_t segment_elements_;  // of state
};

}  // namespace zg
