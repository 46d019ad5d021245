// Plain values that a configuration sets and a device takes, without the device's own headers.
#pragma once

namespace zg {

// kAuto: cuDNN's attention where the library is installed and supports the shape, else our own. With
// deterministic results kAuto is our own.
enum class AttentionKernel { kAuto, kOwn, kCudnn };

}  // namespace zg
