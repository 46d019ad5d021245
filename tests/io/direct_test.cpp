// Transfers of a device's memory: a DirectStorage of files that tests read along, over host memory that
// passes for a device's.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "support.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io::test {
namespace {

// What the storage was asked for, and how it is to fail.
class FakeDirect final : public DirectStorage {
 public:
  struct Counts {
    std::atomic<std::int64_t> reads{0}, writes{0}, bytes{0}, checksums{0};
    std::atomic<int> files{0}, strangers{0};
  };
  std::shared_ptr<Counts> counts = std::make_shared<Counts>();
  std::atomic<bool> refuse{false}, lost{false}, held{false};
  std::atomic<int> error{0};          // of the next transfer
  std::atomic<int> enters{1 << 30};   // threads that may still enter
  std::atomic<std::int64_t> most{0};  // moved at once; 0: all

  class FakeFile final : public File {
   public:
    FakeFile(FakeDirect& owner, int fd) : owner_(owner), fd_(fd) { ++owner_.counts->files; }
    ~FakeFile() override { --owner_.counts->files; }
    std::int64_t read(void* data, std::int64_t bytes, std::int64_t offset) override {
      ++owner_.counts->reads;
      return move(bytes, [&](std::size_t n) { return pread(fd_, data, n, offset); });
    }
    std::int64_t write(const void* data, std::int64_t bytes, std::int64_t offset) override {
      ++owner_.counts->writes;
      return move(bytes, [&](std::size_t n) { return pwrite(fd_, data, n, offset); });
    }

   private:
    template <class Move>
    std::int64_t move(std::int64_t bytes, const Move& move) {
      owner_.counts->strangers += entered_ != &owner_;
      if (const int error = owner_.error.exchange(0)) return -error;
      if (owner_.most > 0) bytes = std::min(bytes, owner_.most.load());
      const ssize_t n = move(static_cast<std::size_t>(bytes));
      if (n < 0) return -errno;
      owner_.counts->bytes += n;
      return n;
    }
    FakeDirect& owner_;
    const int fd_;
  };

  std::unique_ptr<File> open(int fd) override {
    if (refuse) throw Error(Errc::kIo, "fake storage", "this file system is not supported");
    return std::make_unique<FakeFile>(*this, fd);
  }
  void enter_thread() override {
    if (--enters < 0) throw Error(Errc::kDevice, "fake storage", "the device is lost");
    entered_ = this;
  }
  std::optional<std::uint64_t> checksum(const void* data, std::int64_t bytes) override {
    ++counts->checksums;
    counts->strangers += entered_ != this;
    while (held) std::this_thread::yield();
    if (lost) return std::nullopt;
    return io::checksum(data, bytes);
  }
  std::string describe() const override { return "fake storage"; }

 private:
  static thread_local const void* entered_;
};
thread_local const void* FakeDirect::entered_ = nullptr;

class DeviceMemory : public testing::Test {
 protected:
  std::unique_ptr<Engine> open(int drives = 1, int queues = 1, FaultModel faults = {}) {
    EngineOptions o;
    o.backend = Backend::kThreads;
    o.block_size = 64 * 1024;
    o.queue_depth = 4;
    o.queues = queues;
    o.direct = storage;
    o.direct_threads = 3;
    o.faults = std::move(faults);
    std::vector<DriveOptions> all;
    for (int d = 0; d < drives; ++d) {
      paths.push_back(std::make_unique<TempDir>());
      all.push_back({.path = paths.back()->path(), .bytes = 8 * kMiB});
    }
    return make_engine(o, all);
  }

