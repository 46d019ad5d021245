// The kernels on a GPU. Without one the program ends with 77, which CTest counts as skipped, or with 1 where
// ZG_REQUIRE_GPU=1 says that there must be one.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device/cuda/runtime.hpp"
#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(Errc::kDevice, what, cudaGetErrorString(status));
}

}  // namespace

void* device_allocate(std::int64_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, static_cast<std::size_t>(bytes > 0 ? bytes : 1)), "cudaMalloc");
  return data;
}
void device_release(void* data) {
  cudaFree(data);
}
void device_write(void* device, const void* host, std::int64_t bytes) {
  check(cudaMemcpy(device, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
        "copy to the device");
}
void device_read(void* host, const void* device, std::int64_t bytes) {
  check(cudaDeviceSynchronize(), "kernels");
  check(cudaMemcpy(host, device, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
        "copy to the host");
}
cuda::Launch launch(bool deterministic) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "multiprocessors");
  return {.stream = nullptr, .multiprocessors = processors, .deterministic = deterministic};
}
void for_each_order(const std::function<void()>& body) {
  body();
}
void with_shared_memory(std::size_t, const std::function<void()>&) {}
bool is_gpu() {
  return true;
}

}  // namespace zg::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  zg::cuda::set_cuda_environment();  // CUDA reads it now
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (!testing::GTEST_FLAG(list_tests) && (status != cudaSuccess || count == 0)) {
    const char* required = std::getenv("ZG_REQUIRE_GPU");
    const bool must = required != nullptr && std::strcmp(required, "0") != 0;
    std::printf("%s: there is no GPU (%s)\n", must ? "failed, since ZG_REQUIRE_GPU is set" : "skipped",
                status != cudaSuccess ? cudaGetErrorString(status) : "none is visible");
    return must ? 1 : 77;
  }
  return RUN_ALL_TESTS();
}
