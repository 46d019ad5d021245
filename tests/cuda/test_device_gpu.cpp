#include "tests/support/test_device.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg::test {

std::unique_ptr<Device> make_test_device(std::int64_t budget, Trace*, bool graphs) {
  return make_cuda_device({.budget = budget, .graphs = graphs});
}

TestDevice test_device() {
  return TestDevice::kGpu;
}

}  // namespace zg::test
