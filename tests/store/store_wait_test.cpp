// What a store reports and counts, and which misuse ends the process.
#include <gtest/gtest.h>

#include <thread>

#include "store/store_model.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

constexpr std::size_t at(Tier tier) {
  return static_cast<std::size_t>(tier);
}

struct Free {
  TensorTable table;
  Rig rig;
  Free(int segments, const Budgets& budgets, bool write_ahead = false)
      : table(equal_table(1, segments)),
        rig(table, budgets, std::make_unique<MemoryIo>(1, 2 * table.drive_bytes(), MemoryIo::Options{})) {
    if (!write_ahead) return;
    TensorStore::Options options;
    options.table = &rig.table;
    options.device = rig.device.get();
    options.host = rig.host.get();
    options.io = rig.io.get();
    options.budgets = rig.budgets;
    options.policy = [] { return std::make_unique<RandomPolicy>(1); };
    rig.store.reset();
    rig.store = std::make_unique<TensorStore>(options);
  }
  TensorStore& store() { return *rig.store; }
  void write(SegmentId id, Tier tier = Tier::kHost, std::uint64_t version = 0) {
    rig.write(store().acquire(id, tier, Access::kOverwrite), tier, id, version);
  }
  void read(SegmentId id, Tier tier = Tier::kHost) {
    EXPECT_TRUE(rig.has(store().acquire(id, tier, Access::kRead), tier, id, 0)) << id;
  }
};

TEST(StoreCounts, HitsMissesAndBytesByHand) {
  Free f(3, {kPage, 2 * kPage});
  f.write(0);                // miss: it was nowhere
  f.read(0);                 // hit
  f.read(0, Tier::kDevice);  // miss: copied
  f.read(0, Tier::kDevice);  // hit
  f.write(1);                // miss
  f.write(2);  // miss: one of 0 and 1 leaves; 0, of which the device has a copy, is the older one
  f.store().drain();
  StoreStatistics s = f.store().statistics();
  EXPECT_EQ(s.tiers[at(Tier::kHost)].hits, 1);
  EXPECT_EQ(s.tiers[at(Tier::kHost)].misses, 3);
  EXPECT_EQ(s.tiers[at(Tier::kDevice)].hits, 1);
  EXPECT_EQ(s.tiers[at(Tier::kDevice)].misses, 1);
  EXPECT_EQ(s.tiers[at(Tier::kHost)].evictions, 1);
  EXPECT_EQ(s.links[kToDevice].bytes, kPage);
  EXPECT_EQ(s.links[kNvmeWrite].bytes, 0) << "the device has a copy";
  f.read(1, Tier::kDevice);  // 0 leaves the device: to the host, so 2 sinks
  f.store().drain();
  s = f.store().statistics();
  EXPECT_EQ(s.links[kToHost].bytes, kPage);
  EXPECT_EQ(s.links[kNvmeWrite].bytes, kPage);
  const LinkBytes t = f.store().traffic();
  EXPECT_EQ(t[kToDevice], s.links[kToDevice].bytes);
  EXPECT_EQ(t[kToHost], s.links[kToHost].bytes);
  EXPECT_EQ(t.nvme_write(), s.links[kNvmeWrite].bytes);
  EXPECT_EQ(t.nvme_read(), s.links[kNvmeRead].bytes);
  EXPECT_EQ(f.store().statistics(0).bytes[kToHost], kPage);
  EXPECT_EQ(f.store().statistics(2).bytes[kNvmeWrite], kPage);
  EXPECT_EQ(f.store().statistics(1).hits, 0);
  EXPECT_EQ(f.store().statistics(1).misses, 2);
}

// A copy that is dropped because of a write at another tier, or after its last use, was not evicted.
TEST(StoreCounts, OnlyWhatMustMakeRoomIsAnEviction) {
  Free f(2, {2 * kPage, 2 * kPage});
  f.write(0);
  f.read(0, Tier::kDevice);
  f.write(0, Tier::kDevice);  // the host's copy is dropped
  f.store().discard(0);
  f.store().drain();
  const StoreStatistics s = f.store().statistics();
  EXPECT_EQ(s.tiers[at(Tier::kHost)].evictions + s.tiers[at(Tier::kDevice)].evictions, 0);
  EXPECT_EQ(f.store().statistics(0).evictions, 0);
}

TEST(StoreCounts, WhatIsAboutToBeWrittenIsNotWrittenBackBefore) {
  constexpr int kSegments = 40;
  Free f(kSegments, {0, 16 * kPage}, true);
  for (SegmentId id = 0; id < kSegments; ++id) f.write(id);
  f.store().drain();
  EXPECT_LE(f.store().traffic().nvme_write(), kSegments * kPage);
  for (SegmentId id = 0; id < kSegments; ++id) f.read(id);
}

