// Threads without a program in little room: every thread goes on, and one that never could gets an error.
#include <gtest/gtest.h>

#include <thread>

#include "store/programs.hpp"
#include "store/rig.hpp"
#include "support/deadline.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr int kThreads = 8;
constexpr int kStallSeconds = 30;

Rig two_segments(int segments) {
  const TensorTable table = equal_table(1, segments);
  Rig rig(table, {2 * kPage, 2 * kPage}, Nvme::kMemory);
  for (SegmentId id = 0; id < segments; ++id) {
    const Lease lease = rig.store->acquire(id, Tier::kHost, Access::kOverwrite);
    fill(lease.data(), lease.bytes(), id, 0);
  }
  return rig;
}

// Each of `count` threads calls body(thread, i) so many times. An error that it lets through fails the test.
template <class Body>
void in_threads(TensorStore& store, int count, int times, Body&& body) {
  StallWatch watch(count, kStallSeconds, [&] { return store.state(); });
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      auto& counter = watch.counter(t);
      try {
        for (int i = 0; i < times; ++i, ++counter) body(t, i);
      } catch (const Error& e) {
        ADD_FAILURE() << "thread " << t << ": " << e.what();
      }
      counter = StallWatch::kOver;
    });
  }
  for (auto& t : threads) t.join();
}

TEST(StoreThreads, SingleLeasesInRoomForTwoGoOnForEverybody) {
  constexpr int kSegments = 10;
  Rig rig = two_segments(kSegments);
  std::vector<std::unique_ptr<WorkStream>> streams;
  for (int t = 0; t < kThreads; ++t) streams.push_back(std::make_unique<WorkStream>(*rig.device));
  std::atomic<int> wrong{0};
  in_threads(*rig.store, kThreads, 150, [&](int t, int i) {
    const SegmentId id = (t * 7 + i * 3) % kSegments;
    WorkStream& stream = *streams[static_cast<std::size_t>(t)];
    const Tier tier = i % 2 == 0 ? Tier::kDevice : Tier::kHost;
    const Access access = t % 2 == 0 ? Access::kRead : Access::kWrite;
    Lease lease = rig.store->acquire(id, tier, access, stream.get());
    stream.enqueue({tier, Access::kRead, lease},
                   [&wrong, id](const void* data) { wrong += holds(data, kPage, id, 0) ? 0 : 1; });
    stream.release(lease);
  });
  for (auto& s : streams) s->synchronize();
  EXPECT_EQ(wrong, 0);
  rig.store->check();
  rig.within_budgets();
}

TEST(StoreThreads, SegmentsTakenTogetherNeverCloseACircle) {
  constexpr int kSegments = 7;
  Rig rig = two_segments(kSegments);
  std::atomic<int> wrong{0};
  in_threads(*rig.store, kThreads, 60, [&](int t, int i) {
    const SegmentId a = (t + i) % kSegments, b = (a + 1 + (t + 3 * i) % (kSegments - 1)) % kSegments;
    const Tier tier = (t + i) % 3 == 0 ? Tier::kDevice : Tier::kHost;
    std::vector<Lease> leases;
    rig.store->acquire(std::vector<AccessStep>{{a, tier, Access::kWrite, false},
                                               {b, tier, t % 2 == 0 ? Access::kRead : Access::kWrite, false}},
                       leases);
    EXPECT_EQ(leases.size(), 2u);
    wrong += rig.has(leases[0], tier, a, 0) && rig.has(leases[1], tier, b, 0) ? 0 : 1;
  });
  EXPECT_EQ(wrong, 0);
  rig.store->check();
  rig.within_budgets();
}

