// Matrix products of the emulated device: those of the host, in the order of the stream.
#pragma once
#include "device/cuda/blas.hpp"

namespace zg::test {

// As cuBLASLt does, it works gelu into products of bf16 and fp16, and leaves it to others elsewhere.
std::unique_ptr<cuda::Blas> make_host_blas(cuda::Runtime& runtime, int device, const cuda::BlasOptions& options);

}  // namespace zg::test
