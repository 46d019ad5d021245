// What the model test runs: a store in one of many configurations, and what each of its segments must hold.
#pragma once
#include <algorithm>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {

enum class Drives { kMemory, kUring, kLibaio, kThreads, kRam };
inline constexpr Drives kAllDrives[] = {Drives::kMemory, Drives::kUring, Drives::kLibaio, Drives::kThreads,
                                        Drives::kRam};
enum class Faults { kNone, kHarmless, kErrors, kFlips };  // kHarmless: what the engine must hide
inline constexpr Faults kAllFaults[] = {Faults::kNone, Faults::kHarmless, Faults::kErrors, Faults::kFlips};
inline constexpr const char* kPolicies[] = {"next-use", "lru", "clock", "random"};

struct ModelConfig {
  std::uint64_t seed = 1;
  int threads = 1;
  Drives drives = Drives::kMemory;
  std::string policy = "next-use";
  int device_room = 2, host_room = 2;  // in segments of the largest size; 0: room for all
  std::int64_t granule = 4096;         // of the device, or what the tested one has, if that is larger
  Faults faults = Faults::kNone;
  bool write_ahead = true;
  bool direct = false;
  int prefetch_depth = 0;

  std::string text() const {
    static constexpr const char* kDriveNames[] = {"memory", "uring", "libaio", "threads", "ram"};
    static constexpr const char* kFaultNames[] = {"no faults", "harmless faults", "errors", "flips"};
    return fmt::format(
        "seed {}, {} threads, {}, {}, room for {} and {}, granules of {}, {}, write-ahead {}, direct {}, "
        "depth {}",
        seed, threads, kDriveNames[static_cast<int>(drives)], policy, device_room, host_room, granule,
        kFaultNames[static_cast<int>(faults)], write_ahead, direct, prefetch_depth);
  }
};

// A policy of a user's: it evicts any copy that it may.
class RandomPolicy final : public Policy {
 public:
  explicit RandomPolicy(std::uint64_t seed) : random_(seed) {}
  void insert(SegmentId id, const PolicyView&) override { there_.push_back(id); }
  void remove(SegmentId id) override { there_.erase(std::find(there_.begin(), there_.end(), id)); }
  void update(SegmentId, const PolicyView&) override {}
  void future_changed(const PolicyView&) override {}
  SegmentId victim(const PolicyView& view) override {
    const std::size_t start = there_.empty() ? 0 : random_() % there_.size();
    for (std::size_t i = 0; i < there_.size(); ++i) {
      const SegmentId id = there_[(start + i) % there_.size()];
      if (view.may_evict(id)) return id;
    }
    return -1;
  }
  bool uses_future() const override { return false; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<RandomPolicy>(*this); }

 private:
  Random random_;
  std::vector<SegmentId> there_;
};

inline std::unique_ptr<io::Engine> make_drives(const ModelConfig& c, int count, std::int64_t bytes,
                                               const TempDir& dir) {
  Random random(c.seed);
  const int when = 5 + below(random, 150);
  if (c.drives == Drives::kMemory) {
    MemoryIo::Options options{.seed = c.seed, .max_delay = std::chrono::microseconds(60), .faults = {}};
    if (c.faults == Faults::kErrors)
      (below(random, 2) == 0 ? options.faults.fail_read : options.faults.fail_write) = when;
    if (c.faults == Faults::kFlips) options.faults.flip_read = when;
    return std::make_unique<MemoryIo>(count, bytes, options);
  }
  io::EngineOptions options;
  options.backend = c.drives == Drives::kUring     ? io::Backend::kUring
                    : c.drives == Drives::kLibaio  ? io::Backend::kLibaio
                    : c.drives == Drives::kThreads ? io::Backend::kThreads
                                                   : io::Backend::kRam;
  options.require = true;
  options.block_size = 4096;  // several blocks a segment
  options.queue_depth = 4;
  options.threads = 2;
  options.faults.seed = c.seed;
  if (c.faults == Faults::kHarmless) {
    options.faults.interrupt_rate = 0.02;
    options.faults.short_rate = 0.02;
    options.faults.delay_rate = 0.02;
  } else if (c.faults == Faults::kErrors) {
    options.faults.error_rate = 0.5 / when;
  } else if (c.faults == Faults::kFlips) {
    options.faults.flip_rate = 0.3 / when;
    options.faults.torn_rate = 0.3 / when;
  }
  std::vector<io::DriveOptions> drives;
  for (int d = 0; d < count; ++d) {
    const std::string path = dir / std::to_string(d);
    std::filesystem::create_directories(path);
    drives.push_back({path, bytes});
  }
  return io::make_engine(options, drives);
}

