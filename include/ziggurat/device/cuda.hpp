// CUDA devices. Every build has these functions; in a build without CUDA they report that CUDA is missing.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/device/device.hpp"
#include "ziggurat/device/options.hpp"

namespace zg {

struct CudaOptions {
  int device = 0;  // index as CUDA counts devices (after CUDA_VISIBLE_DEVICES)
  // Bytes of device memory for tensors and the engine's workspaces. cuBLASLt, cuDNN and CUDA graphs take
  // additional memory of their own.
  std::int64_t budget = 0;
  // Every run gives the same bits: no sums by atomics, and only deterministic algorithms of NVIDIA's
  // libraries.
  bool deterministic = true;
  bool tf32 = false;  // fp32 products use TF32 tensor cores (10 bits of mantissa)
  AttentionKernel attention = AttentionKernel::kAuto;
  bool pin = true;      // register host memory that is copied from or to with CUDA (pinned)
  bool graphs = false;  // Device::repeat() records its work as CUDA graphs
};

// Throws Error(kDevice) if this build has no CUDA, there is no driver or no such GPU, or one of them is too
// old; Error(kMemory) if less device memory is free than the budget.
std::unique_ptr<Device> make_cuda_device(const CudaOptions& options);

// Which attention kernel the current GPU uses with these options (cuDNN's or ours), and the reason if "auto"
// does not choose cuDNN's. Throws Error(kDevice), like make_cuda_device(), if the kernel is not available.
std::string describe_attention(const CudaOptions& options);

struct GpuInfo {
  int device = 0;
  std::string name, pci;     // pci: "0000:1b:00.0"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int numa_node = -1;                 // -1: unknown
  std::int64_t memory = 0, free = 0;  // bytes
};
// Never throws. If the list is empty, `why` (unless null) gets the reason.
std::vector<GpuInfo> list_gpus(std::string* why);

}  // namespace zg
