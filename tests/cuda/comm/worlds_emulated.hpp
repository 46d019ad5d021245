// Worlds whose GPUs and whose NCCL are fakes that a test reaches.
#pragma once
#include "comm/worlds.hpp"
#include "tests/cuda/comm/fake_nccl.hpp"

namespace zg::test {

struct EmulatedWorldOptions {
  double timeout_seconds = 60;
  std::int64_t budget = std::int64_t{64} << 20;
  std::int64_t staging_bytes = std::int64_t{64} << 10;  // so little that reductions take several chunks
  std::vector<int> processes = {};                      // the GPUs of each; empty: there is one
};
struct EmulatedWorld {
  std::shared_ptr<FakeRuntime> runtime;
  std::shared_ptr<FakeNccl> nccl;
  World world;  // last, so that it goes first
};
EmulatedWorld make_emulated_world(int size, const EmulatedWorldOptions& options);

}  // namespace zg::test
