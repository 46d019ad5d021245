// The store without a program: several threads against a plain map of contents.
#include <gtest/gtest.h>

#include <thread>

#include "store/programs.hpp"
#include "store/rig.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

// Drives of unequal speed, with room to spare: extents move to the faster one when they are written again,
// and nothing of what they hold is lost.
TEST(StoreFree, ExtentsMoveToTheFasterDriveAndKeepTheirContents) {
  constexpr SegmentId kSegments = 8;
  constexpr std::int64_t kBytes = 1 << 20;
  const TensorTable table = equal_table(2, kSegments, kBytes);
  io::EngineOptions options;
  options.backend = io::Backend::kRam;
  options.block_size = 64 * 1024;
  std::vector<io::DriveOptions> drives;
  for (const double speed : {10e6, 80e6}) {
    drives.push_back({.bytes = 2 * kSegments * kBytes});
    drives.back().ram = io::RamModel{.bytes_per_second = speed};
  }
  Rig rig(table, {0, 2 * kBytes}, io::make_engine(options, drives));
  const Deadline deadline(60, [&] { return rig.store->state(); });
  const auto written = [&](int drive) { return rig.io->counters(drive).write_bytes; };
  std::int64_t before[2] = {0, 0};
  constexpr std::uint64_t kRounds = 6;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    rig.store->drain();
    for (const int d : {0, 1}) before[d] = written(d);
    for (SegmentId id = 0; id < kSegments; ++id) {
      const Lease lease =
          rig.store->acquire(id, Tier::kHost, round == 1 ? Access::kOverwrite : Access::kWrite);
      EXPECT_TRUE(round == 1 || holds(lease.data(), lease.bytes(), id, round - 1)) << id << ", " << round;
      fill(lease.data(), lease.bytes(), id, round);
    }
    rig.store->demote_all();
  }
  rig.store->drain();
  // They were laid out in equal parts; now the fast one has most.
  EXPECT_GT(written(1) - before[1], 2 * (written(0) - before[0]));
  for (SegmentId id = 0; id < kSegments; ++id) {
    const Lease lease = rig.store->acquire(id, Tier::kHost, Access::kRead);
    EXPECT_TRUE(holds(lease.data(), lease.bytes(), id, kRounds)) << id;
  }
}

constexpr int kThreads = 4;

// Segments of one thread, or (thread == kThreads) those that all read.
struct Shares {
  TensorTable table{0};
  std::vector<std::vector<SegmentId>> of;
};

Shares make_shares(Random& random, int drives, int each) {
  Shares s;
  s.table = TensorTable(drives, test_granule());
  s.of.resize(kThreads + 1);
  for (int owner = 0; owner <= kThreads; ++owner) {
    for (int i = 0; i < each; ++i) {
      // Segments that cannot be demoted below the device or the host take room for ever: there are few.
      const Tier lowest = i == 0 && drives > 0 ? Tier::kHost : Tier::kNvme;
      const TensorId t = s.table.add({.name = fmt::format("owner{}.{}", owner, i),
                                      .dtype = DType::kU8,
                                      .count = 1 + below(random, 12000),
                                      .lowest = lowest});
      s.of[static_cast<std::size_t>(owner)].push_back(s.table.tensor(t).first_segment);
    }
  }
  return s;
}

class Worker {
 public:
  Worker(Rig& rig, const Shares& shares, int number, std::uint64_t seed, int steps)
      : rig_(rig),
        own_(shares.of[static_cast<std::size_t>(number)]),
        shared_(shares.of[kThreads]),
        random_(seed),
        steps_(steps) {}

  void operator()() {
    WorkStream stream(*rig_.device);
    for (int i = 0; i < steps_; ++i) step(stream);
    stream.synchronize();
    for (const auto& [id, version] : versions_) {
      const Lease lease = rig_.store->acquire(id, Tier::kHost, Access::kRead);
      wrong_ += holds(lease.data(), lease.bytes(), id, version) ? 0 : 1;
    }
  }
  int wrong() const { return wrong_; }

