// Matrix products of the emulated device: those of the host, in the order of the stream.
#pragma once
#include <functional>

#include "device/cuda/device.hpp"

namespace zg::test {

std::unique_ptr<cuda::Blas> make_host_blas(cuda::Runtime& runtime, int device,
                                           const cuda::BlasOptions& options);

// The same, of a library that asks `refuses` at each plan whether it has no algorithm for the product.
cuda::MakeBlas host_blas_without(std::function<bool(const cuda::Product&)> refuses);

}  // namespace zg::test
