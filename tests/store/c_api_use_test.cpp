// ziggurat.h in use: who owns what, steps, texts, failures, and several threads at once.
#include <random>
#include <thread>

#include "store/c_api_rig.hpp"
#include "store/rig.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

TEST_F(CApi, ALeaseEndsOnceAndFailedCallsGiveNone) {
  open(0, 2 * kPage);
  const std::int32_t t = add("t", 4);
  zg_lease lease = {77, &lease, 77};
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, ZG_HOST, ZG_READ}, &lease), "has no content");
  EXPECT_EQ(lease.id, 0u);
  EXPECT_EQ(lease.data, nullptr);
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, ZG_NVME, ZG_OVERWRITE}, &lease), "NVMe");
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, 0, ZG_OVERWRITE}, &lease), "tier");
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, ZG_HOST, 0}, &lease), "mode");
  EXPECT_REFUSED(zg_acquire(store_, {t, 4, ZG_HOST, ZG_OVERWRITE}, &lease), "no segment");
  EXPECT_EQ(zg_acquire(store_, {t, 0, ZG_DEVICE_MEMORY, ZG_OVERWRITE}, &lease), ZG_MEMORY)
      << "there is no device";

  lease = acquire(t, 0, ZG_OVERWRITE);
  EXPECT_EQ(lease.bytes, kPage);
  zg_lease copy = lease;
  EXPECT_OK(zg_release(store_, &lease));
  EXPECT_EQ(lease.data, nullptr);
  EXPECT_OK(zg_release(store_, &lease));  // cleared
  EXPECT_REFUSED(zg_release(store_, &copy), "none of this store's");
  zg_lease next = acquire(t, 1, ZG_OVERWRITE);  // may have the place of the one before
  EXPECT_NE(next.id, copy.id);
  EXPECT_REFUSED(zg_release(store_, &copy), "none of this store's");
  std::thread([&] { EXPECT_OK(zg_release(store_, &next)); }).join();

  // This thread holds all: a wait would never end.
  zg_lease a = acquire(t, 0, ZG_OVERWRITE), b = acquire(t, 1, ZG_OVERWRITE), c = {};
  EXPECT_EQ(zg_acquire(store_, {t, 2, ZG_HOST, ZG_OVERWRITE}, &c), ZG_MEMORY);
  EXPECT_EQ(zg_acquire(store_, {t, 0, ZG_HOST, ZG_READ}, &c), ZG_USAGE);
  EXPECT_OK(zg_release(store_, &a));
  EXPECT_OK(zg_release(store_, &b));
}

TEST_F(CApi, SeveralAtOnceAreAllOrNone) {
  open(0, 3 * kPage);
  const std::int32_t t = add("t", 4);
  for (std::int32_t i = 0; i < 4; ++i) write(t, i);
  const zg_access three[] = {
      {t, 0, ZG_HOST, ZG_READ}, {t, 1, ZG_HOST, ZG_WRITE}, {t, 3, ZG_HOST, ZG_OVERWRITE}};
  zg_lease leases[3];
  ASSERT_OK(zg_acquire_all(store_, three, 3, leases));
  EXPECT_EQ(static_cast<char*>(leases[0].data)[7], 0);
  EXPECT_EQ(static_cast<char*>(leases[1].data)[7], 1);
  for (zg_lease& l : leases) EXPECT_OK(zg_release(store_, &l));
  const zg_access twice[] = {{t, 0, ZG_HOST, ZG_READ}, {t, 1, ZG_HOST, ZG_READ}, {t, 0, ZG_HOST, ZG_READ}};
  EXPECT_REFUSED(zg_acquire_all(store_, twice, 3, leases), "t[0] is named twice");
  const zg_access four[] = {three[0], three[1], three[2], {t, 2, ZG_HOST, ZG_READ}};
  zg_lease more[4] = {{5, nullptr, 5}, {5, nullptr, 5}, {5, nullptr, 5}, {5, nullptr, 5}};
  EXPECT_EQ(zg_acquire_all(store_, four, 4, more), ZG_MEMORY);
  for (const zg_lease& l : more) EXPECT_EQ(l.id, 0u);
}

