#include "tests/support/test_device.hpp"

namespace zg::test {

std::unique_ptr<Device> make_test_device(std::int64_t budget, Trace* trace, bool) {
  return make_host_device(budget, trace);
}

TestDevice test_device() {
  return TestDevice::kHost;
}

}  // namespace zg::test
