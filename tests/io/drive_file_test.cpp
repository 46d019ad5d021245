// The files behind drives: who may use a directory, what a killed run leaves, and what is never touched.
#include "io/drive_file.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <optional>
#include <vector>

#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSomeTier = "ziggurat-0123456789abcdef.tier";

void write_text(const fs::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary) << text;
}

std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string host_name() {
  char name[256] = {};
  EXPECT_EQ(gethostname(name, sizeof(name) - 1), 0);
  return name;
}

// Opened and locked, as by somebody else.
OwnedFd locked(const fs::path& file) {
  OwnedFd fd(open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  EXPECT_EQ(lock_now(fd.get()), 0) << errno_text(errno);
  return fd;
}

class DriveFileTest : public testing::Test {
 protected:
  std::unique_ptr<DriveFile> tier(std::int64_t bytes = 64 * kPage) const {
    return std::make_unique<DriveFile>(DriveOptions{.path = path(), .bytes = bytes});
  }
  // Why a tier cannot be had in `where` (else: the directory).
  Error refusal(std::int64_t bytes = 64 * kPage) const {
    return refusal_of({.path = path(), .bytes = bytes});
  }
  static Error refusal_of(const DriveOptions& options) {
    try {
      const DriveFile file(options);
    } catch (const Error& e) {
      return e;
    }
    ADD_FAILURE() << "not refused: " << options.path;
    return {Errc::kIo, "", ""};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(path())) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }
  fs::path data_file() const {
    for (const std::string& name : names()) {
      if (name.rfind("ziggurat-", 0) == 0) return in(name);
    }
    ADD_FAILURE() << "no data file";
    return {};
  }
  fs::path in(const std::string& name) const { return fs::path(path()) / name; }
  fs::path lock_file() const { return in("ziggurat.lock"); }
  const std::string& path() const { return directory_.path(); }
  bool is_empty() const { return directory_.is_empty(); }

 private:
  TempDir directory_;
};

bool says(const Error& e, const std::string& text) {
  return std::string(e.what()).find(text) != std::string::npos;
}

TEST_F(DriveFileTest, ATierIsTwoFilesWhileItLives) {
  auto file = tier(10 * kPage + 1);
  EXPECT_EQ(file->bytes(), 11 * kPage);
  EXPECT_EQ(file->path(), path());
  ASSERT_EQ(names().size(), 2u);
  EXPECT_EQ(names()[1], "ziggurat.lock");
  struct stat info {};
  ASSERT_EQ(stat(data_file().c_str(), &info), 0);
  EXPECT_EQ(info.st_size, 11 * kPage);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(info.st_blocks * 512 < info.st_size, !file->sparse_because().empty());
  const std::string owner = text_of(lock_file());
  EXPECT_EQ(owner.rfind(fmt::format("pid {}\nhost {}\nsince 20", getpid(), host_name()), 0), 0u) << owner;
  EXPECT_NE(owner.find(fmt::format("\nfile {}\ncommand ", data_file().filename().string())),
            std::string::npos)
      << owner;
  EXPECT_NE(owner.find("zg_test_io"), std::string::npos) << owner;
  DriveFile moved = std::move(*file);
  file.reset();
  EXPECT_EQ(names().size(), 2u);
  { const DriveFile last = std::move(moved); }
  EXPECT_TRUE(is_empty());
}

TEST_F(DriveFileTest, TheNamesGoAlsoWhenTheCurrentDirectoryIsAnother) {
  const fs::path before = fs::current_path();
  fs::current_path(path());
  auto file = std::make_unique<DriveFile>(DriveOptions{.path = ".", .bytes = kPage});
  fs::current_path(before);
  file.reset();
  EXPECT_TRUE(is_empty());
}

TEST_F(DriveFileTest, AScratchFileHasNoNameAndNoLock) {
  const auto owner = tier();
  const DriveFile one({.path = path(), .bytes = kPage, .kind = FileKind::kScratch});
  const DriveFile two({.path = path(), .bytes = kPage, .kind = FileKind::kScratch});
  EXPECT_EQ(names().size(), 2u) << "the tier's";
  EXPECT_EQ(pwrite(one.fd(), Memory(kPage).data(), kPage, 0), kPage);
}