TEST_F(CApi, AStoreWithLeasesOrPinsStaysOpen) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 2), u = add("u", 1);
  zg_lease lease = acquire(t, 0, ZG_OVERWRITE);
  EXPECT_REFUSED(zg_store_close(store_), "1 lease and 0 pins");
  EXPECT_REFUSED(zg_sink(store_), "1 lease");
  EXPECT_REFUSED(zg_tensor_remove(store_, t), "t[0] is leased");
  EXPECT_OK(zg_tensor_remove(store_, u));
  std::memset(lease.data, 1, kPage);  // the store is still there
  EXPECT_OK(zg_release(store_, &lease));
  zg_pin pin = {}, copy = {};
  EXPECT_OK(zg_pin_segment(store_, t, 0, ZG_HOST, &pin));
  copy = pin;
  EXPECT_REFUSED(zg_store_close(store_), "0 leases and 1 pin");
  EXPECT_REFUSED(zg_tensor_remove(store_, t), "t[0] is pinned");
  EXPECT_OK(zg_unpin(store_, &pin));
  EXPECT_OK(zg_unpin(store_, &pin));
  EXPECT_REFUSED(zg_unpin(store_, &copy), "none of this store's");
  std::vector<zg_pin> many(200);
  for (zg_pin& p : many) ASSERT_OK(zg_pin_segment(store_, t, 0, ZG_HOST, &p));
  EXPECT_REFUSED(zg_pin_segment(store_, t, 0, ZG_HOST, &pin), "200 pins");
  for (zg_pin& p : many) EXPECT_OK(zg_unpin(store_, &p));
  EXPECT_REFUSED(zg_pin_segment(store_, t, 0, ZG_NVME, &pin), "NVMe");
}

TEST_F(CApi, APinnedSegmentStaysAndADiscardedOneIsGone) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 12);
  write(t, 0);
  zg_pin pin;
  ASSERT_OK(zg_pin_segment(store_, t, 0, ZG_HOST, &pin));
  for (std::int32_t i = 1; i < 12; ++i) write(t, i);
  zg_tensor_statistics before = {}, after = {};
  before.size = after.size = sizeof before;
  EXPECT_OK(zg_drain(store_));
  EXPECT_OK(zg_get_tensor_statistics(store_, t, &before));
  zg_lease lease = acquire(t, 0, ZG_READ);
  EXPECT_OK(zg_release(store_, &lease));
  EXPECT_OK(zg_get_tensor_statistics(store_, t, &after));
  EXPECT_EQ(after.nvme_read_bytes, before.nvme_read_bytes);
  EXPECT_EQ(after.hits, before.hits + 1);
  EXPECT_GT(after.nvme_write_bytes, 0);
  EXPECT_OK(zg_unpin(store_, &pin));

  std::int32_t yes = -1;
  EXPECT_OK(zg_has_content(store_, t, 5, &yes));
  EXPECT_EQ(yes, 1);
  EXPECT_OK(zg_discard(store_, t, 5));
  EXPECT_OK(zg_has_content(store_, t, 5, &yes));
  EXPECT_EQ(yes, 0);
  EXPECT_OK(zg_prefetch(store_, t, 5, ZG_HOST));  // a hint: there is nothing to bring
  EXPECT_OK(zg_prefetch(store_, t, 1, ZG_HOST));
  EXPECT_OK(zg_sink(store_));
  EXPECT_OK(zg_drain(store_));
  zg_statistics all = {};
  all.size = sizeof all;
  EXPECT_OK(zg_get_statistics(store_, &all));
  EXPECT_EQ(all.host.segments, 0);
  EXPECT_EQ(all.nvme.segments, 11);
  EXPECT_DOUBLE_EQ(all.waited_seconds, all.waited_for_reads + all.waited_for_write_backs +
                                           all.waited_for_memory + all.waited_for_copies +
                                           all.waited_for_leases + all.waited_for_other);
}

TEST_F(CApi, StepsComeOneAfterTheOther) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 12);
  EXPECT_REFUSED(zg_step_end(store_), "no step has begun");
  for (int round = 0; round < 3; ++round) {
    ASSERT_OK(zg_step_begin(store_, "train"));
    for (std::int32_t i = 0; i < 12; ++i) write(t, i);
    ASSERT_OK(zg_step_end(store_));
  }
  EXPECT_OK(zg_step_begin(store_, nullptr));
  EXPECT_REFUSED(zg_step_begin(store_, nullptr), "has not ended");
  const zg_tensor_spec s = spec("s", 1);
  std::int32_t tensor = 0;
  EXPECT_OK(zg_tensor_add(store_, &s, &tensor));
  write(tensor, 0);
  EXPECT_OK(zg_step_end(store_));
}

