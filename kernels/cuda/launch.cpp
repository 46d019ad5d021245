#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {

[[noreturn]] void refused(const char* kernel, int status) {
  const auto error = static_cast<cudaError_t>(status);
  throw Error(Errc::kDevice, fmt::format("kernel {}", kernel),
              fmt::format("CUDA refused it: {} ({})", cudaGetErrorString(error), cudaGetErrorName(error)));
}

std::size_t most_shared_bytes() {
  int device = 0, bytes = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) refused("(how much shared memory it can have)", static_cast<int>(status));
  return static_cast<std::size_t>(bytes);
}

}  // namespace zg::cuda
