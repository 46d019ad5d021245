// The tensors of a training run: which there are, how they are cut, how far each may sink.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/model/model.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

// Where something may live, the lowest tier it may sink to. kAuto: anywhere that has room.
enum class Placement { kAuto, kDevice, kHost, kNvme };

// In which order the micro-batches of a step pass through the layers.
//   layer-major        all through one layer, then the next: weights cross each link twice a step
//   micro-batch-major  one through all layers, then the next: less activation memory, more weight traffic
enum class Accumulation { kLayerMajor, kMicroBatchMajor };

struct LayoutOptions {
  BatchShape micro_batch;
  std::int64_t micro_batches = 1;  // per step
  Accumulation accumulation = Accumulation::kLayerMajor;
  bool recompute = true;          // keep only each block's input, run its forward again in backward
  DType gradient = DType::kBF16;  // of gradients on their way to the optimizer
  Placement weights = Placement::kAuto, optimizer = Placement::kAuto, activations = Placement::kAuto;
  Tier update_at = Tier::kHost;  // kHost: CPU Adam over host copies; kDevice: where all state fits the device
  std::int64_t state_segment_bytes =
      4 << 20;     // of one state tensor's segment: the unit of the streaming update
  int drives = 0;  // of the NVMe tier; 0: none
};

struct Layout {
  Layout(const Model& model, const LayoutOptions& options);

  struct UnitTensors {
    TensorId weight = 0, gradient = 0, accumulator = 0;
    TensorId master = 0, m = 0, v = 0;  // same segments in all three
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
  std::int32_t state_segments(std::int32_t unit) const {
    return table.tensor(units[static_cast<std::size_t>(unit)].master).segments;
  }

  // Device memory besides tensors: scratch of the largest operation, tokens, sums.
  std::int64_t workspace_bytes() const;
  // Bytes of weights, gradients and optimizer state.
  std::int64_t state_bytes() const;
};

}  // namespace zg