TEST_F(CApi, TextsAreCutAsBySnprintf) {
  open(0, 4 * kPage);
  const std::int32_t t = add("a tensor", 2);
  std::size_t length = 0;
  ASSERT_OK(zg_explain(store_, t, nullptr, 0, &length));
  std::string whole(length + 1, '#');
  ASSERT_OK(zg_explain(store_, t, whole.data(), whole.size(), nullptr));
  EXPECT_EQ(whole[length], '\0');
  whole.pop_back();
  EXPECT_EQ(std::strlen(whole.c_str()), length);
  EXPECT_HAS(whole, "a tensor[1]");
  char part[8] = "#######";
  std::size_t again = 0;
  ASSERT_OK(zg_explain(store_, t, part, 5, &again));
  EXPECT_EQ(again, length);
  EXPECT_EQ(std::string(part), whole.substr(0, 4));
  EXPECT_EQ(part[5], '#');
  ASSERT_OK(zg_state(store_, part, 1, &again));
  EXPECT_EQ(part[0], '\0');
  EXPECT_GT(again, 10u);
}

TEST_F(CApi, AFailedTransferIsToldFromThenOnAndTheStoreStillCloses) {
  StoreConfig config{.host_bytes = 2 * kPage, .drives = {{.bytes = 1 << 20}}};
  config.aio.backend = io::Backend::kRam;
  config.aio.faults.fail_after = 2;
  auto made = std::make_unique<zg_store>();
  made->opened = open_store(config);
  store_ = made.release();
  const std::int32_t t = add("t", 8);
  zg_lease kept = acquire(t, 0, ZG_OVERWRITE), lease = {};
  int status = ZG_OK;
  for (std::int32_t i = 1; status == ZG_OK; i = i % 7 + 1) {
    status = zg_acquire(store_, {t, i, ZG_HOST, ZG_OVERWRITE}, &lease);
    EXPECT_EQ(lease.id != 0, status == ZG_OK);
    EXPECT_OK(zg_release(store_, &lease));
  }
  EXPECT_EQ(status, ZG_IO);
  EXPECT_TRUE(said("nvme0")) << last_error();
  EXPECT_EQ(zg_acquire(store_, {t, 0, ZG_HOST, ZG_READ}, &lease), ZG_IO);
  EXPECT_EQ(zg_step_begin(store_, nullptr), ZG_IO);
  EXPECT_EQ(zg_drain(store_), ZG_IO);
  std::size_t length = 0;
  EXPECT_OK(zg_state(store_, nullptr, 0, &length));
  EXPECT_OK(zg_release(store_, &kept));
}

// What needs the store alone says so, instead of waiting for somebody who waits for this very thread.
TEST_F(CApi, WhatNeedsTheStoreAloneDoesNotWaitForOthers) {
  open(0, 4 * kPage);
  const Deadline deadline(60, [&] { return store_->opened->store().state(); });
  const std::int32_t t = add("t", 1);
  zg_lease mine = acquire(t, 0, ZG_OVERWRITE);
  std::thread other([&] {
    zg_lease lease = acquire(t, 0, ZG_WRITE);
    EXPECT_OK(zg_release(store_, &lease));
  });
  while (store_->opened->store().waiting() == 0) std::this_thread::yield();
  const zg_tensor_spec s = spec("s", 1);
  std::int32_t tensor = 0;
  EXPECT_REFUSED(zg_tensor_add(store_, &s, &tensor), "another thread");
  EXPECT_REFUSED(zg_tensor_remove(store_, t), "another thread");
  EXPECT_REFUSED(zg_sink(store_), "another thread");
  EXPECT_REFUSED(zg_store_close(store_), "another thread");
  EXPECT_OK(zg_release(store_, &mine));
  other.join();
  EXPECT_OK(zg_tensor_add(store_, &s, &tensor));
}

TEST_F(CApi, ATraceIsSavedAndExpected) {
  const TempDir directory;
  const std::string path = directory / "c_api.trace.json";
  const auto step = [&](std::int32_t t) {
    EXPECT_OK(zg_step_begin(store_, nullptr));
    for (std::int32_t i = 0; i < 6; ++i) {
      zg_lease lease = acquire(t, i, ZG_READ);
      EXPECT_OK(zg_release(store_, &lease));
    }
    EXPECT_OK(zg_step_end(store_));
  };
  zg_statistics statistics = {};
  statistics.size = sizeof statistics;
  open(0, 4 * kPage, ZG_RECORD);
  EXPECT_EQ(zg_trace_save(store_, path.c_str()), ZG_USAGE);
  EXPECT_TRUE(said("nothing was recorded")) << last_error();
  std::int32_t t = add("t", 6);
  for (std::int32_t i = 0; i < 6; ++i) write(t, i);
  step(t);
  EXPECT_OK(zg_trace_save(store_, path.c_str()));
  EXPECT_OK(zg_store_close(store_));
  open(0, 4 * kPage);
  EXPECT_EQ(zg_trace_expect(store_, path.c_str()), ZG_USAGE);
  EXPECT_TRUE(said("has 1 tensors, the store has 0")) << last_error();
  t = add("t", 6);
  EXPECT_OK(zg_trace_expect(store_, path.c_str()));
  for (std::int32_t i = 0; i < 6; ++i) write(t, i);
  EXPECT_OK(zg_drain(store_));
  step(t);  // the first here, and foreseen
  EXPECT_OK(zg_get_statistics(store_, &statistics));
  EXPECT_GT(statistics.prefetches, 0);
  EXPECT_EQ(statistics.left_record, 0);
}

