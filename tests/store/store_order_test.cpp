// The order of leases without a program: by arrival, and by stream.
#include <gtest/gtest.h>

#include <thread>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

struct InOrder : testing::Test {
  TensorTable table = equal_table(1, 6);
  Rig rig{table,
          {2 * kPage, 2 * kPage},
          std::make_unique<MemoryIo>(1, 2 * table.drive_bytes(), MemoryIo::Options{})};
  TensorStore& store = *rig.store;
  Deadline deadline{30, [this] { return store.state(); }};

  InOrder() {
    for (SegmentId id = 0; id < 6; ++id) {
      const Lease lease = store.acquire(id, Tier::kHost, Access::kOverwrite);
      fill(lease.data(), kPage, id, 0);
    }
  }
  // Returns when so many threads wait, which must happen.
  void until_waiting(int count) const {
    while (store.waiting() < count) std::this_thread::yield();
  }
};
using StoreOrder = InOrder;

TEST_F(StoreOrder, AReaderThatComesAfterAWriterSeesWhatItWrites) {
  Lease before = store.acquire(0, Tier::kHost, Access::kRead);
  std::thread writer([&] {
    const Lease lease = store.acquire(0, Tier::kHost, Access::kWrite);
    fill(lease.data(), kPage, 0, 1);
  });
  until_waiting(1);
  std::atomic<bool> overtaken{false};
  std::thread reader([&] {
    const Lease lease = store.acquire(0, Tier::kHost, Access::kRead);
    overtaken = !holds(lease.data(), kPage, 0, 1);
  });
  while (store.waiting() < 2 && !overtaken) std::this_thread::yield();
  before.release();
  writer.join();
  reader.join();
  EXPECT_FALSE(overtaken);
}

// A thread that holds a lease goes first: the writer in front may be waiting for that lease.
TEST_F(StoreOrder, AReaderThatHoldsSomethingOvertakes) {
  Lease before = store.acquire(0, Tier::kHost, Access::kRead);
  std::thread writer([&] { (void)store.acquire(0, Tier::kHost, Access::kWrite); });
  until_waiting(1);
  Lease again = store.acquire(0, Tier::kHost, Access::kRead);
  EXPECT_TRUE(again);
  before.release();
  again.release();
  writer.join();
}

TEST_F(StoreOrder, RoomIsGivenInTheOrderOfComing) {
  for (int round = 0; round < 20; ++round) {
    Lease held[] = {store.acquire(0, Tier::kHost, Access::kRead),
                    store.acquire(1, Tier::kHost, Access::kRead)};
    std::atomic<int> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const Lease lease = store.acquire(2 + t, Tier::kHost, Access::kRead);
        EXPECT_EQ(next++, t);
      });
      until_waiting(t + 1);
    }
    held[0].release();
    for (auto& t : threads) t.join();
  }
}

// Work that is still queued on a stream is ordered before later work of that stream alone.
TEST_F(StoreOrder, AnotherStreamsLeaseIsWaitedFor) {
  WorkStream mine(*rig.device, "mine"), other(*rig.device, "other");
  const Event gate = Event::pending();
  std::atomic<bool> open{false};
  other.wait(gate);
  store.acquire(0, Tier::kHost, Access::kWrite)
      .release();  // no copy elsewhere, so that nothing is to be decided
  for (WorkStream* s : {&other, &mine}) {
    Lease lease = store.acquire(0, Tier::kHost, Access::kRead, s->get());
    s->release(lease);
  }
  std::thread writer([&] {
    const Lease lease = store.acquire(0, Tier::kHost, Access::kWrite, mine.get());
    EXPECT_TRUE(open) << "the other stream has not read it yet";
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  open = true;
  gate.set();
  writer.join();
}

TEST_F(StoreOrder, ItsOwnStreamsLeaseIsNotWaitedFor) {
  WorkStream mine(*rig.device, "mine");
  const Event gate = Event::pending();
  mine.wait(gate);
  for (std::uint64_t version = 1; version <= 3; ++version) {
    Lease lease = store.acquire(0, Tier::kHost, Access::kWrite, mine.get());
    mine.enqueue({Tier::kHost, Access::kWrite, lease}, [version](void* data) {
      EXPECT_TRUE(holds(data, kPage, 0, version - 1));
      fill(data, kPage, 0, version);
    });
    mine.release(lease);
  }
  EXPECT_EQ(store.report(0)[0].passed, 3);
  gate.set();
  EXPECT_TRUE(holds(store.acquire(0, Tier::kHost, Access::kRead).data(), kPage, 0, 3));
}

}  // namespace
}  // namespace zg::test
