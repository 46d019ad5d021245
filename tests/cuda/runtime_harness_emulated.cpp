#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/runtime_harness.hpp"

namespace zg::test {

std::unique_ptr<cuda::Runtime> make_test_runtime() {
  return std::make_unique<FakeRuntime>(FakeOptions{.memory = std::int64_t{256} << 20, .most_delay_us = 100});
}
void forget_refusals(cuda::Runtime& runtime) {
  (void)dynamic_cast<FakeRuntime&>(runtime).take_mistakes();
}

}  // namespace zg::test
