// What goes wrong: transfers, checksums, callers.
#include <gtest/gtest.h>

#include <thread>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

std::unique_ptr<MemoryIo> faulty(const TensorTable& table, const MemoryIo::Faults& faults) {
  return std::make_unique<MemoryIo>(table.drives(), table.drive_bytes(), MemoryIo::Options{.faults = faults});
}

// Writes and reads five segments over and over, in room for two, until the error comes; returns it.
std::optional<Error> error_from(Rig& rig) {
  const Deadline deadline(30, [&] { return rig.store->state(); });
  std::optional<Error> found;
  try {
    for (int i = 0; i < 40; ++i) {
      const SegmentId id = i % 5;
      const Lease lease = rig.store->acquire(id, Tier::kHost, i < 5 ? Access::kOverwrite : Access::kRead);
      if (i < 5) fill(lease.data(), lease.bytes(), id, 1);
      EXPECT_TRUE(holds(lease.data(), lease.bytes(), id, 1)) << "given away although it is wrong";
    }
  } catch (const Error& e) {
    found = e;
  }
  if (found) {
    for (SegmentId id = 0; id < 5; ++id) {
      EXPECT_THROW((void)rig.store->acquire(id, Tier::kHost, Access::kOverwrite), Error) << "failed for good";
    }
    EXPECT_THROW(rig.store->drain(), Error);
  }
  return found;
}

TEST(StoreFailure, AFailedTransferIsToldAtTheNextAcquire) {
  for (const bool read : {true, false}) {
    const TensorTable table = equal_table(2, 5, 2 * kPage);
    MemoryIo::Faults faults;
    (read ? faults.fail_read : faults.fail_write) = 3;
    Rig rig(table, {0, 4 * kPage}, faulty(table, faults));
    const auto error = error_from(rig);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), Errc::kIo);
    EXPECT_HAS(error->what(), read ? "reading t" : "writing t");
    EXPECT_HAS(error->what(), "drive ");
    EXPECT_HAS(error->what(), "errno 5");
  }
}

TEST(StoreFailure, AChangedBitIsFound) {
  const TensorTable table = equal_table(1, 5);
  Rig rig(table, {0, 2 * kPage}, faulty(table, {.flip_read = 2}));
  const auto error = error_from(rig);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), Errc::kIo);
  EXPECT_HAS(error->what(), "checksum");
}

TEST(StoreFailure, AnErrorWhileAProgramRunsEndsIt) {
  const TensorTable table = equal_table(1, 6, 5000);
  Program program("p");
  for (int round = 0; round < 3; ++round) {
    for (SegmentId id = 0; id < 6; ++id) {
      program.add_op(std::vector<AccessStep>{
          {id, Tier::kDevice, round == 0 ? Access::kOverwrite : Access::kWrite, false}});
    }
  }
  program.finish(6);
  for (const int depth : {0, 4, 100}) {
    for (const bool read : {true, false}) {
      MemoryIo::Faults faults;
      (read ? faults.fail_read : faults.fail_write) = 2;
      Rig rig(table, {2 * 8192, 2 * 8192}, faulty(table, faults), depth);
      WorkStream stream(*rig.device);
      const Deadline deadline(30, [&] { return rig.store->state(); });
      const auto run_to_the_end = [&] {
        std::vector<Lease> leases;
        rig.store->run(&program, nullptr);
        for (int op = 0; op < program.op_count(); ++op) {
          rig.store->acquire_op(stream.get(), leases);
          stream.enqueue([] {});
          stream.release(leases[0]);
        }
        rig.store->drain();
      };
      EXPECT_THROW(run_to_the_end(), Error) << "depth " << depth;
      EXPECT_THROW(rig.store->run(&program, nullptr), Error);
    }
  }
}

TEST(StoreFailure, FaultsOfTheRealEngineSurfaceToo) {
  const TensorTable table = equal_table(1, 5);
  Rig rig(table, {0, 2 * kPage}, Nvme::kThreads, 64, {.fail_after = 6});
  const auto error = error_from(rig);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), Errc::kIo);
}