// One after the other: circles close, over segments and over room. Who gets the error gives way, and all end.
TEST(StoreThreads, NestedLeasesThatCloseACircleAreRefusedAndTheOthersGoOn) {
  constexpr int kSegments = 4;
  Rig rig = two_segments(kSegments);
  std::atomic<int> circles{0}, no_room{0}, both{0};
  in_threads(*rig.store, kThreads, 60, [&](int t, int i) {
    const SegmentId a = (t + i) % kSegments, b = (t + i + 1 + i % 3) % kSegments;
    Lease first = rig.store->acquire(a, Tier::kHost, Access::kWrite);
    try {
      const Lease second = rig.store->acquire(b, Tier::kHost, Access::kWrite);
      ++both;
    } catch (const Error& e) {
      if (e.code() == Errc::kUsage) {
        EXPECT_HAS(e.what(), fmt::format("t{}: cannot be acquired at the host: its leases are held", b));
        ++circles;
      } else {
        EXPECT_EQ(e.code(), Errc::kMemory) << e.what();
        EXPECT_HAS(e.what(), "the leases that are held fill the budget of 8.0 KiB");
        ++no_room;
      }
    }
    first.release();
  });
  EXPECT_GT(circles + no_room, 0);
  EXPECT_GT(both, 0);
  rig.store->check();
}

