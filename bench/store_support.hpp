// What the benchmarks of the store share: a store with all that it stands on, contents that can be
// recognised.
#pragma once
#include <memory>
#include <string>

#include "bench/measure.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/store/store.hpp"

namespace zg::bench {

struct BedOptions {
  int tensors = 1;
  std::int64_t bytes = 4096;                  // of each tensor: one segment
  Budgets arenas = {};                        // memory there is
  Budgets budgets = {};                       // of it, what copies may take; 0: all
  const io::EngineOptions* engine = nullptr;  // null: no NVMe tier
  io::DriveOptions drive = {};                // its bytes are set here
  bool verify = true;                         // checksums of NVMe copies
  std::int64_t read_ahead = 0;                // TensorStore::Options
  int prefetch_depth = 64;
};

// Members go in the reverse order: the store first.
struct Bed {
  TensorTable table;
  std::unique_ptr<Device> device;
  std::unique_ptr<Arena> host;
  std::unique_ptr<io::Engine> io;
  std::unique_ptr<TensorStore> store;

  explicit Bed(const BedOptions& o) : table(o.engine != nullptr ? 1 : 0) {
    for (int i = 0; i < o.tensors; ++i)
      table.add({.name = fmt::format("t{}", i), .dtype = DType::kF32, .count = o.bytes / 4});
    if (o.engine != nullptr) {
      io::DriveOptions drive = o.drive;
      if (drive.bytes == 0) drive.bytes = table.drive_bytes();
      io = io::make_engine(*o.engine, {drive});
    }
    device = make_host_device(o.arenas.device, nullptr);
    host = make_host_arena("host memory", o.arenas.host);
    TensorStore::Options options;
    options.table = &table;
    options.device = device.get();
    options.host = host.get();
    options.io = io.get();
    options.budgets = {.device = o.budgets.device > 0 ? o.budgets.device : o.arenas.device,
                       .host = o.budgets.host > 0 ? o.budgets.host : o.arenas.host};
    options.verify = o.verify;
    options.read_ahead = o.read_ahead;
    options.prefetch_depth = o.prefetch_depth;
    store = std::make_unique<TensorStore>(options);
  }

  // Writes every tensor once.
  void fill() {
    for (SegmentId id = 0; id < table.segment_count(); ++id) {
      const Lease lease = store->acquire(id, Tier::kHost, Access::kOverwrite);
      auto* words = static_cast<std::uint64_t*>(lease.data());
      const auto n = static_cast<std::uint64_t>(lease.bytes() / 8);
      for (std::uint64_t i = 0; i < n; ++i) words[i] = word(id, i);
    }
  }

  static std::uint64_t word(SegmentId id, std::uint64_t index) {
    return (static_cast<std::uint64_t>(id) + 1) * 0x9E3779B97F4A7C15ull + index;
  }
  // Looks at a word in each of 16 parts of it.
  static void check(const Lease& lease, SegmentId id) {
    const auto* words = static_cast<const std::uint64_t*>(lease.data());
    const auto n = static_cast<std::uint64_t>(lease.bytes() / 8);
    for (std::uint64_t part = 0; part < 16; ++part) {
      const std::uint64_t i = (n - 1) * part / 15;
      ZG_ASSERT(words[i] == word(id, i), "tensor {} has wrong contents at word {}", id, i);
    }
  }
};

// The bytes of a flag such as "64MiB", in whole pages. Throws Error(kUsage) that names the flag.
inline std::int64_t bytes_of(const std::string& flag, const std::string& text) {
  const auto bytes = parse_bytes(text);
  if (!bytes || *bytes < 4096 || *bytes % 4096 != 0)
    throw Error(Errc::kUsage, flag, text + " is not in whole pages");
  return *bytes;
}

}  // namespace zg::bench