TEST_F(DriveFileTest, ASecondOneInThisProcessIsRefused) {
  const auto first = tier();
  const auto before = names();
  const std::string owner = text_of(lock_file());
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), path());
  EXPECT_TRUE(says(e, "in use by this process")) << e.what();
  EXPECT_EQ(names(), before);
  EXPECT_EQ(text_of(lock_file()), owner);
}

TEST_F(DriveFileTest, TwoDrivesOfAnEngineNeedTwoDirectories) {
  try {
    make_engine({}, {{path(), kMiB}, {path() + "/", kMiB}});
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_TRUE(says(e, "in use by this process")) << e.what();
  }
  EXPECT_TRUE(is_empty());
}

TEST_F(DriveFileTest, TheRefusedHearWhoItIs) {
  const OwnedFd theirs = locked(lock_file());
  const std::string text =
      "pid 4711\nhost elsewhere\nsince 2026-01-02T03:04:05Z\nfile x\ncommand ziggurat train a.json\ncommand "
      "old\n";
  write_text(lock_file(), text);
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), path());
  EXPECT_EQ(e.message(),
            "is in use by ziggurat, pid 4711 on elsewhere since 2026-01-02T03:04:05Z: ziggurat train a.json");
  EXPECT_FALSE(e.hint().empty());
  EXPECT_EQ(text_of(lock_file()), text);
}

TEST_F(DriveFileTest, AnOwnerWhoSaysNothingIsStillAClearError) {
  const OwnedFd theirs = locked(lock_file());
  for (const std::string& text : {std::string(), std::string("\x1b[2J\0pid\npid x\n\xff", 16)}) {
    write_text(lock_file(), text);
    const Error e = refusal();
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), path());
    EXPECT_TRUE(says(e, "in use by another run")) << e.what();
    EXPECT_EQ(text_of(lock_file()), text);
  }
  write_text(lock_file(), "pid 1\nhost a\x1b[2Jb\n");
  EXPECT_EQ(refusal().message().find('\x1b'), std::string::npos);
}

TEST_F(DriveFileTest, AChildThatOutlivesItsRunHoldsTheLock) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  const OwnedFd theirs = locked(lock_file());
  write_text(lock_file(), fmt::format("pid {}\nhost {}\ncommand train\n", gone, host_name()));
  EXPECT_TRUE(says(refusal(), "by a child of a run of ziggurat that has ended")) << refusal().what();
}

TEST_F(DriveFileTest, ReclaimsWhatAKilledRunLeft) {
  write_text(lock_file(), fmt::format("pid 4711\nhost h\nsince s\nfile {}\ncommand train a.json\n{}",
                                      kSomeTier, std::string(2000, 'x')));
  write_text(in(kSomeTier), std::string(3 * kPage, 'x'));
  testing::internal::CaptureStderr();
  auto file = tier();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(fmt::format(
                "info: reclaimed 12.0 KiB in {}, left by pid 4711 (train a.json) that did not end properly",
                path())),
            std::string::npos)
      << log;
  EXPECT_EQ(names().size(), 2u);
  EXPECT_FALSE(fs::exists(in(kSomeTier)));
  EXPECT_EQ(text_of(lock_file()).find("xx"), std::string::npos) << "the old text's end";
  file.reset();
  EXPECT_TRUE(is_empty());
}

// Another run was killed before: the lock file's pid is not to blame for these.
TEST_F(DriveFileTest, BlamesNobodyWithoutEvidence) {
  write_text(lock_file(), fmt::format("pid 4711\nfile {}\n", "ziggurat-ffffffffffffffff.tier"));
  write_text(in(kSomeTier), "x");
  testing::internal::CaptureStderr();
  tier();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("left by a run that did not end properly"), std::string::npos) << log;
  EXPECT_TRUE(is_empty());
  testing::internal::CaptureStderr();
  tier();
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("reclaimed"), std::string::npos);
}

