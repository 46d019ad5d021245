// Plain values that a configuration sets and a device takes, without the device's own headers.
#pragma once

namespace zg {

// kAuto: cuDNN's attention if the library is installed and supports the shape, else our own. With
// deterministic results kAuto chooses our own.
enum class AttentionKernel { kAuto, kOwn, kCudnn };

}  // namespace zg
