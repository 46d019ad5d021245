// GPUDirect Storage over a fake cuFile, found when the test runs as the real one is.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "device/cuda/arena.hpp"
#include "device/cuda/gds.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "tests/cuda/programs/fake_cufile.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

const std::string kFakeCufile = test::built_for_tests("libzg_fake_cufile.so");

using cuda::Gds;

class GdsOverFake : public testing::Test {
 protected:
  GdsOverFake() : arena_(runtime_, {.budget = 16 * kMiB}) {
    void* library = dlopen(kFakeCufile.c_str(), RTLD_NOW);
    ZG_ASSERT(library != nullptr, "{}", dlerror());
    fake_ = static_cast<FakeCuFile*>(dlsym(library, "zg_fake_cufile"));
    *fake_ = {};
    fake_->nvfs_major = 2;
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
    device_ = static_cast<unsigned char*>(arena_.allocate(4 * kMiB));
  }
  ~GdsOverFake() override {
    EXPECT_EQ(fake_->drivers, 0);
    EXPECT_EQ(fake_->files, 0);
    EXPECT_EQ(fake_->memories, 0);
    arena_.release(device_, 4 * kMiB);
    if (fd_ >= 0) close(fd_);
  }
  void SetUp() override {
    if (fd_ < 0) GTEST_SKIP() << "no O_DIRECT in " << path_;
  }
  std::unique_ptr<Gds> load() {
    std::string why;
    auto gds = Gds::load(&why, true, kFakeCufile);
    EXPECT_NE(gds, nullptr) << why;
    return gds;
  }
  Gds::File open(const Gds& gds) {
    std::string why;
    Gds::File file = gds.open(fd_, &why);
    EXPECT_TRUE(static_cast<bool>(file)) << why;
    return file;
  }

  FakeRuntime runtime_;
  cuda::CudaArena arena_;
  FakeCuFile* fake_ = nullptr;
  const TempDir directory_;
  const std::string path_ = directory_ / "file";
  int fd_ = -1;
  unsigned char* device_ = nullptr;
};

TEST_F(GdsOverFake, WritesAndReadsAtAnyOffset) {
  const auto gds = load();
  EXPECT_EQ(gds->describe(), "nvidia-fs 2.26");
  EXPECT_FALSE(gds->passes_host());
  const Gds::File file = open(*gds);
  for (std::int64_t i = 0; i < kMiB; ++i) device_[kMiB + i] = static_cast<unsigned char>(i / 4096);
  for (const long most : {0L, 4096L, 100 * 4096L}) {  // whole, and in many short transfers
    fake_->most_bytes = most;
    const Gds::Result written = gds->write(file, 8192, kMiB, device_ + kMiB);
    EXPECT_EQ(written.bytes, kMiB);
    EXPECT_EQ(written.error, 0);
    std::memset(device_ + 2 * kMiB, 0, kMiB);
    const Gds::Result read = gds->read(file, 8192 + 4096, kMiB - 4096, device_ + 2 * kMiB);
    EXPECT_EQ(read.bytes, kMiB - 4096);
    EXPECT_EQ(read.error, 0);
    EXPECT_EQ(std::memcmp(device_ + 2 * kMiB, device_ + kMiB + 4096, kMiB - 4096), 0);
  }
  const Gds::Result end = gds->read(file, kMiB, kMiB, device_);
  EXPECT_EQ(end.bytes, 8192) << "the file ends there";
  EXPECT_EQ(end.error, 0);
}

TEST_F(GdsOverFake, FailuresAreValuesWithATextOfTheirOwn) {
  const auto gds = load();
  const Gds::File file = open(*gds);
  EXPECT_EQ(gds->write(file, 0, 64 * kKiB, device_).error, 0);
  const auto read = [&](std::int64_t bytes = 4096) { return gds->read(file, 0, bytes, device_); };
  fake_->fail_transfer = EIO;
  const Gds::Result failed = read();
  EXPECT_EQ(failed.error, EIO);
  EXPECT_HAS(failed.text, "errno 5");
  fake_->fail_transfer = EINTR;  // is tried again
  EXPECT_EQ(read().bytes, 4096);
  fake_->fail_transfer = 5010;
  const Gds::Result own = read();
  EXPECT_EQ(own.error, EIO) << "a number of cuFile's own";
  EXPECT_HAS(own.text, "nvidia-fs failed (cuFile error 5010)");
  fake_->fail_transfer = ENOSPC;
  EXPECT_EQ(gds->write(file, 0, 4096, device_).error, ENOSPC);
  // What was moved before a failure is known.
  fake_->most_bytes = 16384;
  EXPECT_EQ(read(32768).bytes, 32768);
  fake_->granule = 4096;
  const Gds::Result past = read(8192);
  EXPECT_EQ(past.bytes, 0);
  EXPECT_HAS(past.text, "passes the end of the memory");
}

