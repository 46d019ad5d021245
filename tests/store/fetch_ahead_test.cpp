// How far ahead of its leases a step that is known is fetched.
#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kBytes = 64 * 1024;
constexpr int kSegments = 32, kDevice = 4, kHost = 16;

std::unique_ptr<Rig> make_rig() {
  TensorTable table(1);
  for (int i = 0; i < kSegments; ++i) table.add({.name = fmt::format("t{}", i), .count = kBytes / 4});
  auto io = std::make_unique<MemoryIo>(1, table.drive_bytes(), MemoryIo::Options{});
  auto rig = std::make_unique<Rig>(
      std::move(table), Budgets{.device = kDevice * kBytes, .host = kHost * kBytes}, std::move(io));
  for (SegmentId id = 0; id < kSegments; ++id) {
    const Lease lease = rig->store->acquire(id, Tier::kHost, Access::kOverwrite);
    fill(lease.data(), lease.bytes(), id, 0);
  }
  rig->store->drain();
  return rig;
}

void read_all(Rig& rig) {
  for (SegmentId id = 0; id < kSegments; ++id) {
    const Lease lease = rig.store->acquire(id, Tier::kDevice, Access::kRead);
    ASSERT_TRUE(rig.has(lease, Tier::kDevice, id, 0)) << id;
  }
}

TEST(FetchAhead, WhatTheDeviceHasNoRoomForComesToTheHost) {
  const auto rig = make_rig();
  TensorStore& store = *rig->store;
  Deadline deadline(60, [&] { return store.state(); });
  store.step_begin();
  read_all(*rig);
  const LinkBytes before = store.traffic();
  store.step_end();  // from now on it is known that the same will come again
  store.drain();
  const LinkBytes ahead = store.traffic() - before;
  // Half of each budget.
  EXPECT_EQ(ahead[kToDevice], kDevice / 2 * kBytes);
  EXPECT_EQ(ahead.nvme_read(), (kDevice / 2 + kHost / 2) * kBytes);
  rig->within_budgets();
}

TEST(FetchAhead, NothingIsReadTwice) {
  const auto rig = make_rig();
  TensorStore& store = *rig->store;
  Deadline deadline(60, [&] { return store.state(); });
  for (int step = 0; step < 6; ++step) {
    const LinkBytes before = store.traffic();
    store.step_begin();
    read_all(*rig);
    store.step_end();
    store.drain();
    // What was fetched for the next step is counted with this one.
    const std::int64_t read = (store.traffic() - before).nvme_read();
    EXPECT_TRUE(step == 0 || read <= kSegments * kBytes) << "step " << step << ": " << read;
  }
  EXPECT_EQ(store.statistics().left_record, 0);
  EXPECT_EQ(store.statistics().prefetched_in_vain, 0);
  rig->within_budgets();
}

}  // namespace
}  // namespace zg::test
