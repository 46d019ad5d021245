// Plain values that say how a step is to be run, for those who read them from a configuration.
#pragma once

namespace zg {

// Where something may live, the lowest tier it may sink to. kAuto: anywhere that has room.
enum class Placement { kAuto, kDevice, kHost, kNvme };

// In which order the micro-batches of a step pass through the layers.
//   layer-major        all through one layer, then the next: weights cross each link twice a step
//   micro-batch-major  one through all layers, then the next: less activation memory, more weight traffic
enum class Accumulation { kLayerMajor, kMicroBatchMajor };

}  // namespace zg
