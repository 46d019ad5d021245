// The I/O engine's way to a CUDA device's memory, over the fakes of CUDA and of cuFile.
#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "device/cuda/device.hpp"
#include "device/cuda/direct_storage.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/host_blas.hpp"
#include "tests/cuda/programs/fake_cufile.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"

namespace zg::test {
namespace {

const std::string kFakeCufile = test::built_for_tests("libzg_fake_cufile.so");

constexpr std::int64_t kGranule = 64 * kKiB;

class DirectOverFake : public testing::Test {
 protected:
  DirectOverFake() {
    void* library = dlopen(kFakeCufile.c_str(), RTLD_NOW);
    ZG_ASSERT(library != nullptr, "{}", dlerror());
    cufile_ = static_cast<FakeCuFile*>(dlsym(library, "zg_fake_cufile"));
    *cufile_ = {};
    cufile_->nvfs_major = 2;
    cufile_->granule = kGranule;
    FakeOptions options;
    options.devices = 2;
    options.granule = kGranule;
    options.most_delay_us = 20;
    auto fake = std::make_unique<FakeRuntime>(options);
    runtime_ = fake.get();
    device_ =
        cuda::make_device({.device = 1, .budget = 16 * kMiB}, std::move(fake), make_host_blas, kFakeCufile);
  }
  ~DirectOverFake() override {
    device_.reset();
    EXPECT_EQ(cufile_->files, 0);
    EXPECT_EQ(cufile_->memories, 0);
    EXPECT_EQ(cufile_->drivers, 0);
  }
  std::shared_ptr<io::DirectStorage> storage() {
    std::string why;
    auto direct = device_->direct_storage(false, &why);
    EXPECT_NE(direct, nullptr) << why;
    return direct;
  }
  std::unique_ptr<io::Engine> engine() {
    auto direct = storage();
    if (const std::string why = io::why_not_direct(*direct, path_); !why.empty()) return nullptr;
    io::EngineOptions o;
    o.backend = io::Backend::kThreads;
    o.direct = std::move(direct);
    return io::make_engine(o, {{.path = path_, .bytes = 32 * kMiB}});
  }
  unsigned char* allocate(std::int64_t bytes) {
    return static_cast<unsigned char*>(device_->arena().allocate(bytes));
  }

  FakeCuFile* cufile_ = nullptr;
  const TempDir directory_;
  const std::string& path_ = directory_.path();
  FakeRuntime* runtime_ = nullptr;
  std::unique_ptr<Device> device_;
};

// Pieces of 4 MiB and less, each one transfer, over granules of which each is a mapping of its own; what
// either side wrote, the other reads and finds right.
TEST_F(DirectOverFake, AVolumeWritesFromAndReadsIntoTheDevice) {
  const auto io = engine();
  if (io == nullptr) GTEST_SKIP() << "no O_DIRECT in " << path_;
  EXPECT_HAS(io->describe(), "GPUDirect Storage (nvidia-fs 2.26)");
  const auto volume = io::make_volume(*io, {.grain = 4096});
  const std::int64_t bytes = 9 * kMiB + 4096;
  const io::ExtentId extent = volume->create({.name = "e", .bytes = bytes, .slots = 2});
  unsigned char* const memory = allocate(bytes + 4096);
  unsigned char* const data = memory + 4096;  // pieces pass the ends of granules
  std::mt19937_64 random(3);
  std::vector<std::uint64_t> host(static_cast<std::size_t>(bytes / 8)), back(host.size());
  for (auto& word : host) word = random();
  std::memcpy(data, host.data(), static_cast<std::size_t>(bytes));
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = data, .on_device = true}).ok());
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .data = back.data()}).ok());
  EXPECT_EQ(back, host);
  for (auto& word : host) word = random();
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .slot = 1, .data = host.data()}).ok());
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .slot = 1, .data = data, .on_device = true}).ok());
  EXPECT_EQ(std::memcmp(data, host.data(), static_cast<std::size_t>(bytes)), 0);
  EXPECT_EQ(cufile_->transfers, 2 * 3) << "one a piece";
  EXPECT_EQ(cufile_->largest, 4 * kMiB);
  EXPECT_GE(runtime_->calls("kernel"), 2 * 2 * 3) << "two kernels a piece";
  device_->arena().release(memory, bytes + 4096);
}

TEST_F(DirectOverFake, SeveralTransfersAreUnderWayAtOnce) {
  const auto io = engine();
  if (io == nullptr) GTEST_SKIP() << "no O_DIRECT in " << path_;
  const auto volume = io::make_volume(*io, {.grain = 4096});
  const io::ExtentId extent = volume->create({.name = "e", .bytes = 14 * kMiB});
  unsigned char* const data = allocate(14 * kMiB);
  std::memset(data, 1, 14 * kMiB);
  cufile_->gather = 4;
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = data, .on_device = true}).ok());
  EXPECT_EQ(cufile_->most_running, 4) << "as many as there are pieces";
  device_->arena().release(data, 14 * kMiB);
}