// Its base and a place in it name what is registered; other memory is one mapping at most.
TEST_F(GdsOverFake, RegisteredMemoryIsMovedWhole) {
  const auto gds = load();
  const Gds::File file = open(*gds);
  std::string why;
  fake_->granule = 64 * kKiB;
  ASSERT_TRUE(gds->register_memory(device_, 4 * kMiB, &why)) << why;
  for (std::int64_t i = 0; i < kMiB; ++i) device_[kMiB + i] = static_cast<unsigned char>(i / 4096 + 1);
  fake_->most_bytes = 100 * 4096;
  EXPECT_EQ(gds->write(file, 0, kMiB, device_, kMiB).bytes, kMiB);
  EXPECT_EQ(gds->read(file, 0, kMiB, device_, 2 * kMiB + 4096).bytes, kMiB);
  EXPECT_EQ(std::memcmp(device_ + kMiB, device_ + 2 * kMiB + 4096, kMiB), 0);
  EXPECT_HAS(gds->read(file, 0, kMiB, device_, 4 * kMiB - 4096).text,
             "passes the end of what was registered");
  EXPECT_FALSE(gds->register_memory(device_, 4 * kMiB, &why));
  EXPECT_HAS(why, "registered already");
  gds->unregister_memory(device_);
  EXPECT_HAS(gds->read(file, 0, kMiB, device_, 4096).text, "passes the end of the memory");
  fake_->fail_memory = 5036;
  EXPECT_FALSE(gds->register_memory(device_, 4 * kMiB, &why));
  EXPECT_HAS(why, "device memory could not be pinned");
}

TEST_F(GdsOverFake, FilesThatCannotBeHadSayWhy) {
  const auto gds = load();
  std::string why;
  const int plain = ::open(path_.c_str(), O_RDWR);
  EXPECT_FALSE(static_cast<bool>(gds->open(plain, &why)));
  EXPECT_HAS(why, "O_DIRECT");
  close(plain);
  EXPECT_FALSE(static_cast<bool>(gds->open(plain, &why)));
  EXPECT_HAS(why, "errno 9");
  fake_->fail_file = 5008;
  EXPECT_FALSE(static_cast<bool>(gds->open(fd_, &why)));
  EXPECT_HAS(why, "this file system is not supported");
  Gds::File file = open(*gds), other = std::move(file);
  EXPECT_FALSE(static_cast<bool>(file));
  file = std::move(other);
  EXPECT_TRUE(static_cast<bool>(file));
  EXPECT_EQ(fake_->files, 1);
}

TEST_F(GdsOverFake, ALibraryThatCannotBeHadSaysWhy) {
  std::string why;
  EXPECT_EQ(Gds::load(&why, true, "/nowhere/libcufile.so.0"), nullptr);
  EXPECT_HAS(why, "not installed");
  EXPECT_HAS(why, "/nowhere/libcufile.so.0");
  EXPECT_EQ(Gds::load(&why, true, test::built_for_tests("libzg_incomplete_cufile.so")), nullptr);
  EXPECT_HAS(why, "has no function cuFileDriverClose");
  EXPECT_EQ(Gds::load(&why, true), nullptr) << "this program uses no driver of NVIDIA's";
  EXPECT_HAS(why, "needs NVIDIA's driver");
  fake_->fail_open = 5001;
  EXPECT_EQ(Gds::load(&why, true, kFakeCufile), nullptr);
  EXPECT_HAS(why, "nvidia-fs is not loaded");
  fake_->nvfs_major = 0;
  why.clear();
  EXPECT_EQ(Gds::load(&why, false, kFakeCufile), nullptr);
  EXPECT_HAS(why, "nvidia-fs is not loaded");
  EXPECT_EQ(load()->describe(), "compatibility mode");
  EXPECT_TRUE(load()->passes_host());
  fake_->features = 1 << 4;
  EXPECT_HAS(load()->describe(), "P2PDMA");
  EXPECT_FALSE(load()->passes_host());
}

// With the driver there, files that only cuFile's compatibility mode takes are refused, or taken where that
// is wanted.
TEST_F(GdsOverFake, CompatibilityModeIsAskedFor) {
  fake_->odd_files = 1;
  std::string why;
  {
    const auto gds = Gds::load(&why, false, kFakeCufile);
    ASSERT_NE(gds, nullptr) << why;
    EXPECT_FALSE(static_cast<bool>(gds->open(fd_, &why)));
    EXPECT_HAS(why, "this file system is not supported");
  }
  const auto gds = Gds::load(&why, true, kFakeCufile);
  ASSERT_NE(gds, nullptr) << why;
  EXPECT_TRUE(static_cast<bool>(gds->open(fd_, &why)));
}

}  // namespace
}  // namespace zg::test
