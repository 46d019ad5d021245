// Stores that share a host arena and the drives, as the ranks of a node do: each moves exactly the bytes that
// its own dry run foretells, and keeps to its share of the memory, whatever the other does.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "store/program_mode.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

struct Store {
  Scenario scenario;
  Budgets budgets;
  LinkBytes expected;
};

Store random_store(Random& random, int drives) {
  Store s{random_scenario(random, drives, 6 + below(random, 12), {.ops = 25}), {}, {}};
  const Budgets least = smallest_budgets(s.scenario);
  s.budgets = {least.device + s.scenario.table.device_granule() * below(random, 8),
               least.host + 4096 * below(random, 8)};
  s.expected = *dry_run(s.scenario, s.budgets);
  return s;
}

// All at once, each on a thread of its own.
void run_together(const std::vector<Store>& stores, Nvme nvme, Random& random) {
  TensorTable all(stores.front().scenario.table.drives());  // a drive has room for what all of them keep
  std::int64_t host_bytes = 0;
  for (const Store& s : stores) {
    host_bytes += s.budgets.host;
    for (TensorId id = 0; id < s.scenario.table.tensor_count(); ++id) {
      TensorSpec spec = s.scenario.table.tensor(id).spec;
      spec.name += fmt::format(" of {}", &s - stores.data());
      all.add(spec);
    }
  }
  const TempDir dir;
  const auto io = make_nvme(nvme, all, dir.path());
  const auto host = make_host_arena("host memory", host_bytes);
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Device*> pinned;
  for (const Store& s : stores) {
    devices.push_back(in_granules(make_test_device(s.budgets.device), s.scenario.table.device_granule()));
    pinned.push_back(devices.back().get());
  }
  host->set_hooks(host_memory_hooks(pinned, io.get()));
  {
    const auto volume = io::make_volume(*io, store_volume({}, true));
    std::vector<std::unique_ptr<Rig>> rigs;
    for (std::size_t i = 0; i < stores.size(); ++i) {
      rigs.push_back(std::make_unique<Rig>(stores[i].scenario.table, stores[i].budgets, std::move(devices[i]),
                                           Rig::Shared{host.get(), io.get(), volume.get()}, 8));
    }
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < stores.size(); ++i) {
      threads.emplace_back([&, i, seed = random()] { ModelRun(*rigs[i], stores[i].scenario, seed)(); });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < stores.size(); ++i) {
      EXPECT_EQ(rigs[i]->store->traffic(), stores[i].expected) << "store " << i;
      rigs[i]->store->check();
    }
    EXPECT_LE(host->peak(), host_bytes);
    rigs.pop_back();  // its extents go, and those of the others stay
    rigs.front()->store->check();
    rigs.clear();
    for (int d = 0; d < io->drive_count(); ++d) EXPECT_EQ(volume->space(d).used, 0) << "drive " << d;
    EXPECT_EQ(host->in_use(), 0);
    host->set_hooks({});
  }
}

TEST(StoreShared, EachMovesWhatItsOwnDryRunForetells) {
  const std::uint64_t seed = test_seed(1717);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int trial = 0; trial < 12; ++trial) {
    SCOPED_TRACE(trial);
    const int drives = 1 + below(random, 2);
    std::vector<Store> stores;
    for (int i = 0; i < 2 + below(random, 2); ++i) stores.push_back(random_store(random, drives));
    run_together(stores, Nvme::kMemory, random);
    if (HasFailure()) return;
  }
}

TEST(StoreShared, OverRealDrivesToo) {
  Random random(test_seed(1718));
  for (const Nvme nvme : {Nvme::kThreads, Nvme::kUring}) {
    const std::vector<Store> stores{random_store(random, 2), random_store(random, 2)};
    run_together(stores, nvme, random);
  }
}

}  // namespace
}  // namespace zg::test
