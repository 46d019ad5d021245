#include "device/cuda/device.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"
#include "tests/support/test_device.hpp"

namespace zg::test {

// Granules of a page, so that suites with small budgets mean the same here as on the host.
std::unique_ptr<Device> make_test_device(std::int64_t budget, Trace*, bool graphs) {
  FakeOptions options;
  options.granule = 4096;
  options.memory = budget + (std::int64_t{64} << 20);
  options.most_delay_us = 20;
  return cuda::make_device({.budget = budget, .graphs = graphs}, std::make_unique<FakeRuntime>(options),
                           make_host_blas);
}

TestDevice test_device() {
  return TestDevice::kEmulated;
}

}  // namespace zg::test
