// For what an acquire waits: each cause is made by holding up just that, and counts at least for as long as
// it was seen to be held up. The parts are the whole of the wait.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <numeric>
#include <thread>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

// Copies wait for the gate of their direction; open gates are events that are done.
class GatedDevice final : public Device {
 public:
  explicit GatedDevice(std::unique_ptr<Device> inner) : inner_(std::move(inner)) {}
  std::string describe() const override { return inner_->describe(); }
  bool is_host() const override { return inner_->is_host(); }
  Arena& arena() override { return inner_->arena(); }
  Ops& ops() override { return inner_->ops(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override { return inner_->make_stream(name); }
  Arena::Hooks host_hooks() override { return inner_->host_hooks(); }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    stream.wait(to_device);
    inner_->copy_to_device(stream, device, host, bytes);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    stream.wait(to_host);
    inner_->copy_to_host(stream, host, device, bytes);
  }
  Event to_device, to_host;

 private:
  std::unique_ptr<Device> inner_;
};

class Observer final : public WaitObserver {
 public:
  void awaits(WaitCause cause, const Stream* user) override {
    last_user = user;
    seen[static_cast<std::size_t>(cause)] = true;
  }
  void awaits_nothing() override { ++ends; }
  bool saw(WaitCause cause) const { return seen[static_cast<std::size_t>(cause)]; }

  std::atomic<const Stream*> last_user{nullptr};
  std::array<bool, kWaitCauses> seen{};
  int ends = 0;
};

double part(const StoreStatistics& s, WaitCause cause) {
  return s.waited_for[static_cast<std::size_t>(cause)];
}

AccessStep access_of(SegmentId id, Tier tier, Access access, bool last = false) {
  return {id, tier, access, last};
}

// A store of equal segments of one page each, with room for a given number of them in each tier.
class WaitCauseTest : public testing::Test {
 protected:
  static constexpr int kSegments = 3;

  void open(int device_room, int host_room, int depth = 8) {
    const std::int64_t granule = test_granule();
    auto device = std::make_unique<GatedDevice>(make_test_device(std::max(1, device_room) * granule));
    device_ = device.get();
    const TensorTable table = equal_table(1, kSegments, kPage, Tier::kNvme, granule);
    auto make_drives = [&](Device&) {
      auto drives = std::make_unique<MemoryIo>(1, table.drive_bytes(), MemoryIo::Options{});
      drives_ = drives.get();
      return drives;
    };
    rig_ = std::make_unique<Rig>(table, Budgets{device_room * granule, host_room * kPage}, std::move(device),
                                 make_drives, depth);
    deadline_ = std::make_unique<Deadline>(60, [this] { return store().state(); });
  }
  TensorStore& store() { return *rig_->store; }

  // Gives the segments content, which lies on the drives.
  void give(SegmentId id) {
    rig_->write(store().acquire(id, Tier::kHost, Access::kOverwrite), Tier::kHost, id, 1);
    store().demote_all();
    store().drain();
  }
  void begin(const std::vector<std::vector<AccessStep>>& ops) {
    for (const auto& op : ops) program_.add_op(op);
    program_.finish(kSegments);
    store().observe_waits(&observer_);
    waits_before_ = store().statistics().waits;
    store().run(&program_, nullptr);
  }
  void next(Stream* consumer = nullptr) { store().acquire_op(consumer, leases_); }

