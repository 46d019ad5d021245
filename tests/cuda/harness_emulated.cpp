#include "kernels/cuda/emulation/emulation.hpp"
#include "tests/cuda/harness.hpp"

namespace zg::test {

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