 private:
  void step(WorkStream& stream) {
    const Tier tier = below(random_, 2) == 0 ? Tier::kDevice : Tier::kHost;
    if (below(random_, 4) == 0) {
      const SegmentId id = pick(shared_);
      const Lease lease = rig_.store->acquire(id, tier, Access::kRead);
      wrong_ += rig_.has(lease, tier, id, 0) ? 0 : 1;
      return;
    }
    const SegmentId id = pick(own_);
    const auto known = versions_.find(id);
    if (known != versions_.end() && below(random_, 10) == 0) {
      stream.synchronize();
      rig_.store->discard(id);
      if (rig_.store->has_content(id)) ++wrong_;
      versions_.erase(known);
      return;
    }
    const Access access = known == versions_.end() || below(random_, 8) == 0 ? Access::kOverwrite
                          : below(random_, 2) == 0                           ? Access::kRead
                                                                             : Access::kWrite;
    const bool on_stream = below(random_, 2) == 0;
    Lease lease = rig_.store->acquire(id, tier, access, on_stream ? stream.get() : nullptr);
    const std::uint64_t before = access == Access::kOverwrite ? 0 : known->second;
    const std::uint64_t after = access == Access::kRead ? before : ++written_;
    if (access != Access::kRead) versions_[id] = after;
    const Leased at(tier, access, lease);
    const auto work = [this, id, access, before, after, bytes = lease.bytes()](void* data) {
      if (access != Access::kOverwrite && !holds(data, bytes, id, before)) ++wrong_;
      if (access != Access::kRead) fill(data, bytes, id, after);
    };
    if (on_stream) {
      stream.enqueue(at, work);
      stream.release(lease);
      if (below(random_, 2) == 0) stream.synchronize();
      // At most one of a thread's leases is out, so that the budget is known to suffice.
      else
        stream.record().wait();
    } else {
      work_on(*rig_.device, at, work);
    }
  }

  SegmentId pick(const std::vector<SegmentId>& from) {
    return from[static_cast<std::size_t>(below(random_, static_cast<int>(from.size())))];
  }

  Rig& rig_;
  const std::vector<SegmentId>& own_;
  const std::vector<SegmentId>& shared_;
  Random random_;
  int steps_;
  std::map<SegmentId, std::uint64_t> versions_;
  std::uint64_t written_ = 0;
  std::atomic<int> wrong_{0};
};

