// The runtime under test: the fake (zg_test_cuda), or CUDA's own on the first GPU (zg_test_gpu).
#pragma once
#include <memory>

#include "device/cuda/runtime.hpp"

namespace zg::test {

std::unique_ptr<cuda::Runtime> make_test_runtime();
// What it refused so far was asked for on purpose.
void forget_refusals(cuda::Runtime& runtime);

}  // namespace zg::test