TEST(StoreThreads, AThreadThatWaitsForItselfIsRefused) {
  Rig rig = two_segments(1);
  const Deadline deadline(kStallSeconds, [&] { return rig.store->state(); });
  const Lease held = rig.store->acquire(0, Tier::kHost, Access::kRead);
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    const Error e = error_of([&] { (void)rig.store->acquire(0, tier, Access::kWrite); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_HAS(e.what(), "held by this thread");
  }
  EXPECT_THROW(rig.store->discard(0), Error);
  EXPECT_TRUE(rig.store->acquire(0, Tier::kHost, Access::kRead));
}

// Whoever wants to write has its copy already when another reads it first, and holds it while it wants more
// room.
TEST(StoreThreads, ACircleThroughAnAcquireThatHasItsCopyIsSeen) {
  const TensorTable table = equal_table(1, 2);
  auto io = std::make_unique<MemoryIo>(
      1, table.drive_bytes(),
      MemoryIo::Options{.seed = 1, .max_delay = std::chrono::microseconds(3000), .faults = {}});
  Rig rig(table, {0, kPage}, std::move(io));
  for (SegmentId id = 0; id < 2; ++id)
    fill(rig.store->acquire(id, Tier::kHost, Access::kOverwrite).data(), kPage, id, 0);
  std::atomic<int> refused{0};
  for (int round = 0; round < 12; ++round) {
    rig.store->acquire(1, Tier::kHost, Access::kWrite).release();  // 0 must come back
    std::atomic<int> ready{0};
    in_threads(*rig.store, 2, 1, [&](int t, int) {
      ++ready;
      while (ready < 2) std::this_thread::yield();
      if (t == 0) {
        (void)rig.store->acquire(0, Tier::kHost, Access::kWrite);
        return;
      }
      const Lease held = rig.store->acquire(0, Tier::kHost, Access::kRead);
      const Error e = error_of([&] { (void)rig.store->acquire(1, Tier::kHost, Access::kRead); });
      EXPECT_EQ(e.code(), Errc::kMemory) << e.what();
      ++refused;
    });
  }
  EXPECT_EQ(refused, 12);
}

TEST(StoreThreads, SegmentsThatNeverFitTogetherAreRefused) {
  Rig rig = two_segments(4);
  const Deadline deadline(kStallSeconds, [&] { return rig.store->state(); });
  const auto all = [](std::initializer_list<SegmentId> ids) {
    std::vector<AccessStep> accesses;
    for (const SegmentId id : ids) accesses.push_back({id, Tier::kHost, Access::kRead, false});
    return accesses;
  };
  std::vector<Lease> leases;
  const auto refused = [&](std::initializer_list<SegmentId> ids, Errc code) {
    EXPECT_EQ(error_of([&] { rig.store->acquire(all(ids), leases); }).code(), code);
    EXPECT_TRUE(leases.empty());
  };
  refused({0, 1, 2}, Errc::kMemory);
  refused({0, 0}, Errc::kUsage);
  {
    const Pin pin = rig.store->pin(3, Tier::kHost);
    rig.store->drain();
    refused({0, 1}, Errc::kMemory);
    rig.store->acquire(all({0, 3}), leases);
    EXPECT_EQ(leases.size(), 2u);
    leases.clear();
  }
  rig.store->acquire(all({0, 1}), leases);
  EXPECT_EQ(leases.size(), 2u);
}

// The error comes at once although another thread holds a lease: its release would not make enough room.
TEST(StoreThreads, ASegmentLargerThanTheBudgetIsRefusedAtOnce) {
  TensorTable table(1);
  table.add({.name = "small", .dtype = DType::kU8, .count = kPage});
  table.add({.name = "large", .dtype = DType::kU8, .count = 3 * kPage});
  Rig rig(table, {0, 2 * kPage}, Nvme::kMemory);
  const Deadline deadline(kStallSeconds, [&] { return rig.store->state(); });
  const Lease held = rig.store->acquire(0, Tier::kHost, Access::kOverwrite);
  std::thread([&] {
    EXPECT_THROW((void)rig.store->acquire(1, Tier::kHost, Access::kOverwrite), Error);
  }).join();
}

// A thread in line behind one that can never go on is not refused in its stead.
TEST(StoreThreads, TheErrorIsOfTheOneThatCannotGoOn) {
  for (int round = 0; round < 10; ++round) {
    Rig rig = two_segments(5);
    const Pin pins[] = {rig.store->pin(0, Tier::kDevice), rig.store->pin(1, Tier::kDevice)};
    rig.store->drain();
    Lease held = rig.store->acquire(2, Tier::kHost, Access::kRead);
    in_threads(*rig.store, 3, 1, [&](int t, int) {
      if (t == 0) {
        EXPECT_THROW((void)rig.store->acquire(3, Tier::kDevice, Access::kRead), Error);
      } else if (t == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        EXPECT_TRUE(rig.store->acquire(4, Tier::kHost, Access::kRead));
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        held.release();
      }
    });
  }
}

// A copy is made for a reader while another begins to write, and takes its time.
TEST(StoreThreads, NoCopyIsMadeOfWhatIsBeingWritten) {
  constexpr std::int64_t kBytes = 64;
  const TensorTable table = equal_table(0, 1, kBytes);
  Rig rig(table, {kPage, kPage}, nullptr);
  std::atomic<std::uint64_t> version{0};
  std::atomic<int> wrong{0}, ready{0};
  {
    const Lease lease = rig.store->acquire(0, Tier::kDevice, Access::kOverwrite);
    rig.write(lease, Tier::kDevice, 0, 0);
  }
  const auto pause = [](int length) {
    for (volatile int i = 0; i < length;) i = i + 1;
  };
  const int times = test_device() == TestDevice::kEmulated ? 3000 : 6000;
  in_threads(*rig.store, 2, times, [&](int t, int i) {
    if (i == 0) {
      ++ready;
      while (ready < 2) std::this_thread::yield();
    }
    pause(i * 7919 % 100003);
    if (t == 0) {
      const Lease lease = rig.store->acquire(0, Tier::kDevice, Access::kWrite);
      pause(60000);
      if (!rig.has(lease, Tier::kDevice, 0, version)) ++wrong;
      rig.write(lease, Tier::kDevice, 0, ++version);
    } else {
      const Lease lease = rig.store->acquire(0, Tier::kHost, Access::kRead);
      if (!holds(lease.data(), kBytes, 0, version)) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
  rig.store->check();
}

// An overwrite waits for memory; a reader sees the content from before it, or the one after it.
TEST(StoreThreads, NobodyReadsWhatAnOverwriteHasNotWrittenYet) {
  const TensorTable table = equal_table(1, 4);
  auto io = std::make_unique<MemoryIo>(
      1, table.drive_bytes(),
      MemoryIo::Options{.seed = 1, .max_delay = std::chrono::microseconds(1000), .faults = {}});
  Rig rig(table, {kPage, 2 * kPage}, std::move(io));
  for (SegmentId id = 0; id < 4; ++id)
    fill(rig.store->acquire(id, Tier::kHost, Access::kOverwrite).data(), kPage, id, 0);
  std::atomic<std::uint64_t> version{0};
  std::atomic<int> wrong{0};
  for (int round = 0; round < 60; ++round) {
    for (const SegmentId id : {1, 2, 3})
      (void)rig.store->acquire(id, id == 1 ? Tier::kDevice : Tier::kHost, Access::kWrite);
    std::atomic<int> ready{0};
    in_threads(*rig.store, 4, 1, [&](int t, int) {
      ++ready;
      while (ready < 4) std::this_thread::yield();
      const Lease lease = rig.store->acquire(0, Tier::kDevice, t == 0 ? Access::kOverwrite : Access::kRead);
      if (t == 0) {
        rig.write(lease, Tier::kDevice, 0, ++version);
      } else {
        wrong += rig.has(lease, Tier::kDevice, 0, version) ? 0 : 1;
      }
    });
  }
  EXPECT_EQ(wrong, 0);
}

// Two segments are asked for at once, and one cannot be had yet: the other must keep its content.
TEST(StoreThreads, WhatIsGivenBackUnwrittenIsAsBefore) {
  TensorTable table = equal_table(1, 6);
  Rig rig(table, {2 * kPage, 4 * kPage}, Nvme::kMemory);
  TensorStore& store = *rig.store;
  const Deadline deadline(kStallSeconds, [&] { return store.state(); });
  for (SegmentId id = 0; id < 5; ++id)
    fill(store.acquire(id, Tier::kHost, Access::kOverwrite).data(), kPage, id, 0);
  constexpr SegmentId kHeld = 1, kWithout = 5;
  for (const SegmentId other : {SegmentId{0}, kWithout}) {
    Lease held = store.acquire(kHeld, Tier::kHost, Access::kRead);
    std::thread both([&] {
      std::vector<Lease> leases;
      store.acquire(std::vector<AccessStep>{{other, Tier::kDevice, Access::kOverwrite, false},
                                            {kHeld, Tier::kHost, Access::kWrite, false}},
                    leases);
      rig.write(leases[0], Tier::kDevice, other, 1);
    });
    // Until it waits for the leases: it may wait for memory from the system before.
    while (store.report(kHeld)[0].waits_for.empty()) std::this_thread::yield();
    if (other == kWithout) {
      EXPECT_FALSE(store.has_content(other));
    } else {
      EXPECT_TRUE(holds(store.acquire(other, Tier::kHost, Access::kRead).data(), kPage, other, 0));
    }
    held.release();
    both.join();
    EXPECT_TRUE(holds(store.acquire(other, Tier::kHost, Access::kRead).data(), kPage, other, 1));
    store.check();
  }
}

// Room comes for a thread that holds what another one needs. The other, if it looks first, must not judge by
// what the holder saw before: the holder is about to go on.
TEST(StoreThreads, WhoHasNotLookedYetMayGoOn) {
  const TensorTable table = equal_table(1, 5);
  Rig rig(table, {kPage, 2 * kPage}, Nvme::kMemory);
  TensorStore& store = *rig.store;
  const Deadline deadline(kStallSeconds, [&] { return store.state(); });
  constexpr SegmentId kD = 0, kT = 1, kX = 2, kY = 3, kZ = 4;
  for (const SegmentId id : {kD, kX, kY, kZ}) store.acquire(id, Tier::kHost, Access::kOverwrite).release();
  for (int round = 0; round < 40; ++round) {
    store.discard(kT);
    store.demote_all();
    store.drain();
    Lease d = store.acquire(kD, Tier::kDevice, Access::kRead);
    for (const SegmentId id : {kX, kZ}) (void)store.acquire(id, Tier::kHost, Access::kRead);
    const auto holder_that_asks = [&](SegmentId held, SegmentId wanted, Tier tier, Access access) {
      return std::thread([&store, held, wanted, tier, access] {
        try {
          const Lease first = store.acquire(held, Tier::kHost, Access::kRead);
          const Lease second = store.acquire(wanted, tier, access);
        } catch (const Error& e) {
          ADD_FAILURE() << e.what();
        }
      });
    };
    std::thread v = holder_that_asks(kZ, kT, Tier::kDevice, Access::kOverwrite);
    while (store.waiting() < 1) std::this_thread::yield();
    std::thread w = holder_that_asks(kX, kY, Tier::kHost, Access::kRead);
    while (store.waiting() < 2) std::this_thread::yield();
    d.release();
    v.join();
    w.join();
  }
}

// A segment without content when it is asked for may have some when its turn comes.
TEST(StoreThreads, ContentThatComesMeanwhileIsNotLostEither) {
  const TensorTable table = equal_table(1, 6);
  Rig rig(table, {3 * kPage, 3 * kPage}, Nvme::kMemory);
  TensorStore& store = *rig.store;
  std::atomic<std::uint64_t> version{0};  // changed under a lease of 0
  std::atomic<int> wrong{0};
  (void)store.acquire(1, Tier::kHost, Access::kOverwrite);
  in_threads(store, 4, 1500, [&](int t, int i) {
    const Tier tier = i % 2 == 0 ? Tier::kDevice : Tier::kHost;
    try {
      if (t == 0) {
        store.discard(0);
      } else if (t == 1) {
        (void)store.acquire(1, tier, Access::kWrite);
      } else if (t == 2) {
        std::vector<Lease> leases;
        store.acquire(std::vector<AccessStep>{{0, tier, Access::kOverwrite, false},
                                              {1, Tier::kHost, Access::kWrite, false}},
                      leases);
        rig.write(leases[0], tier, 0, ++version);
      } else if (i % 4 == 0) {
        const Lease lease = store.acquire(0, Tier::kHost, Access::kOverwrite);
        fill(lease.data(), kPage, 0, ++version);
      } else {
        const Lease lease = store.acquire(0, Tier::kHost, Access::kRead);
        wrong += holds(lease.data(), kPage, 0, version) ? 0 : 1;
      }
    } catch (const Error& e) {
      EXPECT_TRUE(t == 3 && has(e, "has no content")) << e.what();
    }
  });
  EXPECT_EQ(wrong, 0);
  store.check();
}

// Several threads wait for room at the device, and one of their segments can pass the host: they must not
// bring theirs to the host by turns, which would look like progress.
TEST(StoreThreads, WhoHasNoRoomMovesNothing) {
  constexpr int kHolders = 4;
  const TensorTable table = equal_table(1, 2 * kHolders);
  Rig rig(table, {kHolders * kPage, kPage}, Nvme::kMemory);
  TensorStore& store = *rig.store;
  for (SegmentId id = 0; id < 2 * kHolders; ++id) {
    const Lease lease = store.acquire(id, Tier::kHost, Access::kOverwrite);
    fill(lease.data(), kPage, id, 0);
  }
  std::atomic<int> holding{0}, refused{0};
  in_threads(store, kHolders, 1, [&](int t, int) {
    Lease held = store.acquire(t, Tier::kDevice, Access::kRead);
    ++holding;
    while (holding < kHolders) std::this_thread::yield();
    if (const auto e = thrown_by([&] { return store.acquire(kHolders + t, Tier::kDevice, Access::kRead); })) {
      EXPECT_EQ(e->code(), Errc::kMemory) << e->what();
      ++refused;
    }
  });
  EXPECT_GE(refused, 1);
  EXPECT_LT(refused, kHolders);  // who is refused gives its room to another
}

TEST(StoreThreads, ReadersShare) {
  Rig rig = two_segments(2);
  constexpr int kReaders = 6;
  std::atomic<int> inside{0};
  in_threads(*rig.store, kReaders, 1, [&](int, int) {
    const Lease lease = rig.store->acquire(0, Tier::kHost, Access::kRead);
    ++inside;
    while (inside < kReaders) std::this_thread::yield();  // for ever, if they took turns
  });
}

// There is always a reader that holds a lease.
TEST(StoreThreads, AWriterIsNotStarvedByReaders) {
  Rig rig = two_segments(2);
  std::atomic<bool> over{false};
  StallWatch watch(1, kStallSeconds, [&] { return rig.store->state(); });
  std::vector<std::thread> readers;
  for (int t = 0; t < 6; ++t) {
    readers.emplace_back([&] {
      while (!over) {
        const Lease lease = rig.store->acquire(0, Tier::kHost, Access::kRead);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  for (int i = 0; i < 50; ++i, ++watch.counter(0)) (void)rig.store->acquire(0, Tier::kHost, Access::kWrite);
  over = true;
  for (auto& t : readers) t.join();
}

// Every hand-over wakes the thread that waits: if it had to poll, this test would not end in time.
TEST(StoreThreads, WhoWaitsIsWoken) {
  Rig rig = two_segments(6);
  const Deadline deadline(60, [&] { return rig.store->state(); });
  std::atomic<int> turn{0};
  for (const bool same : {true, false}) {  // for a lease; for room
    turn = 0;
    in_threads(*rig.store, 3, 1500, [&](int t, int i) {
      const SegmentId id = same ? 0 : (t * 2 + i) % 6;
      const Lease lease = rig.store->acquire(id, Tier::kHost, Access::kWrite);
      ++turn;
    });
    EXPECT_EQ(turn, 3 * 1500);
  }
}

TEST(StoreThreads, AnAcquireOfWhatWasRemovedIsRefused) {
  const TensorTable table = equal_table(1, 2);
  Rig rig(table, {0, kPage}, Nvme::kMemory);
  for (SegmentId id = 0; id < 2; ++id) rig.store->acquire(id, Tier::kHost, Access::kOverwrite).release();
  rig.store->remove(0);
  for (const Access access : {Access::kRead, Access::kOverwrite}) {
    const Error e = error_of([&] { (void)rig.store->acquire(0, Tier::kHost, access); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_HAS(e.what(), "t0");
  }
  EXPECT_TRUE(rig.store->acquire(1, Tier::kHost, Access::kRead));
}

TEST(StoreThreads, WhatIsHeldDoesNotSink) {
  Rig rig = two_segments(3);
  const Lease held = rig.store->acquire(0, Tier::kHost, Access::kWrite);
  fill(held.data(), held.bytes(), 0, 7);
  rig.store->demote_all();
  rig.store->drain();
  rig.store->check();
  EXPECT_TRUE(holds(held.data(), held.bytes(), 0, 7));
  EXPECT_TRUE(rig.store->report(0)[0].present[static_cast<std::size_t>(Tier::kHost)]);
}

// A program begins while prefetches still wait for memory: what they wait for must not wait for the program.
TEST(StoreThreads, PrefetchesAreNotOvertakenByAProgram) {
  for (int round = 0; round < 8; ++round) {
    const TensorTable table = equal_table(1, 4);
    auto io = std::make_unique<MemoryIo>(1, table.drive_bytes(),
                                         MemoryIo::Options{.seed = static_cast<std::uint64_t>(round),
                                                           .max_delay = std::chrono::microseconds(20000),
                                                           .faults = {}});
    Rig rig(table, {0, 2 * kPage}, std::move(io));
    const Deadline deadline(kStallSeconds, [&] { return rig.store->state(); });
    constexpr SegmentId kX = 0, kY = 1, kV = 2, kW = 3;
    for (const SegmentId id : {kX, kY, kV, kW})
      fill(rig.store->acquire(id, Tier::kHost, Access::kOverwrite).data(), kPage, id, 0);
    rig.store->drain();
    rig.store->prefetch(kX, Tier::kHost);  // in the place of kV, which must be written first
    Program program("p");
    for (const SegmentId id : {kW, kX, kY})
      program.add_op(std::vector<AccessStep>{{id, Tier::kHost, Access::kRead, false}});
    program.finish(4);
    rig.store->run(&program, nullptr);
    for (const SegmentId id : {kW, kX, kY}) {
      const Lease lease = rig.store->acquire(id, Tier::kHost, Access::kRead);
      EXPECT_TRUE(holds(lease.data(), lease.bytes(), id, 0));
    }
    rig.store->run(nullptr, nullptr);
  }
}

}  // namespace
}  // namespace zg::test
