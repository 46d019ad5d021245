// Plain values that say how a device is to be set up, for those who read them from a configuration.
#pragma once

namespace zg {

enum class AttentionKernel { kAuto, kOwn, kCudnn };  // auto: cuDNN's where it is there and takes the shape

}  // namespace zg