  bool waits_for(WaitCause cause) {
    return store().state().find(fmt::format("the program waits for {}", name_of(cause))) != std::string::npos;
  }
  // Lets the drives complete one more transfer.
  void let_go(io::Op op) {
    const Link link = op == io::Op::kRead ? kNvmeRead : kNvmeWrite;
    const std::int64_t before = store().statistics().links[link].transfers;
    drives_->let_go(op);
    while (store().statistics().links[link].transfers == before) std::this_thread::yield();
  }
  // Returns after the program has waited for the cause for at least so long.
  double wait_seen(WaitCause cause) {
    const auto give_up = Clock::now() + std::chrono::seconds(20);
    while (!waits_for(cause)) {
      if (Clock::now() > give_up) {
        ADD_FAILURE() << "it never waits for " << name_of(cause) << ":\n" << store().state();
        return 0;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto since = Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return seconds_between(since, Clock::now());
  }
  // Waits in the next operation until `helper` has made it go on.
  void next_while(const std::function<void()>& helper, Stream* consumer = nullptr) {
    NamedThread thread("helper", helper);
    next(consumer);
  }
  void expect_parts_are_all() {
    const StoreStatistics s = store().statistics();
    EXPECT_EQ(std::accumulate(s.waited_for.begin(), s.waited_for.end(), 0.0), s.waited_seconds);
    EXPECT_EQ(s.waited_seconds, store().waited_seconds());
    double of_tensors = 0;
    for (TensorId id = 0; id < kSegments; ++id) of_tensors += store().statistics(id).waited_seconds;
    EXPECT_NEAR(s.waited_seconds, of_tensors, 1e-9 * (1 + s.waited_seconds));
    for (const double seconds : s.waited_for) EXPECT_GE(seconds, 0);
  }
  void finish() {
    leases_.clear();
    store().run(nullptr, nullptr);
    store().observe_waits(nullptr);
  }

  Program program_{"p"};
  Observer observer_;
  std::int64_t waits_before_ = 0;  // the program
  GatedDevice* device_ = nullptr;
  MemoryIo* drives_ = nullptr;
  std::unique_ptr<Rig> rig_;
  std::vector<Lease> leases_;
  std::unique_ptr<Deadline> deadline_;  // last
};

TEST_F(WaitCauseTest, Reads) {
  open(1, 1);
  give(0);
  drives_->hold(io::Op::kRead);
  begin({{access_of(0, Tier::kDevice, Access::kRead)}});
  double held = 0;
  next_while([&] {
    held = wait_seen(WaitCause::kReads);
    drives_->let_go(io::Op::kRead);
  });
  finish();
  const StoreStatistics s = store().statistics();
  EXPECT_GE(part(s, WaitCause::kReads), held);
  EXPECT_EQ(part(s, WaitCause::kWriteBacks), 0);
  EXPECT_EQ(part(s, WaitCause::kLeases), 0);
  EXPECT_EQ(observer_.ends, s.waits - waits_before_);
  expect_parts_are_all();
}

TEST_F(WaitCauseTest, WriteBacksThatMustMakeRoom) {
  open(0, 1);
  drives_->hold(io::Op::kWrite);
  begin({{access_of(0, Tier::kHost, Access::kOverwrite)}, {access_of(1, Tier::kHost, Access::kOverwrite)}});
  next();
  leases_.clear();
  double held = 0;
  next_while([&] {
    held = wait_seen(WaitCause::kWriteBacks);
    drives_->let_go(io::Op::kWrite);
  });
  finish();
  const StoreStatistics s = store().statistics();
  EXPECT_GE(part(s, WaitCause::kWriteBacks), held);
  EXPECT_EQ(part(s, WaitCause::kReads), 0);
  expect_parts_are_all();
}

// Where a write-back must make the room for a read, the drive must not put it behind all reads.
TEST_F(WaitCauseTest, AWriteBackIsAsUrgentAsTheReadsThatNeedItsMemory) {
  open(0, 1);
  give(1);
  EXPECT_EQ(drives_->write_priority(), io::Priority::kWriteBack);  // nothing needed the memory
  begin({{access_of(0, Tier::kHost, Access::kOverwrite)}, {access_of(1, Tier::kHost, Access::kRead)}});
  for (int i = 0; i < 2; ++i) {
    next();
    leases_.clear();
  }
  EXPECT_EQ(drives_->write_priority(), io::Priority::kPrefetch);
  finish();
}

// Memory of the device waits for a copy to the host, whose memory waits for the drives.
TEST_F(WaitCauseTest, WriteBacksTwoTiersBelow) {
  open(1, 1);
  drives_->hold(io::Op::kWrite);
  begin({{access_of(0, Tier::kDevice, Access::kOverwrite)},
         {access_of(1, Tier::kDevice, Access::kOverwrite)},
         {access_of(2, Tier::kDevice, Access::kOverwrite)}});
  for (int i = 0; i < 2; ++i) {
    next();
    leases_.clear();
  }
  double held = 0;
  next_while([&] {
    held = wait_seen(WaitCause::kWriteBacks);
    drives_->let_go(io::Op::kWrite);
  });
  finish();
  EXPECT_GE(part(store().statistics(), WaitCause::kWriteBacks), held);
  expect_parts_are_all();
}

TEST_F(WaitCauseTest, MemoryThatALeaseStillHas) {
  open(1, 1);
  begin({{access_of(0, Tier::kDevice, Access::kOverwrite, true)},
         {access_of(1, Tier::kDevice, Access::kOverwrite)}});
  WorkStream stream(*rig_->device);
  const Event gate = Event::pending();
  stream.wait(gate);
  next(stream.get());
  stream.release(leases_[0]);
  double held = 0;
  next_while([&] {
    held = wait_seen(WaitCause::kMemory);
    gate.set();
  });
  finish();
  const StoreStatistics s = store().statistics();
  EXPECT_GE(part(s, WaitCause::kMemory), held);
  EXPECT_EQ(part(s, WaitCause::kWriteBacks), 0);
  EXPECT_EQ(part(s, WaitCause::kLeases), 0);
  expect_parts_are_all();
}

TEST_F(WaitCauseTest, TheObserverIsToldWhoseLeaseHoldsTheMemory) {
  open(1, 1);
  begin({{access_of(0, Tier::kDevice, Access::kOverwrite, true)},
         {access_of(1, Tier::kDevice, Access::kOverwrite)}});
  WorkStream stream(*rig_->device);
  const Event gate = Event::pending();
  stream.wait(gate);
  next(stream.get());
  stream.release(leases_[0]);
  const Stream* user = nullptr;
  next_while([&] {
    wait_seen(WaitCause::kMemory);
    user = observer_.last_user;  // nobody tells it anything while the gate is shut
    gate.set();
  });
  finish();
  EXPECT_EQ(user, stream.get());
  EXPECT_TRUE(observer_.saw(WaitCause::kMemory));
}

TEST_F(WaitCauseTest, MemoryThatACopyToTheHostMustGiveBack) {
  open(1, 2);
  device_->to_host = Event::pending();
  begin(
      {{access_of(0, Tier::kDevice, Access::kOverwrite)}, {access_of(1, Tier::kDevice, Access::kOverwrite)}});
  next();
  leases_.clear();
  double held = 0;
  next_while([&] {
    held = wait_seen(WaitCause::kMemory);
    device_->to_host.set();
  });
  finish();
  const StoreStatistics s = store().statistics();
  EXPECT_GE(part(s, WaitCause::kMemory), held);
  EXPECT_EQ(part(s, WaitCause::kCopies), 0);
  expect_parts_are_all();
}

TEST_F(WaitCauseTest, Copies) {
  open(1, 1);
  give(0);
  device_->to_device = Event::pending();
  begin({{access_of(0, Tier::kDevice, Access::kRead)}});
  double held = 0;
  next_while([&] {
    held = wait_seen(WaitCause::kCopies);
    device_->to_device.set();
  });
  finish();
  EXPECT_GE(part(store().statistics(), WaitCause::kCopies), held);
  expect_parts_are_all();
}

TEST_F(WaitCauseTest, LeasesOfTheSegment) {
  open(1, 1);
  begin({{access_of(0, Tier::kHost, Access::kOverwrite)}, {access_of(0, Tier::kHost, Access::kRead)}});
  WorkStream stream(*rig_->device);
  const Event gate = Event::pending();
  stream.wait(gate);
  next(stream.get());
  stream.release(leases_[0]);
  double held = 0;
  const Stream* user = nullptr;
  next_while([&] {
    held = wait_seen(WaitCause::kLeases);
    user = observer_.last_user;
    gate.set();
  });
  finish();
  EXPECT_GE(part(store().statistics(), WaitCause::kLeases), held);
  EXPECT_EQ(user, stream.get());
  expect_parts_are_all();
}

// What is to be evicted waits for the stream that uses it, and is in no link's line until then.
TEST_F(WaitCauseTest, ADrainWaitsForMovesBehindAStreamsUse) {
  open(1, 2);
  begin(
      {{access_of(0, Tier::kDevice, Access::kOverwrite)}, {access_of(1, Tier::kDevice, Access::kOverwrite)}});
  WorkStream stream(*rig_->device);
  const Event gate = Event::pending();
  stream.wait(gate);
  next(stream.get());
  stream.release(leases_[0]);
  {
    NamedThread helper("helper", [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_EQ(store().traffic()[kToHost], 0);
      gate.set();
    });
    store().drain();
    EXPECT_EQ(store().traffic()[kToHost], kPage);
  }
  next();
  finish();
}

// One wait, three causes after one another. The waiting thread sleeps all the while: who has done what it
// waited for looks what comes next.
TEST_F(WaitCauseTest, ChangesWithinOneWait) {
  open(1, 1);
  give(1);
  drives_->hold(io::Op::kWrite);
  drives_->hold(io::Op::kRead);
  device_->to_device = Event::pending();
  begin({{access_of(0, Tier::kHost, Access::kOverwrite)}, {access_of(1, Tier::kDevice, Access::kRead)}});
  next();
  leases_.clear();
  double written = 0, read = 0, copied = 0;
  next_while([&] {
    written = wait_seen(WaitCause::kWriteBacks);
    let_go(io::Op::kWrite);
    EXPECT_TRUE(waits_for(WaitCause::kReads)) << store().state();
    read = wait_seen(WaitCause::kReads);
    let_go(io::Op::kRead);
    EXPECT_TRUE(waits_for(WaitCause::kCopies)) << store().state();
    copied = wait_seen(WaitCause::kCopies);
    device_->to_device.set();
  });
  finish();
  const StoreStatistics s = store().statistics();
  EXPECT_EQ(s.waits, waits_before_ + 1);
  EXPECT_GE(part(s, WaitCause::kWriteBacks), written);
  EXPECT_GE(part(s, WaitCause::kReads), read);
  EXPECT_GE(part(s, WaitCause::kCopies), copied);
  expect_parts_are_all();
}

TEST_F(WaitCauseTest, WithoutAProgram) {
  open(1, 1);
  give(0);
  drives_->hold(io::Op::kRead);
  const auto waiting = [&] {
    while (store().waiting() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)store().statistics();  // the wait has begun when its mutex is free
    const auto since = Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return seconds_between(since, Clock::now());
  };
  double read = 0, leased = 0;
  {
    NamedThread helper("helper", [&] {
      read = waiting();
      drives_->let_go(io::Op::kRead);
    });
    (void)store().acquire(0, Tier::kHost, Access::kRead);
  }
  Lease lease = store().acquire(0, Tier::kHost, Access::kWrite);
  {
    NamedThread other("other", [&] { (void)store().acquire(0, Tier::kHost, Access::kRead); });
    leased = waiting();
    lease.release();
  }
  const StoreStatistics s = store().statistics();
  EXPECT_GE(part(s, WaitCause::kReads), read);
  EXPECT_GE(part(s, WaitCause::kLeases), leased);
  EXPECT_EQ(part(s, WaitCause::kWriteBacks), 0);
  expect_parts_are_all();
}

// No part of a wait is lost, and none is counted twice, whatever moves.
TEST_F(WaitCauseTest, ThePartsOfManyWaitsAreTheirSum) {
  open(1, 2, 2);
  for (SegmentId id = 0; id < kSegments; ++id) give(id);
  std::vector<std::vector<AccessStep>> ops;
  for (int i = 0; i < 60; ++i)
    ops.push_back({access_of(i * 7 % kSegments, i % 2 == 0 ? Tier::kDevice : Tier::kHost,
                             i % 3 == 0 ? Access::kWrite : Access::kRead)});
  begin(ops);
  for (int i = 0; i < 60; ++i) next();
  finish();
  EXPECT_EQ(observer_.ends, store().statistics().waits - waits_before_);
  expect_parts_are_all();
}

}  // namespace
}  // namespace zg::test
