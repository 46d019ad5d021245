// The CUDA device, over the interfaces to NVIDIA's libraries (runtime.hpp, blas.hpp).
#pragma once
#include <functional>
#include <memory>

#include "device/cuda/blas.hpp"
#include "device/cuda/gds.hpp"
#include "device/cuda/runtime.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg::cuda {

using MakeBlas =
    std::function<std::unique_ptr<Blas>(Runtime& runtime, int device, const BlasOptions& options)>;

// Throws like make_cuda_device(). Devices may share a runtime. cufile: the file name of GPUDirect Storage's
// library.
std::unique_ptr<Device> make_device(const CudaOptions& options, std::shared_ptr<Runtime> runtime,
                                    const MakeBlas& make_blas, const std::string& cufile = Gds::kLibrary);

}  // namespace zg::cuda
