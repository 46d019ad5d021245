// Random operations from several threads against a plain map, in all configurations. ZG_STORE_OPS says how
// many operations (20,000, over the emulation 10,000), ZG_TEST_SEED which.
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "store/store_model_worker.hpp"
#include "support/deadline.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

constexpr int kRounds = 3;
constexpr int kStallSeconds = 30;

std::int64_t operations_wanted() {
  const char* text = std::getenv("ZG_STORE_OPS");
  const std::int64_t usual = test_device() == TestDevice::kEmulated ? 10000 : 20000;
  return text != nullptr ? std::strtoll(text, nullptr, 0) : usual;
}

bool can_open(Drives drives) {
  if (drives == Drives::kMemory || drives == Drives::kRam || drives == Drives::kThreads) return true;
  const TempDir dir;
  return !thrown_by([&] { return make_drives({.drives = drives}, 1, 1 << 20, dir); });
}

// All combinations of threads, drives, policies, room and faults, in random order.
std::vector<ModelConfig> configurations(std::uint64_t seed) {
  Random random(seed);
  constexpr std::pair<int, int> kRooms[] = {{2, 2}, {2, 0}, {0, 2}, {6, 6}, {0, 0}, {2, 5}};
  std::vector<ModelConfig> all;
  for (const int threads : {1, 2, 4, 8}) {
    for (const Drives drives : kAllDrives) {
      for (const char* policy : kPolicies) {
        for (const auto& [device, host] : kRooms) {
          for (const Faults faults : kAllFaults) {
            all.push_back({.seed = random(),
                           .threads = threads,
                           .drives = drives,
                           .policy = policy,
                           .device_room = device,
                           .host_room = host,
                           .granule = some_granule(random),
                           .faults = faults,
                           .write_ahead = below(random, 2) == 0,
                           .direct = test_device() == TestDevice::kHost && below(random, 2) == 0,
                           .prefetch_depth = below(random, 3) * 8});
          }
        }
      }
    }
  }
  std::shuffle(all.begin(), all.end(), random);
  return all;
}

// The rounds of one configuration. Between rounds no other thread uses the store.
class ModelRound {
 public:
  explicit ModelRound(const ModelConfig& config) : rig_(config), random_(config.seed + 1) {}

  ModelCount operator()(std::int64_t operations) {
    try {
      write_all();
      for (int round = 0; round < kRounds && rig_.truth->wrong() == 0; ++round) {
        threads(operations / kRounds);
        if (failed_ || rig_.truth->wrong() > 0) break;
        between();
      }
      if (!failed_ && rig_.truth->wrong() == 0) read_all();
    } catch (const Error& e) {
      if (e.code() != Errc::kIo) rig_.truth->wrong(e.what());
      failed_ = true;
    }
    within_budgets();
    if (failed_) {
      ++count_.failed_stores;
      const bool may_fail = rig_.config.faults == Faults::kErrors || rig_.config.faults == Faults::kFlips;
      EXPECT_TRUE(may_fail) << "a store has failed without a fault";
    }
    EXPECT_EQ(rig_.truth->wrong(), 0) << rig_.truth->first();
    ++count_.configurations;
    return count_;
  }

 private:
  TensorStore& store() { return *rig_.store; }

  void threads(std::int64_t operations) {
    const int n = rig_.config.threads;
    StallWatch watch(n, kStallSeconds, [&] { return rig_.config.text() + "\n" + store().state(); });
    std::vector<std::unique_ptr<ModelWorker>> workers;
    std::vector<std::thread> threads;
    std::atomic<bool> failed{false};
    for (int t = 0; t < n; ++t) workers.push_back(std::make_unique<ModelWorker>(rig_, t, random_()));
    for (int t = 0; t < n; ++t) {
      threads.emplace_back([&, t] {
        if (workers[static_cast<std::size_t>(t)]->run(operations / n, watch.counter(t))) failed = true;
      });
    }
    for (auto& t : threads) t.join();
    failed_ = failed_ || failed;
    for (const auto& w : workers) count_ += w->count;
  }

  void between() {
    const StallWatch watch(1, kStallSeconds, [&] { return rig_.config.text() + "\n" + store().state(); });
    if (below(random_, 2) == 0) store().drain();
    if (below(random_, 2) == 0) program();
    if (below(random_, 2) == 0) add_and_remove();
    if (below(random_, 3) == 0) {
      store().demote_all();
      ++count_.sunk;
    }
    store().drain();
    store().check();
    counts_agree();
    within_budgets();
  }

