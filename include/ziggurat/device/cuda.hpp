// CUDA devices. Every build has these functions; one without CUDA says so.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/device/device.hpp"
#include "ziggurat/device/options.hpp"

namespace zg {

struct CudaOptions {
  int device = 0;           // as CUDA counts them (CUDA_VISIBLE_DEVICES)
  std::int64_t budget = 0;  // of HBM, for tensors and workspaces of the engine; libraries take some besides
  // The same bits in every run: no sums by atomics, and of libraries only what promises so.
  bool deterministic = true;
  bool tf32 = false;  // products of f32 with 10 bits of mantissa, on tensor cores
  AttentionKernel attention = AttentionKernel::kAuto;
  bool pin = true;  // host memory that is copied from and to
  bool graphs = false;  // what Device::repeat() is given is kept as CUDA graphs
  Trace* trace = nullptr;
};

// Throws Error(kDevice): no CUDA in this build, no driver, one that is too old, no such GPU, or one that is
// too old; Error(kMemory): the budget is more than the GPU has free, and who has the rest.
std::unique_ptr<Device> make_cuda_device(const CudaOptions& options);

struct Gpu {
  int device = 0;
  std::string name, pci;
  int major = 0, minor = 0, multiprocessors = 0;
  int numa_node = -1;
  std::int64_t memory = 0, free = 0;
};
// Never throws; `why` says why there are none.
std::vector<Gpu> list_gpus(std::string* why);

}  // namespace zg
