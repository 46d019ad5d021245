// The two hops of a large segment run at once.
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "store/programs.hpp"
#include "store/rig.hpp"
#include "support/memory_io.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kBytes = 18 * kMiB + 8000;  // five pieces, the last one odd
constexpr int kPieces = 5;

// Counts the copies, and holds those to the host after the first `hold_after` until `held` is set.
class CountingDevice final : public Device {
 public:
  explicit CountingDevice(std::int64_t budget) : inner_(make_test_device(budget)) {}
  std::string describe() const override { return inner_->describe(); }
  bool is_host() const override { return inner_->is_host(); }
  Arena::Hooks host_hooks() override { return inner_->host_hooks(); }
  Arena& arena() override { return inner_->arena(); }
  Ops& ops() override { return inner_->ops(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override { return inner_->make_stream(name); }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    inner_->copy_to_device(stream, device, host, bytes);
    ++to_device;
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    if (++to_host == hold_after + 1) stream.wait(held);
    inner_->copy_to_host(stream, host, device, bytes);
  }

  Device* inner() { return inner_.get(); }  // its copies are not counted

  std::atomic<int> to_device{0}, to_host{0};
  int hold_after = 1000000;
  Event held = Event::pending();

 private:
  std::unique_ptr<Device> inner_;
};

// Passes transfers on; holds reads after the first `pass` ones until let_go().
class HoldingIo final : public io::Engine {
 public:
  explicit HoldingIo(std::int64_t bytes) : inner_(1, bytes, MemoryIo::Options{}) {}
  io::Ticket submit(const io::Transfer& t) override {
    {
      std::lock_guard lock(mutex_);
      (t.op == io::Op::kRead ? reads : writes)++;
      if (t.op == io::Op::kRead && reads > pass) {
        held_.push_back(t);
        return {};
      }
    }
    return inner_.submit(t);
  }
  void let_go() {
    std::vector<io::Transfer> all;
    {
      std::lock_guard lock(mutex_);
      pass = 1000000;
      all.swap(held_);
    }
    for (const io::Transfer& t : all) (void)inner_.submit(t);
  }
  void promote(io::Ticket, io::Priority) override {}
  bool poll(io::Ticket, io::Result&) override { return false; }
  io::Result wait(io::Ticket) override { return {}; }
  void register_memory(void* data, std::int64_t bytes) override { inner_.register_memory(data, bytes); }
  void unregister_memory(void* data) override { inner_.unregister_memory(data); }
  int drive_count() const override { return 1; }
  std::int64_t drive_bytes(int drive) const override { return inner_.drive_bytes(drive); }
  io::LinkCounters counters(int) const override { return {}; }
  io::DriveReport report(int drive) const override { return inner_.report(drive); }
  io::Backend backend() const override { return io::Backend::kRam; }
  std::string describe() const override { return "holding"; }
  std::string state() const override { return "holding"; }

  std::atomic<int> reads{0}, writes{0};
  int pass = 1000000;