  // One access an operation, which fits always. Prefetches may be on their way when it begins.
  void program() {
    const std::vector<SegmentId> ids = rig_.segments();
    Program program("between");
    std::vector<AccessStep> steps;
    for (int i = 0; i < 40; ++i) {
      const SegmentId id = ids[static_cast<std::size_t>(below(random_, static_cast<int>(ids.size())))];
      if (rig_.is_volatile(id)) continue;  // nobody knows whether it has content
      const Access access = static_cast<Access>(below(random_, 3));
      steps.push_back({id, rig_.some_tier(random_, id), access, false});
      program.add_op({&steps.back(), 1});
    }
    if (steps.empty()) return;
    program.finish(store().table().segment_count());
    for (int i = 0; i < 3; ++i) {
      const SegmentId id = steps[static_cast<std::size_t>(i) % steps.size()].segment;
      store().prefetch(id, rig_.some_tier(random_, id));
    }
    WorkStream stream(*rig_.device, "program");
    const int times = 1 + below(random_, 2);
    for (int time = 0; time < times; ++time) {
      store().run(&program, time + 1 < times ? &program : nullptr);
      for (const AccessStep& a : steps) {
        std::vector<Lease> leases;
        store().acquire_op(stream.get(), leases);
        stream.enqueue({a, leases[0]}, [this, a, bytes = leases[0].bytes()](void* data) {
          rig_.truth->work(a.segment, a.access, data, bytes);
        });
        stream.release(leases[0]);
        ++count_.operations;
      }
    }
    store().run(nullptr, nullptr);
    if (below(random_, 2) == 0) stream.synchronize();
    ++count_.programs;
  }

  void add_and_remove() {
    const std::size_t gone =
        2 + static_cast<std::size_t>(below(random_, static_cast<int>(rig_.tensors.size()) - 2));
    store().remove(rig_.tensors[gone]);
    rig_.tensors.erase(rig_.tensors.begin() + static_cast<std::ptrdiff_t>(gone));
    ++count_.removed;
    const TensorId id = store().add(ModelStore::spec(random_, 100 + next_name_++));
    ++count_.added;
    rig_.tensors.push_back(id);
    rig_.truth->grow(store().table().segment_count());
    const Tensor& t = store().table().tensor(id);
    for (int i = 0; i < t.segments; ++i) use(t.first_segment + i, Access::kOverwrite);
  }

  void use(SegmentId id, Access access) {
    const Tier tier = rig_.some_tier(random_, id);
    const Lease lease = store().acquire(id, tier, access);
    work_on(*rig_.device, {tier, access, lease},
            [&](void* data) { rig_.truth->work(id, access, data, lease.bytes()); });
  }
  void write_all() {
    for (const SegmentId id : rig_.segments()) use(id, Access::kOverwrite);
  }
  void read_all() {
    const StallWatch watch(1, kStallSeconds, [&] { return rig_.config.text() + "\n" + store().state(); });
    for (const SegmentId id : rig_.segments()) {
      if (!store().has_content(id)) {
        if (!rig_.is_volatile(id))
          rig_.truth->wrong(fmt::format("{} has lost its content", store().table().segment_name(id)));
        continue;
      }
      use(id, Access::kRead);
    }
    store().drain();
    store().check();
  }

  void within_budgets() {
    EXPECT_LE(rig_.device->arena().peak(), rig_.budgets.device);
    EXPECT_LE(rig_.host->peak(), rig_.budgets.host);
  }

  // The bytes by tensor and the bytes by link are the same in sum.
  void counts_agree() {
    const StoreStatistics s = store().statistics();
    std::array<std::int64_t, kLinks> bytes{};
    std::int64_t hits = 0, misses = 0;
    for (TensorId t = 0; t < store().table().tensor_count(); ++t) {
      const TensorStatistics one = store().statistics(t);
      for (std::size_t l = 0; l < kLinks; ++l) bytes[l] += one.bytes.of[l];
      hits += one.hits;
      misses += one.misses;
    }
    for (std::size_t l = 0; l < kLinks; ++l)
      EXPECT_EQ(bytes[l], s.links[l].bytes) << name_of(static_cast<Link>(l));
    EXPECT_EQ(hits, s.tiers[0].hits + s.tiers[1].hits);
    EXPECT_EQ(misses, s.tiers[0].misses + s.tiers[1].misses);
  }

  ModelStore rig_;
  Random random_;
  ModelCount count_;
  bool failed_ = false;
  int next_name_ = 0;
};

TEST(StoreModel, RandomOperationsMatchAPlainMap) {
  const std::uint64_t seed = test_seed(4711);
  const std::int64_t wanted = operations_wanted();
  const std::vector<ModelConfig> all = configurations(seed);
  const std::int64_t each = std::max<std::int64_t>(400, wanted / static_cast<std::int64_t>(all.size()));
  std::array<bool, std::size(kAllDrives)> possible{};
  for (const Drives d : kAllDrives) possible[static_cast<std::size_t>(d)] = can_open(d);
  ModelCount total;
  for (std::size_t i = 0; total.operations < wanted && i < 4 * all.size(); ++i) {
    ModelConfig config = all[i % all.size()];
    config.seed += i / all.size();
    if (!possible[static_cast<std::size_t>(config.drives)]) {
      ++total.skipped;
      continue;
    }
    SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}, configuration {}: {}", seed, i, config.text()));
    total += ModelRound(config)(each);
    if (HasFailure()) break;
  }
  fmt::print("{}\n", total.text());
  if (!HasFailure()) {
    EXPECT_GE(total.operations, wanted);
    EXPECT_GT(total.circles + total.no_room, 0) << "no circle was closed";
  }
}

}  // namespace
}  // namespace zg::test