// Threads with a tensor each, in the room of a few segments, and all other calls in between.
TEST_F(CApi, ManyThreadsAtOnce) {
  constexpr int kThreads = 6, kRounds = 400;
  constexpr std::int32_t kSegments = 5;
  open(6 * kPage, 14 * kPage);
  const Deadline deadline(100, [&] { return store_->opened->store().state(); });
  std::int32_t tensors[kThreads];
  for (int i = 0; i < kThreads; ++i) tensors[i] = add(fmt::format("t{}", i).c_str(), kSegments);
  const std::uint64_t seed = test_seed(20);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::atomic<int> wrong{0};
  const auto work = [&](int number) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(number));
    const std::int32_t t = tensors[number];
    std::uint64_t versions[kSegments] = {};
    for (std::int32_t i = 0; i < kSegments; ++i) {
      zg_lease lease = acquire(t, i, ZG_OVERWRITE);
      fill(lease.data, lease.bytes, i, 0);
      EXPECT_OK(zg_release(store_, &lease));
    }
    for (std::uint64_t round = 1; round <= kRounds && !testing::Test::HasFailure(); ++round) {
      const auto a = static_cast<std::int32_t>(random() % kSegments);
      const auto b = static_cast<std::int32_t>(
          (a + 1 + static_cast<std::int32_t>(random() % (kSegments - 1))) % kSegments);
      const int tier = random() % 2 == 0 ? ZG_HOST : ZG_DEVICE_MEMORY;
      const zg_access both[] = {{t, a, tier, ZG_WRITE}, {t, b, ZG_HOST, ZG_READ}};
      zg_lease leases[2];
      EXPECT_OK(zg_acquire_all(store_, both, 2, leases));
      if (!holds(leases[0].data, leases[0].bytes, a, versions[a])) ++wrong;
      if (!holds(leases[1].data, leases[1].bytes, b, versions[b])) ++wrong;
      fill(leases[0].data, leases[0].bytes, a, round);
      versions[a] = round;
      for (zg_lease& l : leases) EXPECT_OK(zg_release(store_, &l));
      switch (random() % 6) {
        case 5:
          EXPECT_OK(zg_prefetch(store_, t, b, tier));
          break;
        case 0: {
          zg_statistics statistics = {};
          statistics.size = sizeof statistics;
          EXPECT_OK(zg_get_statistics(store_, &statistics));
          break;
        }
        case 1: {
          char text[256];
          EXPECT_OK(zg_explain(store_, tensors[random() % kThreads], text, sizeof text, nullptr));
          break;
        }
        case 2: {
          zg_lease lease;
          EXPECT_EQ(zg_acquire(store_, {t, kSegments, ZG_HOST, ZG_READ}, &lease), ZG_USAGE);
          EXPECT_TRUE(said(fmt::format("\"t{}\"", number))) << last_error();  // not another thread's
          break;
        }
        default:
          break;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store_->leases.size(), 0u);
}

TEST_F(CApi, AHandleNamesOneValueAlone) {
  c_api::HandleTable<std::unique_ptr<int>> table;
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 100; ++i) ids.push_back(table.put(std::make_unique<int>(i)));
  EXPECT_EQ(table.size(), 100u);
  for (const std::uint64_t id : ids) EXPECT_NE(id, 0u);
  for (int i = 0; i < 100; ++i) {
    auto value = table.take(ids[static_cast<std::size_t>(i)]);
    ASSERT_TRUE(value.has_value());
    EXPECT_EQ(**value, i);
    EXPECT_FALSE(table.take(ids[static_cast<std::size_t>(i)]).has_value());
    (void)table.put(std::make_unique<int>(-1));  // in the same place
    EXPECT_FALSE(table.take(ids[static_cast<std::size_t>(i)]).has_value());
  }
  for (const std::uint64_t id : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{1} << 32 | 0xfffffff0u})
    EXPECT_FALSE(table.take(id).has_value());
  EXPECT_EQ(table.size(), 100u);
}

}  // namespace
}  // namespace zg::test