TEST_F(DriveFileTest, TouchesNothingElse) {
  const std::vector<std::string> canaries = {
      "ziggurat-0123.tier",
      "ziggurat-0123456789abcdeg.tier",
      "ziggurat-0123456789ABCDEF.tier",
      "ziggurat-0123456789abcdef.tier.bak",
      "ziggurat-0123456789abcdef0.tier",
      "ziggurat-0123456789abcde.tier",
      "xziggurat-0123456789abcdef.tier",
      "ziggurat-0123456789abcdef_tier",
      "ziggurat_0123456789abcdef.tier",
      ".ziggurat-XXXXXX",
      "foo.tier",
  };
  for (const std::string& name : canaries) write_text(in(name), "canary " + name);
  fs::create_directory(in("ziggurat-00000000000000d0.tier"));
  write_text(in("ziggurat-00000000000000d0.tier") / kSomeTier, "canary");
  fs::create_symlink("foo.tier", in("ziggurat-00000000000000e0.tier"));
  ASSERT_EQ(mkfifo(in("ziggurat-00000000000000f0.tier").c_str(), 0600), 0);
  const auto before = names();
  write_text(in(kSomeTier), "leftover");
  write_text(in("ziggurat-fedcba9876543210.tier"), "leftover");
  tier();
  EXPECT_EQ(names(), before);
  for (const std::string& name : canaries) EXPECT_EQ(text_of(in(name)), "canary " + name);
  EXPECT_EQ(text_of(in("ziggurat-00000000000000d0.tier") / kSomeTier), "canary");
  EXPECT_TRUE(fs::is_symlink(in("ziggurat-00000000000000e0.tier")));
}

// A second name of the same file is somebody's wish to keep it.
TEST_F(DriveFileTest, ALeftoverWithASecondNameKeepsItsBytes) {
  write_text(in("kept"), "canary");
  fs::create_hard_link(in("kept"), in(kSomeTier));
  tier();
  EXPECT_EQ(names(), std::vector<std::string>{"kept"});
  EXPECT_EQ(text_of(in("kept")), "canary");
}

TEST_F(DriveFileTest, NothingIsReclaimedWhereOneLives) {
  const std::string dead[] = {"ziggurat-0000000000000000.tier", "ziggurat-ffffffffffffffff.tier"};
  for (const std::string& name : dead) write_text(in(name), "dead");
  const OwnedFd living = locked(in(kSomeTier));
  write_text(in(kSomeTier), "living");
  const auto before = names();
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), in(kSomeTier));
  EXPECT_TRUE(says(e, "run that lives")) << e.what();
  EXPECT_EQ(names(), before);
  EXPECT_EQ(text_of(in(kSomeTier)), "living");
}

TEST_F(DriveFileTest, ALockFileRemovedByHandFoolsNobody) {
  auto first = tier();
  const fs::path data = data_file();
  fs::remove(lock_file());
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), data);
  EXPECT_EQ(names(), std::vector<std::string>{data.filename()});
  // Now somebody else's has that name; the first one's end must not take it.
  const OwnedFd theirs = locked(lock_file());
  first.reset();
  EXPECT_EQ(names(), std::vector<std::string>{"ziggurat.lock"});
}

TEST_F(DriveFileTest, ADataFileThatWasReplacedIsNotOurs) {
  auto first = tier();
  const fs::path data = data_file();
  fs::remove(data);
  write_text(data, "canary");
  first.reset();
  EXPECT_EQ(names(), std::vector<std::string>{data.filename()});
  EXPECT_EQ(text_of(data), "canary");
}

TEST_F(DriveFileTest, AForkedChildRemovesNothing) {
  auto first = tier();
  const fs::path data = data_file();
  const pid_t child = fork();
  if (child == 0) {
    first.reset();
    _exit(0);
  }
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(names().size(), 2u);
  // Nor lets go of the parent's locks.
  for (const fs::path& file : {lock_file(), data}) {
    const OwnedFd theirs(open(file.c_str(), O_RDWR | O_CLOEXEC));
    EXPECT_EQ(lock_now(theirs.get()), EWOULDBLOCK) << file;
  }
  EXPECT_TRUE(says(refusal(), "in use by this process"));
}