  std::shared_ptr<FakeDirect> storage = std::make_shared<FakeDirect>();
  std::vector<std::unique_ptr<TempDir>> paths;
  Memory device{4 * kMiB}, host{4 * kMiB};
};

TEST_F(DeviceMemory, MovesWhatTheHostsMemoryMoves) {
  for (const int queues : {1, 3}) {
    storage->counts->bytes = storage->counts->reads = storage->counts->writes = 0;
    const auto engine = open(2, queues);
    EXPECT_EQ(engine->direct(), storage.get());
    EXPECT_HAS(engine->describe(), "fake storage with 3 threads a drive");
    for (int drive = 0; drive < 2; ++drive) {
      for (std::int64_t i = 0; i < kMiB; ++i) host.data()[i] = static_cast<char>(i * 7 + i / 4096 + drive);
      // Written from the host, read by the device, written by it elsewhere, read by the host.
      EXPECT_TRUE(
          engine->wait(engine->submit({.op = Op::kWrite, .drive = drive, .data = host.data(), .bytes = kMiB}))
              .ok());
      EXPECT_TRUE(
          engine
              ->wait(engine->submit(
                  {.op = Op::kRead, .drive = drive, .data = device.data(), .bytes = kMiB, .on_device = true}))
              .ok());
      EXPECT_EQ(std::memcmp(device.data(), host.data(), kMiB), 0);
      storage->most = 3 * kPage;  // in short transfers, which go on where they ended
      EXPECT_TRUE(engine
                      ->wait(engine->submit({.op = Op::kWrite,
                                             .drive = drive,
                                             .offset = 2 * kMiB,
                                             .data = device.data(),
                                             .bytes = kMiB,
                                             .on_device = true}))
                      .ok());
      storage->most = 0;
      std::memset(host.data() + kMiB, 0, kMiB);
      EXPECT_TRUE(engine
                      ->wait(engine->submit({.op = Op::kRead,
                                             .drive = drive,
                                             .offset = 2 * kMiB,
                                             .data = host.data() + kMiB,
                                             .bytes = kMiB}))
                      .ok());
      EXPECT_EQ(std::memcmp(host.data() + kMiB, host.data(), kMiB), 0);
      const LinkCounters counters = engine->counters(drive);
      EXPECT_EQ(counters.read_bytes, 2 * kMiB);
      EXPECT_EQ(counters.write_bytes, 2 * kMiB);
      // The host's in blocks of 64 KiB, the device's whole, or in parts where they were short.
      EXPECT_EQ(counters.read_requests, 16 + 1);
      EXPECT_EQ(counters.write_requests, 16 + 1);
    }
    EXPECT_EQ(storage->counts->bytes, 4 * kMiB) << "the device's alone";
    EXPECT_EQ(storage->counts->reads, 2) << "larger than the host's blocks";
    EXPECT_EQ(storage->counts->writes, 2 * ((kMiB / kPage + 2) / 3));
    EXPECT_EQ(storage->counts->strangers, 0) << "each thread has entered";
    EXPECT_EQ(storage->counts->files, 2);
  }
  EXPECT_EQ(storage->counts->files, 0);
}

// Many at once, of both memories, on all lanes: tickets find their lanes.
TEST_F(DeviceMemory, ManyTransfersOfBothMemories) {
  const auto engine = open(3, 2);
  constexpr std::int64_t kPart = 64 * 1024, kParts = 4 * kMiB / kPart;
  for (std::int64_t i = 0; i < 4 * kMiB; ++i) device.data()[i] = static_cast<char>(i * 5 + i / 4096);
  std::vector<Ticket> tickets;
  for (const Op op : {Op::kWrite, Op::kRead}) {
    tickets.clear();
    for (std::int64_t i = 0; i < kParts; ++i) {
      const bool on_device = (i % 3 == 0) == (op == Op::kWrite);
      char* const memory = (op == Op::kWrite ? device : host).data();
      tickets.push_back(engine->submit({.op = op,
                                        .drive = static_cast<int>(i % 3),
                                        .offset = i * kPart,
                                        .data = memory + i * kPart,
                                        .bytes = kPart,
                                        .on_device = on_device}));
      engine->promote(tickets.back(), Priority::kDemand);
    }
    for (const Ticket ticket : tickets) EXPECT_TRUE(engine->wait(ticket).ok());
  }
  EXPECT_EQ(std::memcmp(device.data(), host.data(), 4 * kMiB), 0);
  EXPECT_HAS(engine->state(), "of 7 blocks");
}

// The device, and so a checksum, may wait for the very thread that registers memory.
TEST_F(DeviceMemory, RegistrationWaitsForNoDevice) {
  const auto engine = open();
  const auto volume = make_volume(*engine, {});
  const ExtentId extent = volume->create({.name = "e", .bytes = kMiB});
  storage->held = true;
  std::thread writes([&] {
    EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = device.data(), .on_device = true}).ok());
  });
  while (storage->counts->checksums == 0) std::this_thread::yield();
  engine->register_memory(host.data(), kMiB);
  engine->unregister_memory(host.data());
  storage->held = false;
  writes.join();
}

TEST_F(DeviceMemory, FailuresAreResults) {
  const auto engine = open();
  const auto read = [&] {
    return engine->wait(engine->submit({.data = device.data(), .bytes = kMiB, .on_device = true}));
  };
  storage->error = EIO;
  EXPECT_EQ(read().error, EIO);
  storage->error = EINTR;  // is tried again
  EXPECT_TRUE(read().ok());
}

