#include "ziggurat/train/machine.hpp"

#include "kernels/host/matrix.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg {

Machine this_machine() {
  return {.has_gpu = [] { return !list_gpus(nullptr).empty(); },
          .gpu_count = [] { return static_cast<int>(list_gpus(nullptr).size()); },
          .has_bf16 = [] { return host::has_native_bf16(); },
          .bf16_instructions = [] { return std::string(host::bf16_description()); }};
}

}  // namespace zg