TEST(MayLiveElsewhere, OnNetworkFileSystemsAndOnAnotherHostAlone) {
  constexpr std::int64_t kNfs = 0x6969, kExt4 = 0xEF53, kXfs = 0x58465342, kTmpfs = 0x01021994;
  for (const std::int64_t type :
       {kNfs, std::int64_t{0x517B}, std::int64_t{0xFE534D42}, std::int64_t{0xFF534D42},
        std::int64_t{0x01021997}, std::int64_t{0x65735546}, std::int64_t{0x00C36400},
        std::int64_t{0x0BD00BD0}, std::int64_t{0x47504653}}) {
    EXPECT_TRUE(is_network_file_system(type)) << std::hex << type;
  }
  // As where f_type is signed and 32 bits wide.
  EXPECT_TRUE(is_network_file_system(static_cast<std::int32_t>(0xFF534D42u)));
  for (const std::int64_t type : {kExt4, kXfs, kTmpfs, std::int64_t{0x9123683E}, std::int64_t{0x794C7630}})
    EXPECT_FALSE(is_network_file_system(type)) << std::hex << type;
  EXPECT_TRUE(may_live_elsewhere({.pid = 1, .host = "there"}, "here", kNfs));
  EXPECT_FALSE(may_live_elsewhere({.pid = 1, .host = "there"}, "here", kExt4));
  EXPECT_FALSE(may_live_elsewhere({.pid = 1, .host = "here"}, "here", kNfs));
  EXPECT_FALSE(may_live_elsewhere({}, "here", kNfs));  // the lock file says nothing
}

// Its locks are not seen from here: that all of its files can be locked says nothing.
TEST_F(DriveFileTest, WhatAnotherHostLeftOnANetworkFileSystemStays) {
  constexpr std::int64_t kNfs = 0x6969;
  const std::string owner = fmt::format(
      "pid 4711\nhost elsewhere\nsince 2026-01-02T03:04:05Z\nfile {}\ncommand ziggurat train a.json\n",
      kSomeTier);
  write_text(lock_file(), owner);
  write_text(in(kSomeTier), "perhaps alive");
  const auto before = names();
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      DriveLock::take(path(), kNfs);
      ADD_FAILURE() << "not refused";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kUsage);
      EXPECT_EQ(e.where(), path());
      EXPECT_TRUE(says(e, "pid 4711 on elsewhere since 2026-01-02T03:04:05Z: ziggurat train a.json"))
          << e.what();
      EXPECT_TRUE(says(e, "end that run")) << e.what();
      EXPECT_TRUE(says(e, "by hand")) << e.what();
    }
    EXPECT_EQ(names(), before);
    EXPECT_EQ(text_of(lock_file()), owner);
    EXPECT_EQ(text_of(in(kSomeTier)), "perhaps alive");
  }
  // As it says: without the files the directory is free; and our own host's are reclaimed there too.
  fs::remove(in(kSomeTier));
  DriveLock::take(path(), kNfs);
  EXPECT_TRUE(is_empty());
  write_text(lock_file(), fmt::format("pid 4711\nhost {}\nsince s\nfile {}\n", host_name(), kSomeTier));
  write_text(in(kSomeTier), "dead");
  DriveLock::take(path(), kNfs);
  EXPECT_TRUE(is_empty());
}

TEST_F(DriveFileTest, AForeignFileNamedLikeTheLockIsLeftAlone) {
  const auto expect_refused = [&](const std::string& text) {
    const Error e = refusal();
    EXPECT_EQ(e.code(), Errc::kUsage) << e.what();
    EXPECT_EQ(e.where(), lock_file());
    EXPECT_TRUE(says(e, text)) << e.what();
  };
  write_text(lock_file(), "[package]\nname = x\n");
  expect_refused("is no lock file of ziggurat's");
  EXPECT_EQ(text_of(lock_file()), "[package]\nname = x\n");
  fs::remove(lock_file());

  write_text(in("other"), "pid 1\n");
  fs::create_hard_link(in("other"), lock_file());
  expect_refused("is no lock file of ziggurat's");
  fs::remove(lock_file());
  fs::create_symlink("other", lock_file());
  expect_refused("is a symbolic link");
  fs::remove(lock_file());
  EXPECT_EQ(text_of(in("other")), "pid 1\n");

  fs::create_directory(lock_file());
  expect_refused("cannot be opened: Is a directory");
  fs::remove(lock_file());
  ASSERT_EQ(mkfifo(lock_file().c_str(), 0600), 0);
  expect_refused("is no lock file of ziggurat's");
}

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
  EXPECT_TRUE(says(e, "needs 2.0 MiB, 1020.0 KiB free")) << e.what();
  EXPECT_TRUE(is_empty());
}