// The truth in a plain map: the version of each segment, and who reads or writes it now.
class Truth {
 public:
  explicit Truth(std::function<std::string(SegmentId)> name) : name_(std::move(name)) {}
  void grow(std::int32_t segments) {
    while (static_cast<std::int32_t>(all_.size()) < segments) all_.emplace_back();
  }

  // What the holder of a lease does: compares, changes, and checks that no lease excludes its own.
  void work(SegmentId id, Access access, void* data, std::int64_t bytes) {
    One& one = at(id);
    const std::uint64_t version = one.version.load();
    if (access == Access::kRead) {
      if (one.owners.fetch_add(1) < 0) wrong(id, "is read while it is written");
      if (!holds(data, bytes, id, version)) wrong(id, fmt::format("is not version {}", version));
      if (one.version.load() != version) wrong(id, "has changed under a reader");
      one.owners.fetch_sub(1);
      return;
    }
    if (one.owners.fetch_sub(kWriter) != 0) wrong(id, "is written while others are at it");
    if (access == Access::kWrite && !holds(data, bytes, id, version))
      wrong(id, fmt::format("is not version {}, to be changed", version));
    fill(data, bytes, id, version + 1);
    one.version.store(version + 1);
    one.owners.fetch_add(kWriter);
  }

  void wrong(const std::string& what) {
    std::lock_guard lock(mutex_);
    if (wrong_++ == 0) first_ = what;
  }
  int wrong() const {
    std::lock_guard lock(mutex_);
    return wrong_;
  }
  std::string first() const {
    std::lock_guard lock(mutex_);
    return first_;
  }

 private:
  static constexpr std::int64_t kWriter = 1 << 20;
  struct One {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::int64_t> owners{0};
  };
  One& at(SegmentId id) { return all_[static_cast<std::size_t>(id)]; }
  void wrong(SegmentId id, const std::string& what) { wrong(name_(id) + " " + what); }

  std::function<std::string(SegmentId)> name_;
  std::deque<One> all_;
  mutable std::mutex mutex_;
  int wrong_ = 0;
  std::string first_;
};

// What happened, over all configurations.
struct ModelCount {
  std::int64_t operations = 0, leases = 0, together = 0, nested = 0, circles = 0, no_room = 0, no_content = 0;
  std::int64_t prefetches = 0, pins = 0, discards = 0, steps = 0, programs = 0, added = 0, removed = 0,
               sunk = 0;
  std::int64_t failed_stores = 0, configurations = 0, skipped = 0;
  ModelCount& operator+=(const ModelCount& o) {
    operations += o.operations, leases += o.leases, together += o.together, nested += o.nested,
        circles += o.circles;
    no_room += o.no_room, no_content += o.no_content, prefetches += o.prefetches, pins += o.pins;
    discards += o.discards, steps += o.steps, programs += o.programs, added += o.added, removed += o.removed;
    sunk += o.sunk, failed_stores += o.failed_stores, configurations += o.configurations,
        skipped += o.skipped;
    return *this;
  }
  std::string text() const {
    return fmt::format(
        "{} operations in {} configurations ({} not possible here): {} leases, {} taken together, {} nested "
        "({} circles and {} "
        "without room refused), {} reads without content, {} prefetches, {} pins, {} discards, {} steps, {} "
        "programs, {} "
        "tensors added and {} removed, {} times sunk, {} stores failed by faults",
        operations, configurations, skipped, leases, together, nested, circles, no_room, no_content,
        prefetches, pins, discards, steps, programs, added, removed, sunk, failed_stores);
  }
};