// Beside an arena that leaves little, there is one buffer: transfers wait for each other. Where its memory
// cannot be registered, the bytes move all the same.
TEST_F(DirectOverFake, LittleMemoryMakesTransfersWaitForEachOther) {
  FakeOptions options;
  options.granule = kGranule;
  options.memory = 22 * kMiB;
  options.devices = 1;
  cufile_->granule = 0;
  device_ = cuda::make_device({.budget = 16 * kMiB}, std::make_unique<FakeRuntime>(options), make_host_blas,
                              kFakeCufile);
  cufile_->fail_memory = 5036;
  const auto io = engine();
  if (io == nullptr) GTEST_SKIP() << "no O_DIRECT in " << path_;
  EXPECT_EQ(cufile_->memories, 0);
  const auto volume = io::make_volume(*io, {.grain = 4096});
  const io::ExtentId extent = volume->create({.name = "e", .bytes = 14 * kMiB});
  unsigned char* const data = allocate(14 * kMiB);
  for (std::int64_t i = 0; i < 14 * kMiB; ++i) data[i] = static_cast<unsigned char>(i * 3 + i / 4096);
  const std::vector<unsigned char> written(data, data + 14 * kMiB);
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = data, .on_device = true}).ok());
  std::memset(data, 0, 14 * kMiB);
  EXPECT_TRUE(volume->read_and_wait({.extent = extent, .data = data, .on_device = true}).ok());
  EXPECT_TRUE(std::equal(written.begin(), written.end(), data));
  EXPECT_EQ(cufile_->most_running, 1);
  device_->arena().release(data, 14 * kMiB);
}

TEST_F(DirectOverFake, FailuresNameTheirCause) {
  const auto io = engine();
  if (io == nullptr) GTEST_SKIP() << "no O_DIRECT in " << path_;
  const auto volume = io::make_volume(*io, {.grain = 4096});
  const io::ExtentId extent = volume->create({.name = "e", .bytes = kMiB});
  unsigned char* const data = allocate(kMiB);
  std::memset(data, 1, kMiB);
  const auto read = [&] {
    return volume->read_and_wait({.extent = extent, .data = data, .on_device = true});
  };
  EXPECT_TRUE(volume->write_and_wait({.extent = extent, .data = data, .on_device = true}).ok());
  cufile_->fail_transfer = 5010;
  EXPECT_EQ(read().error, EIO);
  cufile_->fail_transfer = ENXIO;
  EXPECT_EQ(read().error, ENXIO);
  EXPECT_TRUE(read().ok());
  // Nobody can say whether the bytes are right when the device is gone.
  runtime_->break_device("Xid 79: the GPU has fallen off the bus");
  EXPECT_EQ(read().error, EIO);
  (void)runtime_->take_mistakes();
  device_->arena().release(data, kMiB);
}

// More at once than there are desks for.
TEST_F(DirectOverFake, ChecksumsOfSeveralThreads) {
  const auto direct = storage();
  constexpr std::int64_t kBytes = 64 * kKiB;
  constexpr int kThreads = 6;
  unsigned char* const data = allocate(kThreads * kBytes);
  for (std::int64_t i = 0; i < kThreads * kBytes; ++i)
    data[i] = static_cast<unsigned char>(i * 7 + i / kBytes);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      direct->enter_thread();
      for (int i = 0; i < 10; ++i) {
        const unsigned char* const at = data + (t + i) % kThreads * kBytes;
        wrong += direct->checksum(at, kBytes - 4096 * i) != io::checksum(at, kBytes - 4096 * i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  device_->arena().release(data, kThreads * kBytes);
}

TEST_F(DirectOverFake, IsNotHadWhereItWouldPassTheHost) {
  cufile_->nvfs_major = 0;
  std::string why;
  EXPECT_EQ(device_->direct_storage(false, &why), nullptr);
  EXPECT_HAS(why, "compatibility mode");
  EXPECT_NE(device_->direct_storage(true, &why), nullptr) << "wanted all the same";
  EXPECT_EQ(device_->direct_storage(false, &why), device_->direct_storage(true, &why)) << "it is the same";
}

TEST_F(DirectOverFake, SaysWhyItCannotBeHad) {
  std::string why;
  cufile_->fail_open = 5001;
  EXPECT_EQ(device_->direct_storage(true, &why), nullptr);
  EXPECT_HAS(why, "nvidia-fs is not loaded");
  const auto host = make_host_device(4096, nullptr);
  EXPECT_EQ(host->direct_storage(true, &why), nullptr);
  EXPECT_HAS(why, "as any other");
  const auto direct = storage();
  cufile_->fail_file = 5008;
  EXPECT_HAS(io::why_not_direct(*direct, path_), "this file system is not supported");
}

}  // namespace
}  // namespace zg::test