// Not even the lock file's text has room before what a killed run left is gone.
TEST_F(SmallDisk, FullOfLeftovers) {
  write_text(in(kSomeTier), std::string(kMiB, 'x'));
  ASSERT_EQ(free_bytes_of(path()), 0);
  auto file = tier(kMiB / 2);
  EXPECT_EQ(text_of(lock_file()).rfind("pid ", 0), 0u);
  file.reset();
  EXPECT_TRUE(is_empty());
}

TEST_F(SmallDisk, FullOfOtherThings) {
  write_text(in("other"), std::string(kMiB, 'x'));
  const Error e = refusal(kPage);
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_TRUE(says(e, "No space left")) << e.what();
  EXPECT_EQ(names(), std::vector<std::string>{"other"});
}

// Of a directory that takes new files and lets none go (chattr +a).
TEST_F(DriveFileTest, ALeftoverThatCannotBeRemovedIsNamed) {
  write_text(in(kSomeTier), "leftover");
  const OwnedFd directory(open(path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  int flags = 0;
  ASSERT_EQ(ioctl(directory.get(), FS_IOC_GETFLAGS, &flags), 0);
  const int keeping = flags | FS_APPEND_FL;
  if (ioctl(directory.get(), FS_IOC_SETFLAGS, &keeping) != 0) GTEST_SKIP() << "chattr: " << errno_text(errno);
  const Error e = refusal();
  ASSERT_EQ(ioctl(directory.get(), FS_IOC_SETFLAGS, &flags), 0);
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), in(kSomeTier));
  EXPECT_TRUE(says(e, "Operation not permitted")) << e.what();
}

// From here on this process gets ENOLCK for flock, as on a network file system without locks.
void forbid_flock() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_flock, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(ENOLCK)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = sizeof(code) / sizeof(code[0]), .filter = code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    _exit(77);
}

TEST_F(DriveFileTest, WithoutLocksThereIsNoTier) {
  const auto attempt = [&] {
    forbid_flock();
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
    EXPECT_TRUE(says(e, text)) << e.what();
  }
};

TEST_F(ExistingFile, HasItsSizeInWholePagesAndKeepsIt) {
  const std::string text(static_cast<std::size_t>(3 * kPage + 5), 'x');
  write_text(in("file"), text);
  { EXPECT_EQ(DriveFile(existing("file")).bytes(), 3 * kPage); }
  { EXPECT_EQ(DriveFile(existing("file", kPage + 1)).bytes(), 2 * kPage); }
  EXPECT_EQ(text_of(in("file")), text);
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
  const std::string now = text_of(in("file"));
  EXPECT_EQ(now.size(), text.size());
  EXPECT_EQ(now.substr(kPage, kPage), std::string(kPage, 'y'));
  EXPECT_EQ(now.substr(2 * kPage), text.substr(2 * kPage));
}

TEST_F(ExistingFile, MustBeAFileOfThatSize) {
  write_text(in("small"), std::string(kPage - 1, 'x'));
  write_text(in("file"), std::string(2 * kPage + 5, 'x'));
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
  write_text(in("file"), std::string(kPage, 'x'));
  {
    const DriveFile first(existing("file"));
    expect_refused(existing("file"), "is in use by another run");
  }
  const DriveFile again(existing("file"));
}

TEST_F(ExistingFile, HolesAreSaid) {
  write_text(in("file"), std::string(kPage, 'x'));
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

}  // namespace
}  // namespace zg::io::test
