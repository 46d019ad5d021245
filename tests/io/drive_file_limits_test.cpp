// The files behind drives where something is missing: space, rights, locks, a part of the file; and files
// that were there before.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "drive_file_support.hpp"
#include "support/process.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

TEST_F(DriveFileTest, FailingHalfWayLeavesNothing) {
  for (const std::int64_t bytes : {std::int64_t{1} << 50, std::int64_t{0}, std::int64_t{-1}}) {
    refusal(bytes);
    EXPECT_TRUE(is_empty()) << bytes;
  }
  // The second drive fails after the first one's files are made.
  const TempDir other;
  EXPECT_THROW(make_engine({}, {{path(), kMiB}, {other.path(), std::int64_t{1} << 50}}), Error);
  EXPECT_TRUE(is_empty());
  EXPECT_TRUE(other.is_empty());
}

class SmallDisk : public DriveFileTest {
 protected:
  void SetUp() override {
    if (mount("zg-test", path().c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "may not mount";
    mounted_ = true;
  }
  void TearDown() override {
    if (mounted_) {
      EXPECT_EQ(umount(path().c_str()), 0) << errno_text(errno);
    }
  }

 private:
  bool mounted_ = false;
};

TEST_F(SmallDisk, TooSmallLeavesNothing) {
  const Error e = refusal(2 * kMiB);
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_HAS(e.what(), "needs 2.0 MiB, 1020.0 KiB free");
  EXPECT_TRUE(is_empty());
}

// Not even the lock file's text has room before what a killed run left is gone.
TEST_F(SmallDisk, FullOfLeftovers) {
  std::ofstream(in(kSomeTier)) << std::string(kMiB, 'x');  // not all of it fits
  ASSERT_EQ(free_bytes_of(path()), 0);
  auto file = tier(kMiB / 2);
  EXPECT_EQ(read_file(lock_file()).rfind("pid ", 0), 0u);
  file.reset();
  EXPECT_TRUE(is_empty());
}

TEST_F(SmallDisk, FullOfOtherThings) {
  std::ofstream(in("other")) << std::string(kMiB, 'x');  // not all of it fits
  const Error e = refusal(kPage);
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_HAS(e.what(), "No space left");
  EXPECT_EQ(names(), std::vector<std::string>{"other"});
}

// In a directory that takes new files and lets none go (chattr +a).
TEST_F(DriveFileTest, ALeftoverThatCannotBeRemovedIsNamed) {
  write_file(in(kSomeTier), "leftover");
  const OwnedFd directory(open(path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  int flags = 0;
  ASSERT_EQ(ioctl(directory.get(), FS_IOC_GETFLAGS, &flags), 0);
  const int keeping = flags | FS_APPEND_FL;
  if (ioctl(directory.get(), FS_IOC_SETFLAGS, &keeping) != 0) GTEST_SKIP() << "chattr: " << errno_text(errno);
  const Error e = refusal();
  ASSERT_EQ(ioctl(directory.get(), FS_IOC_SETFLAGS, &flags), 0);
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), in(kSomeTier));
  EXPECT_HAS(e.what(), "Operation not permitted");
}

// As on a network file system without locks.
TEST_F(DriveFileTest, WithoutLocksThereIsNoTier) {
  const auto attempt = [&] {
    zg::test::forbid_calls({SYS_flock}, ENOLCK);
    const Error e = refusal();
    fprintf(stderr, "%s\n", e.what());
    _exit(e.code() == Errc::kIo && e.where() == path() && is_empty() ? 0 : 1);
  };
  EXPECT_EXIT(attempt(), testing::ExitedWithCode(0), "cannot be locked.*No locks available.*local drive");
}

// --- kExisting ---

class ExistingFile : public DriveFileTest {
 protected:
  DriveOptions existing(const std::string& name, std::int64_t bytes = 0) const {
    return {.path = in(name), .bytes = bytes, .kind = FileKind::kExisting};
  }
  void expect_refused(const DriveOptions& options, const std::string& text) const {
    const Error e = refusal_of(options);
    EXPECT_EQ(e.code(), Errc::kUsage) << e.what();
    EXPECT_EQ(e.where(), options.path);
    EXPECT_HAS(e.what(), text);
  }
};

TEST_F(ExistingFile, HasItsSizeInWholePagesAndKeepsIt) {
  const std::string text(static_cast<std::size_t>(3 * kPage + 5), 'x');
  write_file(in("file"), text);
  { EXPECT_EQ(DriveFile(existing("file")).bytes(), 3 * kPage); }
  { EXPECT_EQ(DriveFile(existing("file", kPage + 1)).bytes(), 2 * kPage); }
  EXPECT_EQ(read_file(in("file")), text);
  EXPECT_EQ(names(), std::vector<std::string>{"file"});
  {
    const auto engine = make_engine({}, {existing("file")});
    const Memory memory(kPage);
    std::memset(memory.data(), 'y', static_cast<std::size_t>(kPage));
    EXPECT_TRUE(
        engine
            ->wait(engine->submit({.op = Op::kWrite, .offset = kPage, .data = memory.data(), .bytes = kPage}))
            .ok());
    EXPECT_EQ(engine->drive_bytes(0), 3 * kPage);
  }
  const std::string now = read_file(in("file"));
  EXPECT_EQ(now.size(), text.size());
  EXPECT_EQ(now.substr(kPage, kPage), std::string(kPage, 'y'));
  EXPECT_EQ(now.substr(2 * kPage), text.substr(2 * kPage));
}

TEST_F(ExistingFile, MustBeAFileOfThatSize) {
  write_file(in("small"), std::string(kPage - 1, 'x'));
  write_file(in("file"), std::string(2 * kPage + 5, 'x'));
  ASSERT_EQ(mkfifo(in("fifo").c_str(), 0600), 0);
  expect_refused(existing("none"), "No such file");
  expect_refused(existing(""), "is a directory");
  expect_refused(existing("fifo"), "is no regular file");
  expect_refused({.path = "/dev/null", .kind = FileKind::kExisting}, "is no regular file");
  expect_refused(existing("small"), "has 4095 bytes");
  expect_refused(existing("file", 2 * kPage + 1), "8192 in whole pages, where 12288 are asked for");
  expect_refused(existing("file", -1), "-1 bytes");
}

TEST_F(ExistingFile, IsUsedByOneAtATime) {
  write_file(in("file"), std::string(kPage, 'x'));
  {
    const DriveFile first(existing("file"));
    expect_refused(existing("file"), "is in use by another run");
  }
  const DriveFile again(existing("file"));
}

TEST_F(ExistingFile, HolesAreSaid) {
  write_file(in("file"), std::string(kPage, 'x'));
  EXPECT_EQ(DriveFile(existing("file")).sparse_because(), "");
  fs::resize_file(in("file"), 100 * kPage);
  EXPECT_EQ(DriveFile(existing("file")).sparse_because(), "the file has holes");
}

// --- truncated while it is read ---

class Truncated : public testing::TestWithParam<Backend> {};

TEST_P(Truncated, WhatIsLostIsAnErrorAndTheRestIsRight) {
  constexpr std::int64_t kPiece = 16 * kPage, kPieces = 64, kKept = 20;
  const TempDir directory;
  EngineOptions options;
  options.backend = GetParam();
  options.block_size = 4 * kPage;
  const auto engine = make_engine(options, {{directory.path(), kPieces * kPiece}});
  if (engine->backend() != GetParam()) GTEST_SKIP() << engine->describe();
  const Memory out(kPieces * kPiece), back(kPieces * kPiece);
  out.fill(0, out.bytes(), printed_seed());
  ASSERT_TRUE(
      engine->wait(engine->submit({.op = Op::kWrite, .data = out.data(), .bytes = out.bytes()})).ok());

  const auto read_all = [&] {
    std::memset(back.data(), 0, static_cast<std::size_t>(back.bytes()));
    std::vector<Ticket> tickets;
    for (std::int64_t i = 0; i < kPieces; ++i) {
      tickets.push_back(engine->submit({.offset = i * kPiece, .data = back.at(i * kPiece), .bytes = kPiece}));
    }
    return tickets;
  };
  // True for those that say so; each of them must be right.
  const auto settle = [&](const std::vector<Ticket>& tickets) {
    std::vector<bool> good;
    for (std::int64_t i = 0; i < kPieces; ++i) {
      const Result result = engine->wait(tickets[static_cast<std::size_t>(i)]);
      good.push_back(result.ok());
      // EIO: of the page that is cut in two, less than a page comes however often it is asked for.
      EXPECT_TRUE(result.ok() || result.error == ENODATA || result.error == EIO) << errno_text(result.error);
      if (!result.ok()) continue;
      EXPECT_EQ(std::memcmp(back.at(i * kPiece), out.at(i * kPiece), static_cast<std::size_t>(kPiece)), 0)
          << i;
    }
    return good;
  };
  const auto in_flight = read_all();
  for (const auto& entry : fs::directory_iterator(directory.path())) {
    if (entry.path().extension() == ".tier") fs::resize_file(entry.path(), kKept * kPiece + kPage / 2);
  }
  const auto during = settle(in_flight), after = settle(read_all());
  for (std::int64_t i = 0; i < kPieces; ++i) {
    if (i < kKept) {
      EXPECT_TRUE(during[static_cast<std::size_t>(i)]) << i;
    }
    EXPECT_EQ(after[static_cast<std::size_t>(i)], i < kKept) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Truncated,
                         testing::Values(Backend::kUring, Backend::kLibaio, Backend::kThreads),
                         [](const auto& c) { return std::string(name_of(c.param)); });

// One user's files of such names stop no run of another, where all may write to the directory.
[[noreturn]] void take_beside_others(const std::string& directory) {
  constexpr uid_t kUser = 61235;
  if (setresgid(kUser, kUser, kUser) != 0 || setresuid(kUser, kUser, kUser) != 0) _exit(2);
  try {
    const DriveFile file({.path = directory, .bytes = 64 * kPage});
  } catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    _exit(1);
  }
  _exit(0);
}

TEST_F(DriveFileTest, FilesOfOtherUsersStopNoRun) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  if (geteuid() != 0) GTEST_SKIP() << "needs to start as root to become another user";
  ASSERT_EQ(chmod(path().c_str(), 01777), 0);
  const std::string closed = in("ziggurat-00000000000000a0.tier"),
                    open_one = in("ziggurat-00000000000000a1.tier"),
                    used = in("ziggurat-00000000000000a2.tier"), pipe = in("ziggurat-00000000000000a3.tier"),
                    link = in("ziggurat-00000000000000a4.tier");
  for (const std::string& name : {closed, open_one, used}) write_file(name, "of another user");
  ASSERT_EQ(chmod(closed.c_str(), 0), 0);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0666), 0);
  ASSERT_EQ(symlink("/etc/passwd", link.c_str()), 0);
  const OwnedFd lock = locked(used);
  EXPECT_EXIT(take_beside_others(path()), testing::ExitedWithCode(0), "a0.tier belongs to user 0 .*it stays");
  EXPECT_EQ(names().size(), 5u);
}

TEST_F(DriveFileTest, APipeInTheKeptFilesPlaceIsRefusedAtOnce) {
  const std::string name = "ziggurat-0123456789abcdef.kept";
  ASSERT_EQ(mkfifo(in(name).c_str(), 0600), 0);
  const Error e = refusal_of({.path = path(), .bytes = 64 * kPage, .kept = name});
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.what(), "is no regular file");
  EXPECT_EQ(names(), std::vector<std::string>{name});
}

}  // namespace
}  // namespace zg::io::test
