#include "tests/cuda/runtime_harness.hpp"

namespace zg::test {

std::unique_ptr<cuda::Runtime> make_test_runtime() {
  return cuda::make_cuda_runtime();
}
void forget_refusals(cuda::Runtime&) {}

}  // namespace zg::test
