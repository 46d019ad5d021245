// The runtime under test: the fake (zg_test_cuda), or CUDA's own on the first GPU (zg_test_gpu).
#pragma once
#include <memory>

#include "device/cuda/runtime.hpp"

namespace zg::test {

std::unique_ptr<cuda::Runtime> make_test_runtime();
// Forgets the refusals so far: the test provoked them.
void forget_refusals(cuda::Runtime& runtime);

}  // namespace zg::test
