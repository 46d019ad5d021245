// Memory on the host, for its own kernels and for those that run on the emulation of CUDA.
#include <cstdlib>
#include <cstring>

#include "tests/kernels/on_device.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {

void* device_allocate(std::int64_t bytes) {
  void* data = nullptr;
  ZG_ASSERT_EQ(posix_memalign(&data, 256, static_cast<std::size_t>(std::max<std::int64_t>(1, bytes))), 0);
  return data;
}
void device_release(void* data) {
  std::free(data);
}
void device_write(void* device, const void* host, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(device, host, static_cast<std::size_t>(bytes));
}
void device_read(void* host, const void* device, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(host, device, static_cast<std::size_t>(bytes));
}

}  // namespace zg::test
