// What a ring says of the modes that it was asked for.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "io/uring_ring.hpp"
#include "support.hpp"

namespace zg::io::test {
namespace {

class File {
 public:
  explicit File(const TempDir& directory, int flags)
      : fd_(open((directory.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | flags, 0600)) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

TEST(Polling, NeedsDirectAccessAndADriveWithPolledQueues) {
  const TempDir directory;
  const File buffered(directory, 0);
  EXPECT_EQ(unpolled_because(buffered.fd(), directory.path()), "its file is not open with O_DIRECT");
  const File file(directory, O_DIRECT);
  if (file.fd() < 0) GTEST_SKIP() << "no O_DIRECT here";
  EXPECT_EQ(unpolled_because(file.fd(), directory.path()), "");  // unknown: to be tried

  struct stat info {};
  ASSERT_EQ(fstat(file.fd(), &info), 0);
  const std::string number = fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev));
  const std::filesystem::path disk = directory.path() + "/devices/disk";
  const std::filesystem::path link = directory.path() + "/dev/block/" + number;
  std::filesystem::create_directories(link.parent_path());
  std::filesystem::create_directories(disk / "partition");
  for (const char* what : {"", "partition"}) {
    std::filesystem::remove(link);
    std::filesystem::create_directory_symlink(disk / what, link);
    write_file(disk / "queue/io_poll", "0\n");
    EXPECT_EQ(unpolled_because(file.fd(), directory.path()), "its drive has no polled queues") << what;
    write_file(disk / "queue/io_poll", "1\n");
    EXPECT_EQ(unpolled_because(file.fd(), directory.path()), "") << what;
  }
}

// A file that cannot be polled for: IOPOLL is left out, or an error where it was required.
TEST(Polling, IsLeftOutWithTheReasonOrRequired) {
  const TempDir directory;
  const File buffered(directory, 0);
  try {
    EXPECT_HAS(make_uring_queue(buffered.fd(), 4, {.iopoll = true})->features(),
               "no IOPOLL (its file is not open with O_DIRECT)");
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  EXPECT_THROW(make_uring_queue(buffered.fd(), 4, {.iopoll = true, .require = true}), Error);
}

// Where nothing is known of the drive, one read is tried; what that leaves is a ring that works.
TEST(Polling, IsTriedWithARead) {
  const TempDir directory;
  const File file(directory, O_DIRECT);
  if (file.fd() < 0) GTEST_SKIP() << "no O_DIRECT here";
  const Memory page(kPage);
  ASSERT_EQ(write(file.fd(), page.data(), kPage), kPage);
  try {
    const UringRing ring(file.fd(), 4, {.iopoll = true}, directory.path());
    const std::string is = ring.features();
    EXPECT_EQ(ring.polled(), is.find("no IOPOLL (a read that is polled for: ") == std::string::npos) << is;
    EXPECT_HAS(is, "IOPOLL");
    io_uring_prep_read(io_uring_get_sqe(ring.get()), file.fd(), page.data(), kPage, 0);
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(ring.get(), &cqe) != 0) io_uring_submit_and_get_events(ring.get());
    EXPECT_EQ(cqe->res, kPage);
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
}

// The kernel's thread says that it took entries only when its whole batch is through; blocks of that batch
// may be done, and others begun, before. That moment is rare, so here the ring is full for certain: of more
// blocks than its depth.
TEST(Sqpoll, WaitsForAFullRing) {
  constexpr int kDepth = 3, kBlocks = 50;
  const TempDir directory;
  const File file(directory, 0);
  const Memory memory(kBlocks * kPage);
  ASSERT_EQ(write(file.fd(), memory.data(), kPage), kPage);
  try {
    const auto queue = make_uring_queue(file.fd(), kDepth, {.sqpoll = true});
    if (queue->features().find("no SQPOLL") != std::string::npos) GTEST_SKIP() << queue->features();
    for (std::uint32_t id = 0; id < kBlocks; ++id)
      queue->begin({.op = Op::kRead, .id = id, .data = memory.at(id * kPage), .bytes = kPage});
    std::vector<BlockDone> done;
    while (done.size() < kBlocks) queue->reap(done, Queue::kForever);
    std::vector<int> times(kBlocks, 0);
    for (const BlockDone& block : done) {
      EXPECT_EQ(block.result, kPage);
      ++times.at(block.id);
    }
    EXPECT_EQ(times, std::vector<int>(kBlocks, 1));
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
}

// Blocks that were begun before keep what they need, whether the kernel has looked at them yet or not.
TEST(Registration, MayEndWhileBlocksAreUnderWay) {
  constexpr int kBlocks = 16;
  const TempDir directory;
  const File file(directory, 0);
  const Memory memory(kBlocks * kPage);
  ASSERT_EQ(write(file.fd(), memory.data(), kPage), kPage);
  for (const bool sqpoll : {false, true}) {
    std::unique_ptr<Queue> queue;
    try {
      queue = make_uring_queue(file.fd(), kBlocks, {.sqpoll = sqpoll});
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
    for (int round = 0; round < 20; ++round) {
      if (!queue->register_memory(memory.data(), memory.bytes()).empty())
        GTEST_SKIP() << "nothing registered";
      for (std::uint32_t id = 0; id < kBlocks; ++id)
        queue->begin({.op = Op::kRead, .id = id, .data = memory.at(id * kPage), .bytes = kPage});
      queue->unregister_memory(memory.data());
      std::vector<BlockDone> done;
      while (done.size() < kBlocks) queue->reap(done, Queue::kForever);
      for (const BlockDone& block : done) ASSERT_EQ(block.result, kPage) << queue->features();
    }
  }
}

// One thread for this user, and it is this one: the kernel's has no place.
[[noreturn]] void run_without_threads() {
  const rlimit one{.rlim_cur = 1, .rlim_max = 1};
  if (setrlimit(RLIMIT_NPROC, &one) != 0 || setuid(65534) != 0) _exit(77);
  fprintf(stderr, "%s\n", make_uring_queue(-1, 4, {.sqpoll = true})->features().c_str());
  try {
    make_uring_queue(-1, 4, {.sqpoll = true, .require = true});
  } catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    _exit(3);
  }
  _exit(0);
}

TEST(Sqpoll, IsLeftOutWithTheReasonOrRequired) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  if (geteuid() != 0) GTEST_SKIP() << "needs to start as root to become somebody without privileges";
  try {
    if (make_uring_queue(-1, 4, {.sqpoll = true})->features().find("no SQPOLL") != std::string::npos)
      GTEST_SKIP() << "no SQPOLL here at all";
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  EXPECT_EXIT(run_without_threads(), testing::ExitedWithCode(3),
              "no SQPOLL \\(Resource temporarily(.|\\n)*SQPOLL is required and not to be had");
}

}  // namespace
}  // namespace zg::io::test
