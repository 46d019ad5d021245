// A store with all that it stands on, and contents that can be recognised.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "store/device_work.hpp"
#include "support/deadline.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/granule_device.hpp"
#include "support/memory_io.hpp"
#include "tests/support/test_device.hpp"
#include "ziggurat/store/store.hpp"

namespace zg::test {

// Writes what a segment holds after its version-th write. `bytes` need not be a multiple of 8.
inline void fill(void* data, std::int64_t bytes, SegmentId id, std::uint64_t version) {
  std::uint64_t word =
      (static_cast<std::uint64_t>(id) + 1) * 0x9E3779B97F4A7C15ull + version * 0xD1B54A32D192ED03ull;
  auto* at = static_cast<char*>(data);
  for (std::int64_t i = 0; i < bytes; i += 8, ++word) {
    std::memcpy(at + i, &word, static_cast<std::size_t>(std::min<std::int64_t>(8, bytes - i)));
  }
}
inline bool holds(const void* data, std::int64_t bytes, SegmentId id, std::uint64_t version) {
  std::uint64_t word =
      (static_cast<std::uint64_t>(id) + 1) * 0x9E3779B97F4A7C15ull + version * 0xD1B54A32D192ED03ull;
  const auto* at = static_cast<const char*>(data);
  for (std::int64_t i = 0; i < bytes; i += 8, ++word) {
    if (std::memcmp(at + i, &word, static_cast<std::size_t>(std::min<std::int64_t>(8, bytes - i))) != 0)
      return false;
  }
  return true;
}

// What serves as the drives of the NVMe tier.
enum class Nvme { kMemory, kUring, kThreads, kRam };

// Drives for the table, in folders of `directory` that are made. Null where the table has none.
inline std::unique_ptr<io::Engine> make_nvme(Nvme kind, const TensorTable& table,
                                             const std::string& directory,
                                             const io::FaultModel& faults = {}) {
  if (table.drives() == 0) return nullptr;
  const std::int64_t bytes = std::max<std::int64_t>(table.drive_bytes(), 4096);
  if (kind == Nvme::kMemory) return std::make_unique<MemoryIo>(table.drives(), bytes, MemoryIo::Options{});
  io::EngineOptions options;
  options.backend = kind == Nvme::kUring     ? io::Backend::kUring
                    : kind == Nvme::kThreads ? io::Backend::kThreads
                                             : io::Backend::kRam;
  options.require = true;
  options.block_size = 4096;  // several blocks a segment
  options.queue_depth = 4;
  options.faults = faults;
  std::vector<io::DriveOptions> drives;
  for (int d = 0; d < table.drives(); ++d) {
    const std::string path = directory + "/" + std::to_string(d);
    std::filesystem::create_directories(path);
    drives.push_back({path, bytes});
  }
  return io::make_engine(options, drives);
}

// The same tensors on a device of another granule.
inline TensorTable in_granules(const TensorTable& table, std::int64_t granule) {
  TensorTable other(table.drives(), granule);
  for (TensorId id = 0; id < table.tensor_count(); ++id) other.add(table.tensor(id).spec);
  return other;
}

// On the device that the program tests, or one in larger granules around it, where the table wants that. A
// table in smaller ones is made anew for the device, and the device's budget becomes larger by what the table
// does: room for so many of segments that are all alike stays room for so many.
//
// The order of the members matters: the store is destroyed first.
struct Rig {
  std::unique_ptr<TempDir> directory;  // of the drives that the rig made; else null
  TensorTable table;
  Budgets budgets;
  std::unique_ptr<Device> device;
  std::unique_ptr<Arena> host;
  std::unique_ptr<io::Engine> io;
  std::unique_ptr<TensorStore> store;

  Rig(TensorTable t, const Budgets& b, std::unique_ptr<io::Engine> engine, int depth = 64)
      : table(std::move(t)), budgets(b), io(std::move(engine)) {
    if (const std::int64_t granule = test_granule(); table.device_granule() < granule) {
      const std::int64_t before = table.total_charge(Tier::kDevice);
      table = in_granules(table, granule);
      const std::int64_t after = table.total_charge(Tier::kDevice);
      budgets.device = std::llround(static_cast<double>(budgets.device) * static_cast<double>(after) /
                                    static_cast<double>(before));
    }
    device = in_granules(make_test_device(budgets.device), table.device_granule());
    make_store(depth, Shared());
  }

  Rig(const TensorTable& t, const Budgets& b, Nvme drives, int depth = 64, const io::FaultModel& faults = {})
      : Rig(t, b, std::make_unique<TempDir>(), drives, depth, faults) {}

  // On a device of its own, of the table's granule, which the engine may reach.
  using MakeEngine = std::function<std::unique_ptr<io::Engine>(Device&)>;
  Rig(TensorTable t, const Budgets& b, std::unique_ptr<Device> d, const MakeEngine& make_engine,
      int depth = 64)
      : table(std::move(t)), budgets(b), device(std::move(d)), io(make_engine(*device)) {
    make_store(depth, Shared());
  }

  // What several stores share.
  struct Shared {
    Arena* host = nullptr;
    io::Engine* io = nullptr;
    io::Volume* volume = nullptr;
  };
  // Beside others; of the host's arena it may take its budget.
  Rig(TensorTable t, const Budgets& b, std::unique_ptr<Device> d, const Shared& shared, int depth = 64)
      : table(std::move(t)), budgets(b), device(std::move(d)) {
    make_store(depth, shared);
  }

  Rig(const TensorTable& t, const Budgets& b, std::unique_ptr<TempDir> dir, Nvme drives, int depth,
      const io::FaultModel& faults)
      : Rig(t, b, make_nvme(drives, t, dir->path(), faults), depth) {
    directory = std::move(dir);
  }
  void make_store(int depth, const Shared& shared) {
    if (shared.host == nullptr) host = make_host_arena("host memory", budgets.host);
    TensorStore::Options options;
    options.table = &table;
    options.device = device.get();
    options.host = shared.host != nullptr ? shared.host : host.get();
    options.io = shared.host != nullptr ? shared.io : io.get();
    options.volume = shared.volume;
    if (shared.host != nullptr) options.host_quota = budgets.host;
    options.budgets = budgets;
    options.prefetch_depth = depth;
    options.warn_after_seconds = 30;
    options.write_ahead = false;  // traffic is compared with a dry run's
    store = std::make_unique<TensorStore>(options);
  }

  // Writes the version under the lease; says whether it is there.
  void write(const Lease& lease, Tier tier, SegmentId id, std::uint64_t version) {
    work_on(*device, {tier, Access::kOverwrite, lease},
            [&](void* data) { fill(data, lease.bytes(), id, version); });
  }
  bool has(const Lease& lease, Tier tier, SegmentId id, std::uint64_t version) {
    bool is_there = false;
    work_on(*device, {tier, Access::kRead, lease},
            [&](const void* data) { is_there = holds(data, lease.bytes(), id, version); });
    return is_there;
  }

  void within_budgets() const {
    EXPECT_LE(device->arena().peak(), budgets.device);
    if (host != nullptr) {
      EXPECT_LE(host->peak(), budgets.host);
    }
  }
  // The tier at which tests write and read a segment where no program says which.
  Tier home(SegmentId id) const {
    return table.segment(id).lowest == Tier::kDevice ? Tier::kDevice : Tier::kHost;
  }
};

}  // namespace zg::test