TEST_F(DeviceMemory, VolumesCheckWhatTheDeviceMoves) {
  const auto engine = open(2);
  const auto volume = make_volume(*engine, {});
  const ExtentId extent = volume->create({.name = "e", .bytes = kMiB + 3 * kPage});
  const std::int64_t bytes = volume->transfer_bytes(extent);
  for (std::int64_t i = 0; i < bytes; ++i) host.data()[i] = static_cast<char>(i * 11 + i / 4096);
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = host.data()}).ok());
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .data = device.data(), .on_device = true}).ok());
  EXPECT_EQ(std::memcmp(device.data(), host.data(), static_cast<std::size_t>(bytes)), 0);
  device.data()[5] ^= 1;
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = device.data(), .on_device = true}).ok());
  EXPECT_GT(storage->counts->checksums, 0);
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .data = host.data()}).ok());
  EXPECT_EQ(std::memcmp(device.data(), host.data(), static_cast<std::size_t>(bytes)), 0);
  EXPECT_EQ(storage->counts->strangers, 0) << "who makes checksums has entered, too";
  // A device that is gone has nothing to compare with.
  storage->lost = true;
  EXPECT_EQ(volume->read_and_wait({.extent = extent, .data = device.data(), .on_device = true}).error, EIO);
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .data = host.data()}).ok());
  EXPECT_EQ(volume->write_and_wait({.extent = extent, .data = device.data(), .on_device = true}).error, EIO);
  EXPECT_EQ(volume->read_and_wait({.extent = extent, .data = host.data()}).error, ENODATA);
}

TEST_F(DeviceMemory, PiecesMustNotBeTooLargeForTheDevice) {
  const auto engine = open();
  EXPECT_THROW((void)make_volume(*engine, {.grain = 8 * kMiB}), Error);
  EXPECT_NE(make_volume(*engine, {.grain = 8 * kMiB, .verify = false}), nullptr);
}

// A thread that cannot enter the device fails all transfers that it is given.
TEST_F(DeviceMemory, AThreadThatCannotEnterFailsItsBlocks) {
  storage->enters = 1;  // the lane's own
  const auto engine = open();
  EXPECT_EQ(engine->wait(engine->submit({.data = device.data(), .bytes = kMiB, .on_device = true})).error,
            EIO);
}

TEST_F(DeviceMemory, AFlippedBitOfTheDevicesIsFound) {
  FaultModel faults;
  faults.rules.push_back({.fault = Fault::kFlip, .op = Op::kRead, .count = 1});
  const auto engine = open(1, 1, faults);
  const auto volume = make_volume(*engine, {});
  const ExtentId extent = volume->create({.name = "e", .bytes = kMiB});
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = device.data(), .on_device = true}).ok());
  EXPECT_EQ(volume->read_and_wait({.extent = extent, .data = device.data(), .on_device = true}).error,
            EBADMSG);
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .data = device.data(), .on_device = true}).ok());
}

TEST_F(DeviceMemory, WhatCannotBeHadSaysWhy) {
  const TempDir directory;
  EXPECT_EQ(why_not_direct(*storage, directory.path()), "");
  EXPECT_TRUE(directory.is_empty());
  storage->refuse = true;
  EXPECT_EQ(why_not_direct(*storage, directory.path()), "this file system is not supported");
  EXPECT_NE(why_not_direct(*storage, directory.path() + "/nowhere"), "");
  const Error e = error_of([&] { (void)open(); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_EQ(e.where(), paths.back()->path());
  EXPECT_EQ(e.message(), "fake storage: this file system is not supported");
  const Error ram =
      error_of([&] { (void)make_engine({.backend = Backend::kRam, .direct = storage}, {{.bytes = kMiB}}); });
  EXPECT_EQ(ram.code(), Errc::kUsage);
  EXPECT_EQ(ram.where(), "aio.backend");
  EXPECT_EQ(storage->counts->files, 0);
}

using DeviceMemoryDeathTest = DeviceMemory;

TEST_F(DeviceMemoryDeathTest, WhatIsNotWholePagesIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto engine = open();
  EXPECT_DEATH((void)engine->submit({.data = device.data() + 8, .bytes = kPage, .on_device = true}),
               "alignment");
  EXPECT_DEATH((void)engine->submit({.data = device.data(), .bytes = kPage + 8, .on_device = true}),
               "alignment");
  const TempDir directory;
  const auto plain = make_engine({.backend = Backend::kThreads}, {{.path = directory.path(), .bytes = kMiB}});
  EXPECT_EQ(plain->direct(), nullptr);
  EXPECT_DEATH((void)plain->submit({.data = device.data(), .bytes = kPage, .on_device = true}),
               "reaches no memory but the host's");
}

}  // namespace
}  // namespace zg::io::test
