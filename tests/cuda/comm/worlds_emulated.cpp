// Ranks whose GPUs and whose NCCL are fakes.
#include "tests/cuda/comm/worlds_emulated.hpp"
#include "comm/nccl_ranks.hpp"
#include "comm/worlds.hpp"
#include "device/cuda/device.hpp"
#include "tests/cuda/comm/fake_nccl.hpp"
#include "tests/cuda/host_blas.hpp"

namespace zg::test {

EmulatedWorld make_emulated_world(int size, const EmulatedWorldOptions& options) {
  EmulatedWorld made;
  FakeOptions fake;
  fake.devices = size;
  fake.memory = std::int64_t{128} << 20;
  fake.granule = 4096;
  fake.most_delay_us = 20;
  made.runtime = std::make_shared<FakeRuntime>(fake);
  made.nccl = std::make_shared<FakeNccl>(made.runtime);
  std::vector<Device*> devices;
  for (int i = 0; i < size; ++i) {
    made.world.devices.push_back(
        cuda::make_device({.device = i, .budget = options.budget}, made.runtime, make_host_blas));
    devices.push_back(made.world.devices.back().get());
  }
  made.world.ranks =
      comm::make_nccl_ranks(devices, made.nccl, {options.timeout_seconds, options.staging_bytes});
  return made;
}

World make_world(int size, const CommOptions& options) {
  return std::move(make_emulated_world(size, {.timeout_seconds = options.timeout_seconds}).world);
}

std::vector<int> world_sizes() {
  return {1, 2, 3, 8};
}

std::int64_t large_count() {
  return 10007;
}

}  // namespace zg::test
