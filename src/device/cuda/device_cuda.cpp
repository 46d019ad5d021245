// The functions of ziggurat/device/cuda.hpp, with NVIDIA's libraries.
#include "device/cuda/attention.hpp"
#include "device/cuda/device.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

std::unique_ptr<Device> make_cuda_device(const CudaOptions& options) {
  return cuda::make_device(options, cuda::make_cuda_runtime(), cuda::make_cublaslt);
}

std::string describe_attention(const CudaOptions& options) {
  return cuda::Attention(options.attention, options.deterministic).describe();
}

std::vector<GpuInfo> list_gpus(std::string* why) {
  std::vector<GpuInfo> gpus;
  try {
    const auto runtime = cuda::make_cuda_runtime();
    const int count = runtime->device_count();
    for (int i = 0; i < count; ++i) {
      const cuda::DeviceInfo info = runtime->device_info(i);
      runtime->use_device(i);
      gpus.push_back({.device = i,
                      .name = info.name,
                      .pci = info.pci,
                      .major = info.major,
                      .minor = info.minor,
                      .multiprocessors = info.multiprocessors,
                      .numa_node = info.numa_node,
                      .memory = info.memory,
                      .free = runtime->memory_info().free});
    }
    if (gpus.empty() && why != nullptr) *why = "CUDA finds none";
  } catch (const Error& e) {
    if (why != nullptr) *why = e.message();
  }
  return gpus;
}

}  // namespace zg