void run_threads(Rig& rig, const Shares& shares, std::uint64_t seed, int steps) {
  const Deadline deadline(60, [&] { return rig.store->state(); });
  for (const SegmentId id : shares.of[kThreads]) {
    const Lease lease = rig.store->acquire(id, Tier::kHost, Access::kOverwrite);
    fill(lease.data(), lease.bytes(), id, 0);
  }
  std::atomic<bool> over{false};
  std::thread budget_watch([&] {
    while (!over) {
      EXPECT_LE(rig.device->arena().in_use(), rig.budgets.device);
      EXPECT_LE(rig.host->in_use(), rig.budgets.host);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    workers.push_back(std::make_unique<Worker>(rig, shares, t, seed + static_cast<std::uint64_t>(t), steps));
    threads.emplace_back([&w = *workers.back()] { w(); });
  }
  for (auto& t : threads) t.join();
  over = true;
  budget_watch.join();
  for (const auto& w : workers) EXPECT_EQ(w->wrong(), 0);
  rig.store->drain();
  rig.within_budgets();
}

// Each thread holds one lease, and one more segment may be passing through the host; kLargest is the largest.
// The segments that may not be demoted below the host come on top.
Budgets tight_budgets(const Shares& shares) {
  constexpr std::int64_t kLargest = 12288;
  Budgets budgets{kThreads * arena_charge(kLargest, shares.table.device_granule()),
                  (kThreads + 1) * kLargest};
  for (SegmentId id = 0; id < shares.table.segment_count(); ++id) {
    if (shares.table.segment(id).lowest == Tier::kHost) budgets.host += shares.table.segment(id).charge;
  }
  return budgets;
}

TEST(StoreFree, ThreadsMatchTheModelOverThreeTiers) {
  const std::uint64_t seed = test_seed(707);
  SCOPED_TRACE(seed);
  Random random(seed);
  for (const int drives : {1, 3}) {
    const Shares shares = make_shares(random, drives, 6);
    Rig rig(shares.table, tight_budgets(shares), Nvme::kMemory);
    run_threads(rig, shares, seed, 400);
    const LinkBytes moved = rig.store->traffic();
    EXPECT_GT(moved.nvme_read(), 0);
    EXPECT_GT(moved[kToHost], 0);
  }
}

TEST(StoreFree, ThreadsMatchTheModelWithoutNvme) {
  const std::uint64_t seed = test_seed(808);
  SCOPED_TRACE(seed);
  Random random(seed);
  const Shares shares = make_shares(random, 0, 6);
  Rig rig(shares.table, tight_budgets(shares), nullptr);
  run_threads(rig, shares, seed, 1500);
  EXPECT_EQ(rig.store->traffic().nvme_read(), 0);
}

TEST(StoreFree, ThreadsMatchTheModelOnTheRealEngine) {
  const std::uint64_t seed = test_seed(909);
  SCOPED_TRACE(seed);
  Random random(seed);
  const Shares shares = make_shares(random, 2, 6);
  Rig rig(shares.table, tight_budgets(shares), Nvme::kThreads);
  run_threads(rig, shares, seed, 200);
}

// A writer waits until the last reader has released its lease.
TEST(StoreFree, AWriterWaitsForReaders) {
  TensorTable table = equal_table(0, 1);
  Rig rig(table, {0, 4096}, nullptr);
  const Deadline deadline(30, [&] { return rig.store->state(); });
  { fill(rig.store->acquire(0, Tier::kHost, Access::kOverwrite).data(), 4096, 0, 1); }
  Lease reader = rig.store->acquire(0, Tier::kHost, Access::kRead);
  Lease another = rig.store->acquire(0, Tier::kHost, Access::kRead);  // readers share
  std::atomic<bool> written{false};
  std::thread writer([&] {
    const Lease lease = rig.store->acquire(0, Tier::kHost, Access::kWrite);
    written = true;
    fill(lease.data(), lease.bytes(), 0, 2);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  another.release();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(written);
  EXPECT_TRUE(holds(reader.data(), reader.bytes(), 0, 1));
  reader.release();
  writer.join();
  EXPECT_TRUE(written);
  EXPECT_GT(rig.store->waited_seconds(), 0.01);
}

TEST(StoreFree, LeasesThatFillTheBudgetAreAnErrorThatPasses) {
  TensorTable table = equal_table(1, 3);
  Rig rig(table, {0, 2 * 4096}, Nvme::kMemory);
  const Deadline deadline(30, [&] { return rig.store->state(); });
  Lease a = rig.store->acquire(0, Tier::kHost, Access::kOverwrite);
  fill(a.data(), a.bytes(), 0, 1);
  const Lease b = rig.store->acquire(1, Tier::kHost, Access::kOverwrite);
  const Error e = error_of([&] { (void)rig.store->acquire(2, Tier::kHost, Access::kOverwrite); });
  EXPECT_EQ(e.code(), Errc::kMemory);
  EXPECT_HAS(e.what(), "t2");
  a.release();
  const Lease c = rig.store->acquire(2, Tier::kHost, Access::kOverwrite);
  EXPECT_TRUE(c);
}

TEST(StoreFree, LeasesMove) {
  TensorTable table = equal_table(0, 2);
  Rig rig(table, {0, 2 * 4096}, nullptr);
  Lease a = rig.store->acquire(0, Tier::kHost, Access::kOverwrite);
  Lease b = std::move(a);
  EXPECT_FALSE(a);
  EXPECT_TRUE(b);
  b = rig.store->acquire(1, Tier::kHost, Access::kOverwrite);  // releases 0
  const Lease again = rig.store->acquire(0, Tier::kHost, Access::kWrite);
  EXPECT_TRUE(again);
}

}  // namespace
}  // namespace zg::test
