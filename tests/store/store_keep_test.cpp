// What a store keeps by value, with a policy that does not look ahead: it pays, and gives way.
#include <gtest/gtest.h>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr int kSegments = 12, kRoom = 6;

struct KeepRig {
  TensorTable table = equal_table(1, kSegments);
  std::unique_ptr<Device> device = make_host_device(0, nullptr);
  std::unique_ptr<Arena> host = make_host_arena("host memory", kRoom* kPage);
  std::unique_ptr<io::Engine> io = make_nvme(Nvme::kMemory, table, "");
  TensorStore store;

  explicit KeepRig(bool keep)
      : store({.table = &table,
               .device = device.get(),
               .host = host.get(),
               .io = io.get(),
               .budgets = {0, kRoom * kPage},
               .policy = lru_policy(),
               .read_ahead = kPage,
               .keep_by_value = keep}) {
    for (SegmentId id = 0; id < kSegments; ++id) {
      const Lease lease = store.acquire(id, Tier::kHost, Access::kOverwrite);
      fill(lease.data(), lease.bytes(), id, 1);
    }
  }
  // Runs a step; returns the bytes that it read from NVMe.
  std::int64_t step() {
    store.drain();
    const LinkBytes before = store.traffic();
    store.step_begin();
    for (SegmentId id = 0; id < kSegments; ++id) {
      const Lease lease = store.acquire(id, Tier::kHost, Access::kRead);
      EXPECT_TRUE(holds(lease.data(), lease.bytes(), id, 1));
    }
    store.step_end();
    store.drain();
    return (store.traffic() - before).nvme_read();
  }
};

TEST(StoreKeep, SavesWhatLruDoesNot) {
  KeepRig without(false), with(true);
  for (int i = 0; i < 3; ++i) (void)without.step(), (void)with.step();
  EXPECT_EQ(without.step(), kSegments * kPage) << "a cyclic scan";
  EXPECT_LE(with.step(), (kSegments - (kRoom - 2)) * kPage) << "room for two is left to the others";
  EXPECT_TRUE(with.store.report(0)[0].pinned[1] || with.store.report(kSegments - 1)[0].pinned[1]);
}

TEST(StoreKeep, GivesWayToWhatHasNoRoom) {
  KeepRig rig(true);
  for (int i = 0; i < 3; ++i) (void)rig.step();
  std::vector<AccessStep> all;
  for (SegmentId id = 0; id < kRoom; ++id)
    all.push_back({kSegments - 1 - id, Tier::kHost, Access::kRead, false});
  std::vector<Lease> leases;
  rig.store.acquire(all, leases);
  EXPECT_EQ(leases.size(), static_cast<std::size_t>(kRoom));
}

TEST(StoreKeep, NothingWhileAProgramRuns) {
  KeepRig rig(true);
  for (int i = 0; i < 3; ++i) (void)rig.step();
  // All the room there is, twice, with nothing in common.
  Program program("all");
  for (const SegmentId first : {0, kRoom}) {
    std::vector<AccessStep> op;
    for (SegmentId id = first; id < first + kRoom; ++id)
      op.push_back({id, Tier::kHost, Access::kRead, false});
    program.add_op(op);
  }
  program.finish(kSegments);
  rig.store.run(&program, nullptr);
  std::vector<Lease> leases;
  for (int op = 0; op < 2; ++op) {
    rig.store.acquire_op(nullptr, leases);
    leases.clear();
  }
  rig.store.run(nullptr, nullptr);
  rig.store.drain();
}

// A user's policy that chooses what may not be evicted ends the process: asking it again would never end.
class Stubborn final : public Policy {
 public:
  void insert(SegmentId id, const PolicyView&) override {
    if (first_ < 0) first_ = id;
  }
  void remove(SegmentId) override {}
  void update(SegmentId, const PolicyView&) override {}
  void future_changed(const PolicyView&) override {}
  SegmentId victim(const PolicyView&) override { return first_; }
  bool uses_future() const override { return false; }
  std::unique_ptr<Policy> clone() const override { return std::make_unique<Stubborn>(*this); }

 private:
  SegmentId first_ = -1;
};

TEST(StoreKeepDeathTest, APolicyThatGivesAwayWhatMayNotLeave) {
  const TensorTable table = equal_table(1, 4);
  EXPECT_DEATH(
      {
        Residency r(table, {0, 2 * kPage}, [] { return std::make_unique<Stubborn>(); });
        std::vector<Action> out;
        r.assume_content(0, Tier::kHost);
        r.pin(0, Tier::kHost);
        for (SegmentId id = 1; id < 4; ++id)
          (void)r.decide_free({id, Tier::kHost, Access::kOverwrite, false}, out);
      },
      "the policy gives away t0, which may not leave");
}

}  // namespace
}  // namespace zg::test
