// The suite of communication on the GPUs of this machine. With fewer than two the program ends with 77, which
// CTest counts as skipped, or with 1 where ZG_REQUIRE_GPU=1 says that there must be some.
#include "comm/worlds.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg::test {

World make_world(int size, const CommOptions& options) {
  World world;
  std::vector<Device*> devices;
  for (int i = 0; i < size; ++i) {
    world.devices.push_back(make_cuda_device({.device = i, .budget = std::int64_t{256} << 20}));
    devices.push_back(world.devices.back().get());
  }
  // Little staging memory, so that reductions take several chunks.
  world.ranks = make_gpu_ranks(devices, {options.timeout_seconds, std::int64_t{1} << 20});
  return world;
}

std::vector<int> world_sizes() {
  std::vector<int> sizes;
  const auto gpus = static_cast<int>(list_gpus(nullptr).size());
  for (const int n : {1, 2, 3, 4, 8}) {
    if (n <= gpus) sizes.push_back(n);
  }
  return sizes;
}

std::int64_t large_count() {
  return 1000003;
}

}  // namespace zg::test

int main(int argc, char** argv) {
  std::string why = "there are fewer than two";
  const auto gpus = zg::list_gpus(&why);
  if (gpus.size() < 2) {
    const char* const required = std::getenv("ZG_REQUIRE_GPU");
    const bool must = required != nullptr && std::string(required) == "1";
    std::fprintf(stderr, "%s: two GPUs are needed: %s\n", must ? "failed" : "skipped", why.c_str());
    return must ? 1 : 77;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