TEST(StoreFailure, OthersThatWaitAreWokenByAFailure) {
  const TensorTable table = equal_table(1, 2);
  // The first read fails; two threads wait for it.
  Rig rig(table, {0, kPage}, faulty(table, {.fail_read = 0}));
  const Deadline deadline(30, [&] { return rig.store->state(); });
  for (SegmentId id = 0; id < 2; ++id)
    fill(rig.store->acquire(id, Tier::kHost, Access::kOverwrite).data(), kPage, id, 1);
  std::atomic<int> thrown{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      try {
        (void)rig.store->acquire(0, Tier::kHost, Access::kRead);
      } catch (const Error&) {
        ++thrown;
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(thrown, 2);
}

TEST(StoreFailure, AProgramThatDoesNotFitIsRefusedForGood) {
  const TensorTable table = equal_table(1, 2);
  Program program("too large");
  program.add_op(std::vector<AccessStep>{{0, Tier::kHost, Access::kOverwrite, false},
                                         {1, Tier::kHost, Access::kOverwrite, false}});
  program.finish(2);
  Rig rig(table, {0, kPage}, faulty(table, {}));
  for (int i = 0; i < 2; ++i) {
    const Error e = error_of([&] { rig.store->run(&program, nullptr); });
    EXPECT_EQ(e.code(), Errc::kMemory);
    EXPECT_HAS(e.what(), "too large");
    EXPECT_HAS(e.what(), "host tier");
  }
}

// Memory that the system has not, though the budget would allow it.
class RefusingArena final : public Arena {
 public:
  RefusingArena(std::int64_t budget, int allowed)
      : inner_(make_host_arena("host memory", budget)), allowed_(allowed) {}
  void* allocate(std::int64_t bytes) override {
    if (allowed_-- > 0) return inner_->allocate(bytes);
    throw Error(Errc::kMemory, "host memory", "the system refuses a page", "close other programs");
  }
  void release(void* data, std::int64_t bytes) override { inner_->release(data, bytes); }
  std::int64_t budget() const override { return inner_->budget(); }
  std::int64_t in_use() const override { return inner_->in_use(); }
  std::int64_t peak() const override { return inner_->peak(); }
  std::int64_t granule() const override { return inner_->granule(); }
  void set_hooks(Hooks hooks) override { inner_->set_hooks(std::move(hooks)); }

 private:
  std::unique_ptr<Arena> inner_;
  int allowed_;
};

TEST(StoreFailure, RefusedMemorySaysWhatHoldsTheRest) {
  TensorTable table(0);
  for (const Role role : {Role::kWeight, Role::kWeight, Role::kActivation, Role::kOther})
    table.add({.name = fmt::format("t{}", table.tensor_count()),
               .dtype = DType::kU8,
               .count = 3 * kPage,
               .role = role,
               .lowest = Tier::kHost});
  const auto device = make_host_device(0, nullptr);
  RefusingArena host(64 * kPage, 3);
  TensorStore::Options options;
  options.table = &table;
  options.device = device.get();
  options.host = &host;
  options.budgets = {0, 64 * kPage};
  TensorStore store(options);
  for (SegmentId id = 0; id < 3; ++id) (void)store.acquire(id, Tier::kHost, Access::kOverwrite);
  const Error e = error_of([&] { (void)store.acquire(3, Tier::kHost, Access::kOverwrite); });
  EXPECT_EQ(e.code(), Errc::kMemory);
  EXPECT_HAS(e.what(),
             "the system refuses a page; of the host tier, copies hold: weight 24.0 KiB in 2 segments, "
             "activation 12.0 KiB in 1 segment");
}

// The arena may outlive the engine: what the store would have told that one of it must not reach it then.
TEST(StoreFailure, AStoreThatCannotBeMadeLeavesTheArenaAlone) {
  const TensorTable table = equal_table(1, 4, 2 * kPage);
  const auto device = make_host_device(kPage, nullptr);
  const auto host = make_host_arena("host memory", 8 * kPage);
  MemoryIo io(1, 6 * kPage, {});  // room for three of them
  TensorStore::Options options;
  options.table = &table;
  options.device = device.get();
  options.host = host.get();
  options.io = &io;
  options.budgets = {kPage, 8 * kPage};
  EXPECT_THROW(TensorStore store(options), Error);
  host->release(host->allocate(kPage), kPage);
  EXPECT_EQ(io.registered(), 0);
}

// The store waits for leases that a stream still has.
TEST(StoreFailure, TheEndWaitsForStreams) {
  const TensorTable table = equal_table(0, 1);
  Rig rig(table, {kPage, kPage}, nullptr);
  WorkStream stream(*rig.device);
  const Event gate = Event::pending();
  std::atomic<bool> done{false};
  Lease lease = rig.store->acquire(0, Tier::kDevice, Access::kOverwrite, stream.get());
  stream.wait(gate);
  stream.enqueue({Tier::kDevice, Access::kOverwrite, lease}, [&](void* data) {
    fill(data, kPage, 0, 1);
    done = true;
  });
  stream.release(lease);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    gate.set();
  });
  rig.store.reset();
  EXPECT_TRUE(done);
  opener.join();
}

class StoreFailureDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(StoreFailureDeathTest, ALeaseThatOutlivesItsStore) {
  const TensorTable table = equal_table(0, 1);
  EXPECT_DEATH(
      {
        Rig rig(table, {0, kPage}, nullptr);
        const Lease lease = rig.store->acquire(0, Tier::kHost, Access::kOverwrite);
        rig.store.reset();
      },
      "t0.*still leased");
}

TEST_F(StoreFailureDeathTest, AnAcquireThatLeavesTheProgram) {
  const TensorTable table = equal_table(0, 2);
  const auto leave = [&](SegmentId id, Tier tier, Access access) {
    Program program("straight");
    program.add_op(std::vector<AccessStep>{{0, Tier::kHost, Access::kOverwrite, false}});
    program.finish(2);
    Rig rig(table, {2 * kPage, 2 * kPage}, nullptr);
    rig.store->run(&program, nullptr);
    (void)rig.store->acquire(id, tier, access);
  };
  EXPECT_DEATH(leave(1, Tier::kHost, Access::kOverwrite), "program straight expects t0 next, not t1");
  EXPECT_DEATH(leave(0, Tier::kDevice, Access::kOverwrite), "program straight expects");
  EXPECT_DEATH(leave(0, Tier::kHost, Access::kRead), "program straight expects");
}

TEST(StoreFailure, AReadOfWhatWasNeverWrittenIsRefused) {
  Rig rig(equal_table(0, 1), {0, kPage}, nullptr);
  const Error e = error_of([&] { (void)rig.store->acquire(0, Tier::kHost, Access::kRead); });
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.what(), "t0: is read, and has no content");
  rig.store->acquire(0, Tier::kHost, Access::kOverwrite).release();
  EXPECT_TRUE(rig.store->acquire(0, Tier::kHost, Access::kRead));
}

}  // namespace
}  // namespace zg::test
