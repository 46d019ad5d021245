// Options of a step as plain values, which the configuration's readers need without the engine.
#pragma once

namespace zg {

// The lowest tier that tensors may be demoted to. kAuto: any tier that has room.
enum class OffloadTarget { kAuto, kDevice, kHost, kNvme };

// The order in which the micro-batches of a step pass through the layers.
//   layer-major        all micro-batches through one layer, then through the next one: weights cross each
//   link
//                      twice a step
//   micro-batch-major  one micro-batch through all layers, then the next one: less activation memory, more
//                      weight traffic
enum class Accumulation { kLayerMajor, kMicroBatchMajor };

}  // namespace zg