TEST(StoreCounts, WaitsAreCountedWhereTheyHappen) {
  Free f(2, {0, 2 * kPage});
  f.write(0);
  f.write(1);
  // The first ones may have waited for memory that the arena had to take from the system.
  const std::int64_t before = f.store().statistics(0).waits, others = f.store().statistics(1).waits;
  Lease held = f.store().acquire(0, Tier::kHost, Access::kRead);
  std::thread writer([&] { (void)f.store().acquire(0, Tier::kHost, Access::kWrite); });
  while (f.store().waiting() == 0) std::this_thread::yield();
  const SegmentReport r = f.store().report(0)[0];
  EXPECT_EQ(r.readers[at(Tier::kHost)], 1);
  EXPECT_HAS(r.waits_for, "write of t0 at host: leases of others (1 read, 0 write; 0 of them passed");
  EXPECT_HAS(f.store().explain(0), "host (1 reading, 0 writing)");
  EXPECT_HAS(f.store().state(), "waiting for");
  EXPECT_TRUE(f.store().report(1)[0].waits_for.empty());
  held.release();
  writer.join();
  EXPECT_EQ(f.store().statistics(0).waits, before + 1);
  EXPECT_GT(f.store().statistics(0).waited_seconds, 0);
  EXPECT_EQ(f.store().statistics(1).waits, others);
  EXPECT_EQ(f.store().statistics().waits, before + others + 1);
  EXPECT_EQ(f.store().waiting(), 0);
}

TEST(StoreCounts, TheReportSaysWhatIsPinnedPassedAndMoving) {
  const TensorTable table = equal_table(1, 2);
  io::EngineOptions options;
  options.backend = io::Backend::kRam;
  std::vector<io::DriveOptions> drives{{.bytes = 1 << 20}};
  drives[0].ram = io::RamModel{.latency_seconds = 0.2};
  Rig rig(table, {kPage, kPage}, io::make_engine(options, drives));
  TensorStore& store = *rig.store;
  EXPECT_HAS(store.explain(0), "no content");
  store.acquire(0, Tier::kHost, Access::kOverwrite).release();
  {
    const Pin pin = store.pin(0, Tier::kHost);
    EXPECT_TRUE(store.report(0)[0].pinned[at(Tier::kHost)]);
    EXPECT_HAS(store.explain(0), "host (pinned)");
  }
  EXPECT_FALSE(store.report(0)[0].pinned[at(Tier::kHost)]);
  {
    WorkStream stream(*rig.device);
    const Event gate = Event::pending();
    Lease lease = store.acquire(0, Tier::kDevice, Access::kWrite, stream.get());
    stream.wait(gate);
    stream.release(lease);
    const SegmentReport r = store.report(0)[0];
    EXPECT_EQ(r.passed, 1);
    EXPECT_EQ(r.writers[at(Tier::kDevice)], 1);
    EXPECT_FALSE(r.present[at(Tier::kHost)]) << "written at the device";
    EXPECT_HAS(store.explain(0), "1 passed to a stream");
    gate.set();
  }
  (void)store.acquire(0, Tier::kHost, Access::kRead);
  store.demote_all();
  const SegmentReport r = store.report(0)[0];
  ASSERT_FALSE(r.moves.empty());
  EXPECT_HAS(store.explain(0), "move of t0 at nvme (running) from host");
  store.drain();
  EXPECT_TRUE(store.report(0)[0].moves.empty());
  EXPECT_TRUE(store.report(0)[0].present[at(Tier::kNvme)]);
}

TEST(StoreCounts, TheReportKnowsTheNextUse) {
  Free f(4, {0, 4000 * kPage});  // so much that nobody looks at so few accesses before the step ends
  for (SegmentId id = 0; id < 4; ++id) f.write(id);
  EXPECT_EQ(f.store().report(2)[0].next_use, -1);
  f.store().step_begin();
  for (SegmentId id = 0; id < 4; ++id) f.read(id);
  f.store().step_end();
  for (SegmentId id = 0; id < 4; ++id) EXPECT_EQ(f.store().report(id)[0].next_use, id + 1);
  EXPECT_HAS(f.store().explain(2), "needed in 3 accesses");
}

// A store that ends while a stream has leases, with others' transfers under way.
TEST(StoreEnd, WaitsForPassedLeasesAndMoves) {
  for (int round = 0; round < 20; ++round) {
    Free f(6, {2 * kPage, 3 * kPage});
    WorkStream stream(*f.rig.device);
    std::atomic<int> done{0};
    for (SegmentId id = 0; id < 6; ++id) f.write(id);
    for (SegmentId id = 0; id < 2; ++id) {
      Lease lease = f.store().acquire(id, Tier::kDevice, Access::kWrite, stream.get());
      stream.enqueue({Tier::kDevice, Access::kWrite, lease}, [&done](void* data) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        fill(data, kPage, 0, 1);
        ++done;
      });
      stream.release(lease);
    }
    for (SegmentId id = 2; id < 6; ++id) f.store().prefetch(id, Tier::kHost);
    f.rig.store.reset();
    EXPECT_EQ(done, 2);
    EXPECT_EQ(f.rig.host->in_use(), 0);
    EXPECT_EQ(f.rig.device->arena().in_use(), 0);
  }
}

class StoreMisuseDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(StoreMisuseDeathTest, APinThatOutlivesItsStore) {
  EXPECT_DEATH(
      {
        Free f(1, {0, kPage});
        f.write(0);
        const Pin pin = f.store().pin(0, Tier::kHost);
        f.rig.store.reset();
      },
      "t0 is still pinned");
}

TEST_F(StoreMisuseDeathTest, AProgramThatBeginsUnderALeaseOfItsThread) {
  Program program("p");
  program.add_op(std::vector<AccessStep>{{0, Tier::kHost, Access::kRead, false}});
  program.finish(1);
  EXPECT_DEATH(
      {
        Free f(1, {0, kPage});
        f.write(0);
        const Lease lease = f.store().acquire(0, Tier::kHost, Access::kRead);
        f.store().run(&program, nullptr);
      },
      "t0 is leased by the thread that starts a program");
}

TEST_F(StoreMisuseDeathTest, ProgramsAndSteps) {
  Program program("p");
  program.add_op(std::vector<AccessStep>{{0, Tier::kHost, Access::kRead, false}});
  program.finish(1);
  const auto make = [] {
    auto f = std::make_unique<Free>(1, Budgets{0, kPage});
    f->write(0);
    return f;
  };
  const auto with_program = [&](const std::function<void(TensorStore&)>& misuse) {
    const auto f = make();
    f->store().run(&program, nullptr);
    misuse(f->store());
  };
  EXPECT_DEATH(with_program([](TensorStore& s) { s.run(nullptr, nullptr); }), "");
  EXPECT_DEATH(with_program([](TensorStore& s) { s.step_begin(); }), "steps are for who has no program");
  EXPECT_DEATH(with_program([](TensorStore& s) { s.discard(0); }), "a program says itself what is dead");
  EXPECT_DEATH(with_program([](TensorStore& s) { s.demote_all(); }), "a program says itself what moves");
  EXPECT_DEATH(with_program([](TensorStore& s) { (void)s.add({.name = "x", .count = 1}); }),
               "tensors are added between programs");
  EXPECT_DEATH(with_program([](TensorStore& s) {
                 std::vector<Lease> leases;
                 s.acquire(std::vector<AccessStep>{{0, Tier::kHost, Access::kRead, false}}, leases);
               }),
               "with a program, its operations are acquired");
  EXPECT_DEATH(with_program([](TensorStore& s) {
                 s.acquire(0, Tier::kHost, Access::kRead).release();
                 (void)s.acquire(0, Tier::kHost, Access::kRead);
               }),
               "");
  EXPECT_DEATH(make()->store().step_end(), "no step has begun");
  EXPECT_DEATH(
      {
        const auto f = make();
        f->store().step_begin("a");
        f->store().step_begin("b");
      },
      "step \"a\" has not ended");
  EXPECT_DEATH(
      {
        const auto f = make();
        f->store().step_begin("a");
        f->store().run(&program, nullptr);
      },
      "a step is under way");
}

TEST_F(StoreMisuseDeathTest, ResidencyKeepsItsTable) {
  const TensorTable table = equal_table(1, 1);
  EXPECT_DEATH(Residency(table, {kPage, kPage}).unpin(0, Tier::kHost), "t0 is not pinned");
  EXPECT_DEATH(
      {
        Residency r(table, {kPage, kPage});
        r.assume_content(0, Tier::kHost);
        r.assume_content(0, Tier::kNvme);
      },
      "");
  EXPECT_DEATH(
      {
        Residency r(table, {kPage, kPage});
        std::vector<Action> actions;
        (void)r.decide_free({0, Tier::kHost, Access::kRead, false}, actions);
      },
      "read before anything was written");
}

// A thread has more leases than its first list of them has room for.
TEST(StoreWait, AThreadOfManyLeasesIsStillSeenToWaitForItself) {
  constexpr int kSegments = 200;
  Rig rig(equal_table(0, kSegments), {0, kSegments * kPage}, nullptr);
  std::vector<Lease> leases;
  for (SegmentId id = 0; id < kSegments; ++id)
    leases.push_back(rig.store->acquire(id, Tier::kHost, Access::kOverwrite));
  for (const SegmentId id : {0, 31, 32, 150, kSegments - 1}) {
    EXPECT_THROW((void)rig.store->acquire(id, Tier::kHost, Access::kRead), Error) << id;
  }
  leases.clear();
  EXPECT_TRUE(rig.store->acquire(0, Tier::kHost, Access::kWrite));
}

}  // namespace
}  // namespace zg::test