 private:
  std::mutex mutex_;
  std::vector<io::Transfer> held_;
  MemoryIo inner_;
};

template <class Condition>
bool comes_true(Condition&& condition) {
  for (int i = 0; i < 5000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return condition();
}

struct PiecesRig {
  TensorTable table;
  CountingDevice device;
  std::unique_ptr<Arena> host;
  HoldingIo io;
  TensorStore store;

  explicit PiecesRig(TensorTable t)
      : table(std::move(t)),
        device(table.segment(0).device_charge),
        host(make_host_arena("host memory", table.segment(0).charge)),
        io(table.drive_bytes()),
        store({.table = &table,
               .device = &device,
               .host = host.get(),
               .io = &io,
               .budgets = {table.segment(0).device_charge, table.segment(0).charge},
               .warn_after_seconds = 30}) {}
  // The lease is one at the device.
  void expect_written(const Lease& lease) {
    work_on(*device.inner(), {Tier::kDevice, Access::kRead, lease},
            [&](const void* data) { EXPECT_TRUE(holds(data, lease.bytes(), 0, 1)); });
  }
};

TEST(StorePieces, GoOnToTheDeviceWhileOthersAreStillRead) {
  PiecesRig rig(equal_table(1, 1, kBytes, Tier::kNvme, test_granule()));
  {
    const Lease lease = rig.store.acquire(0, Tier::kHost, Access::kOverwrite);
    fill(lease.data(), lease.bytes(), 0, 1);
  }
  rig.store.demote_all();
  rig.store.drain();
  rig.io.pass = kPieces - 1;
  Lease lease;
  NamedThread reader("reader", [&] { lease = rig.store.acquire(0, Tier::kDevice, Access::kRead); });
  EXPECT_TRUE(comes_true([&] { return rig.device.to_device == kPieces - 1; })) << rig.device.to_device;
  EXPECT_EQ(rig.store.waiting(), 1);
  rig.io.let_go();
  reader.join();
  EXPECT_EQ(rig.device.to_device, kPieces);
  rig.expect_written(lease);
  EXPECT_EQ(rig.store.traffic()[kToDevice], kBytes);
}

TEST(StorePieces, GoOnToNvmeWhileOthersAreStillCopied) {
  PiecesRig rig(equal_table(1, 1, kBytes, Tier::kNvme, test_granule()));
  {
    const Lease lease = rig.store.acquire(0, Tier::kDevice, Access::kOverwrite);
    work_on(*rig.device.inner(), {Tier::kDevice, Access::kOverwrite, lease},
            [&](void* data) { fill(data, lease.bytes(), 0, 1); });
  }
  rig.device.hold_after = 2;
  rig.store.demote_all();
  EXPECT_TRUE(comes_true([&] { return rig.io.writes == 2; })) << rig.io.writes;
  EXPECT_EQ(rig.device.to_host, kPieces);
  rig.device.held.set();
  rig.store.drain();
  EXPECT_EQ(rig.io.writes, kPieces);
  rig.expect_written(rig.store.acquire(0, Tier::kDevice, Access::kRead));
}

// Large segments in both directions, in many orders. (Two at the host: what leaves the device for what comes
// from there must pass it.)
TEST(StorePieces, KeepTheirContents) {
  for (const Nvme kind : {Nvme::kMemory, Nvme::kUring}) {
    const TensorTable table = equal_table(2, 4, 9 * kMiB + 8000);
    Rig rig(table, {table.segment(0).charge, 2 * table.segment(0).charge}, kind);
    Random random(7);
    std::vector<std::uint64_t> version(4, 0);
    for (int i = 0; i < 30; ++i) {
      const SegmentId id = below(random, 4);
      const auto at = static_cast<std::size_t>(id);
      const Tier tier = below(random, 2) == 0 ? Tier::kDevice : Tier::kHost;
      const Access access = version[at] == 0        ? Access::kOverwrite
                            : below(random, 2) == 0 ? Access::kRead
                                                    : Access::kWrite;
      const Lease lease = rig.store->acquire(id, tier, access);
      if (access != Access::kOverwrite) {
        ASSERT_TRUE(rig.has(lease, tier, id, version[at])) << i;
      }
      if (access != Access::kRead) rig.write(lease, tier, id, ++version[at]);
    }
    rig.within_budgets();
  }
}

TEST(StorePieces, AFailureOnTheWayIsToldAndNothingHangs) {
  for (int number = 0; number < 6; ++number) {
    const TensorTable table = equal_table(1, 2, 9 * kMiB);  // three pieces each
    MemoryIo::Faults faults;
    faults.fail_read = number;
    Rig rig(table, {table.segment(0).charge, table.segment(0).charge},
            std::make_unique<MemoryIo>(1, table.drive_bytes(), MemoryIo::Options{.faults = faults}));
    EXPECT_THROW(
        {
          for (SegmentId id = 0; id < 2; ++id)
            rig.store->acquire(id, Tier::kDevice, Access::kOverwrite).release();
          for (int i = 0; i < 4; ++i) rig.store->acquire(i % 2, Tier::kDevice, Access::kRead).release();
        },
        Error);
  }
}

}  // namespace
}  // namespace zg::test
