#include <cstdlib>
#include <cstring>

#include "kernels/cuda/emulation/emulation.hpp"
#include "tests/cuda/harness.hpp"

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
cuda::Launch launch(bool deterministic) {
  return {.stream = nullptr, .multiprocessors = 3, .deterministic = deterministic};
}
void for_each_order(const std::function<void()>& body) {
  for (const std::uint64_t order : {1, 2, 3}) {
    SCOPED_TRACE(testing::Message() << "order " << order);
    emulation::set_seed(order);
    body();
  }
}
void with_shared_memory(std::size_t bytes, const std::function<void()>& body) {
  emulation::set_most_shared(bytes);
  body();
  emulation::set_most_shared(emulation::kMostShared);
}
bool is_gpu() {
  return false;
}

}  // namespace zg::test
