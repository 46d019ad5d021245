// The store over a CUDA device that drives reach: random programs against the model and the dry run, with
// segments that go past the host.
#include <dlfcn.h>

#include "device/cuda/device.hpp"
#include "store/program_mode.hpp"
#include "support/places.hpp"
#include "support/seed.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"
#include "tests/cuda/programs/fake_cufile.hpp"

namespace zg::test {
namespace {

const std::string kFakeCufile = test::built_for_tests("libzg_fake_cufile.so");

std::unique_ptr<Device> direct_device(std::int64_t budget, std::int64_t granule) {
  FakeOptions options;
  options.granule = granule;
  options.memory = budget + (std::int64_t{64} << 20);
  options.most_delay_us = 20;
  return cuda::make_device({.budget = budget}, std::make_unique<FakeRuntime>(options), make_host_blas,
                           kFakeCufile);
}

// Nothing: no O_DIRECT in the directory.
std::unique_ptr<io::Engine> direct_engine(Device& device, const TensorTable& table, const TempDir& dir) {
  std::string why;
  io::EngineOptions options;
  options.backend = io::Backend::kThreads;
  options.block_size = 8192;
  options.direct = device.direct_storage(false, &why);
  ZG_ASSERT(options.direct != nullptr, "{}", why);
  std::vector<io::DriveOptions> drives;
  for (int d = 0; d < table.drives(); ++d) {
    const std::string path = dir.path() + "/" + std::to_string(d);
    std::filesystem::create_directories(path);
    if (!io::why_not_direct(*options.direct, path).empty()) return nullptr;
    drives.push_back({path, std::max<std::int64_t>(table.drive_bytes(), 4096)});
  }
  return io::make_engine(options, drives);
}

TEST(DirectStore, ProgramsMatchTheModelAndTheDryRun) {
  void* const library = dlopen(kFakeCufile.c_str(), RTLD_NOW);
  ZG_ASSERT(library != nullptr, "{}", dlerror());
  auto& cufile = *static_cast<FakeCuFile*>(dlsym(library, "zg_fake_cufile"));
  cufile = {};
  cufile.nvfs_major = 2;
  const std::uint64_t seed = test_seed(909);
  SCOPED_TRACE(seed);
  Random random(seed);
  LinkBytes sum;
  for (int trial = 0; trial < 6; ++trial) {
    SCOPED_TRACE(trial);
    Scenario s = random_scenario(random, 1 + below(random, 2), 8, {.ops = 12});
    s.table = in_granules(s.table, 16384);
    s.order = {0, 0, 1};
    cufile.granule = 16384;
    const Budgets least = smallest_budgets(s, true);
    const Budgets budgets{least.device + 16384 * below(random, 3), least.host + 4096 * below(random, 4),
                          true};
    const auto expected = dry_run(s, budgets);
    ASSERT_TRUE(expected.has_value());
    sum += *expected;
    const TempDir dir;
    bool possible = true;
    Rig rig(
        s.table, budgets, direct_device(budgets.device, 16384),
        [&](Device& device) {
          auto engine = direct_engine(device, s.table, dir);
          possible = engine != nullptr;
          return engine != nullptr ? std::move(engine) : make_nvme(Nvme::kMemory, s.table, "");
        },
        8);
    if (!possible) GTEST_SKIP() << "no O_DIRECT in " << dir.path();
    ModelRun(rig, s, random())();
    EXPECT_EQ(rig.store->traffic(), *expected);
    if (HasFailure()) return;
  }
  EXPECT_GT(sum[kDirectRead], 0);
  EXPECT_GT(sum[kDirectWrite], 0);
  EXPECT_GT(cufile.transfers, 0);
  EXPECT_EQ(cufile.files, 0);
}

}  // namespace
}  // namespace zg::test
