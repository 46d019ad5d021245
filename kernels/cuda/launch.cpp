#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {

[[noreturn]] void refused(const char* kernel, int status) {
  const auto error = static_cast<cudaError_t>(status);
  throw Error(Errc::kDevice, fmt::format("kernel {}", kernel),
              fmt::format("CUDA refused it: {} ({})", cudaGetErrorString(error), cudaGetErrorName(error)));
}

}  // namespace zg::cuda