// A store of a configuration. Segments are of three kinds: with content always, with content now and then
// ("volatile"), and such that never leave the device or the host (for which there is room besides).
struct ModelStore {
  static constexpr std::int64_t kLargest = 3 * 4096;

  ModelConfig config;
  TempDir dir;
  TensorTable table;
  Budgets budgets;
  std::unique_ptr<Device> device;
  std::unique_ptr<Arena> host;
  std::unique_ptr<io::Engine> io;
  std::unique_ptr<TensorStore> store;
  std::unique_ptr<Truth> truth;
  std::vector<TensorId> tensors;  // not removed

  explicit ModelStore(const ModelConfig& c) : config(c), table(2, std::max(c.granule, test_granule())) {
    Random random(c.seed);
    for (int i = 0; i < 9; ++i) tensors.push_back(table.add(spec(random, i)));
    const std::int64_t at_device = arena_charge(kLargest, table.device_granule());
    constexpr int kAdded = 4 * 3;  // segments of tensors that are added
    const Budgets everything{table.total_charge(Tier::kDevice) + kAdded * at_device,
                             table.total_charge(Tier::kHost) + kAdded * kLargest};
    budgets = {c.device_room > 0 ? c.device_room * at_device : everything.device,
               c.host_room > 0 ? c.host_room * kLargest : everything.host, c.direct};
    for (SegmentId id = 0; id < table.segment_count(); ++id) {
      const Segment& s = table.segment(id);
      if (s.lowest == Tier::kHost && c.host_room > 0) budgets.host += s.charge_at(Tier::kHost);
      if (s.lowest == Tier::kDevice && c.device_room > 0) budgets.device += s.charge_at(Tier::kDevice);
    }
    device = in_granules(make_test_device(budgets.device), table.device_granule());
    host = make_host_arena("host memory", budgets.host);
    io = make_drives(c, 2, 4 * everything.host, dir);
    TensorStore::Options options;
    options.table = &table;
    options.device = device.get();
    options.host = host.get();
    options.io = io.get();
    options.budgets = budgets;
    options.prefetch_depth = c.prefetch_depth;
    options.policy = c.policy == "random"
                         ? PolicyFactory([seed = c.seed] { return std::make_unique<RandomPolicy>(seed); })
                         : policy_by_name(c.policy);
    options.warn_after_seconds = 20;
    options.write_ahead = c.write_ahead;
    store = std::make_unique<TensorStore>(options);
    truth = std::make_unique<Truth>([this](SegmentId id) { return store->table().segment_name(id); });
    truth->grow(table.segment_count());
  }

  static TensorSpec spec(Random& random, int number) {
    const int parts = 1 + below(random, 3);
    const std::int64_t elements = 1 + below(random, kLargest);
    return {.name = fmt::format("t{}", number),
            .dtype = DType::kU8,
            .count = elements * parts,
            .role = Role::kOther,
            .lowest = number == 0   ? Tier::kHost
                      : number == 1 ? Tier::kDevice
                                    : Tier::kNvme,
            .segment_elements = elements,
            .priority = number % 4 == 3 ? 1 : 0};
  }

  const Segment& segment(SegmentId id) const { return store->table().segment(id); }
  bool is_volatile(SegmentId id) const { return segment(id).lowest == Tier::kNvme && id % 4 == 3; }
  std::vector<SegmentId> segments() const {
    std::vector<SegmentId> all;
    for (const TensorId t : tensors) {
      const Tensor& tensor = store->table().tensor(t);
      for (int i = 0; i < tensor.segments; ++i) all.push_back(tensor.first_segment + i);
    }
    return all;
  }
  // A segment that must stay at the device is never at another tier.
  Tier some_tier(Random& random, SegmentId id) const {
    return segment(id).lowest == Tier::kDevice || below(random, 2) == 0 ? Tier::kDevice : Tier::kHost;
  }
  bool tight() const { return std::max(config.device_room, config.host_room) > 0; }
  // So many pins leave room for two leases and for the copies that they need on their way.
  int most_pins() const {
    const auto spare = [](int room) { return room == 0 ? 4 : (room - 4) / 2; };
    return std::clamp(std::min(spare(config.device_room), spare(config.host_room)), 0, 4);
  }
};

}  // namespace zg::test
