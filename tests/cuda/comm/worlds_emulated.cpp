// Ranks whose GPUs and whose NCCL are fakes.
#include "tests/cuda/comm/worlds_emulated.hpp"
#include "comm/nccl_ranks.hpp"
#include "comm/wires.hpp"
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
  const std::vector<int> ranks_of = options.processes.empty() ? std::vector{size} : options.processes;
  const auto post = std::make_shared<Post>();
  std::size_t first = 0;
  for (std::size_t p = 0; p < ranks_of.size(); ++p) {
    std::unique_ptr<comm::Wire> wire;
    if (ranks_of.size() > 1) wire = std::make_unique<MemoryWire>(post, static_cast<int>(p));
    const auto count = static_cast<std::size_t>(ranks_of[p]);
    for (auto& rank :
         comm::make_nccl_ranks(std::span(devices).subspan(first, count), made.nccl,
                               {options.timeout_seconds, options.staging_bytes}, ranks_of, std::move(wire)))
      made.world.ranks.push_back(std::move(rank));
    first += count;
  }
  return made;
}

World make_world(int size, const CommOptions& options) {
  EmulatedWorldOptions o{.timeout_seconds = options.timeout_seconds};
  if (size == 4) o.processes = {2, 2};
  if (size == 5) o.processes = {3, 1, 1};
  return std::move(make_emulated_world(size, o).world);
}

// Four and five are of several processes.
std::vector<int> world_sizes() {
  return {1, 2, 3, 4, 5, 8};
}

std::int64_t large_count() {
  return 10007;
}

}  // namespace zg::test
