// The files behind drives: who may use a directory, what a killed run leaves, and what is never touched.
#include "io/drive_file.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "drive_file_support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

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
  const std::string owner = read_file(lock_file());
  EXPECT_EQ(owner.rfind(fmt::format("pid {}\nhost {}\nsince 20", getpid(), host_name()), 0), 0u) << owner;
  EXPECT_HAS(owner, fmt::format("\nfile {}\ncommand ", data_file().filename().string()));
  EXPECT_HAS(owner, "zg_test_io");
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
  const std::string owner = read_file(lock_file());
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), path());
  EXPECT_HAS(e.what(), "in use by this process");
  EXPECT_EQ(names(), before);
  EXPECT_EQ(read_file(lock_file()), owner);
}

TEST_F(DriveFileTest, TwoDrivesOfAnEngineNeedTwoDirectories) {
  const Error e = error_of([&] { make_engine({}, {{path(), kMiB}, {path() + "/", kMiB}}); });
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.what(), "in use by this process");
  EXPECT_TRUE(is_empty());
}

TEST_F(DriveFileTest, TheRefusedHearWhoItIs) {
  const OwnedFd theirs = locked(lock_file());
  const std::string text =
      "pid 4711\nhost elsewhere\nsince 2026-01-02T03:04:05Z\nfile x\ncommand ziggurat train a.json\ncommand "
      "old\n";
  write_file(lock_file(), text);
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), path());
  EXPECT_EQ(e.message(),
            "is in use by ziggurat, pid 4711 on elsewhere since 2026-01-02T03:04:05Z: ziggurat train a.json");
  EXPECT_FALSE(e.hint().empty());
  EXPECT_EQ(read_file(lock_file()), text);
}

TEST_F(DriveFileTest, AnOwnerWhoSaysNothingIsStillAClearError) {
  const OwnedFd theirs = locked(lock_file());
  for (const std::string& text : {std::string(), std::string("\x1b[2J\0pid\npid x\n\xff", 16)}) {
    write_file(lock_file(), text);
    const Error e = refusal();
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), path());
    EXPECT_HAS(e.what(), "in use by another run");
    EXPECT_EQ(read_file(lock_file()), text);
  }
  write_file(lock_file(), "pid 1\nhost a\x1b[2Jb\n");
  EXPECT_EQ(refusal().message().find('\x1b'), std::string::npos);
}

TEST_F(DriveFileTest, AChildThatOutlivesItsRunHoldsTheLock) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  const OwnedFd theirs = locked(lock_file());
  write_file(lock_file(), fmt::format("pid {}\nhost {}\ncommand train\n", gone, host_name()));
  EXPECT_TRUE(has(refusal(), "by a child of a run of ziggurat that has ended")) << refusal().what();
}

TEST_F(DriveFileTest, ReclaimsWhatAKilledRunLeft) {
  write_file(lock_file(), fmt::format("pid 4711\nhost h\nsince s\nfile {}\ncommand train a.json\n{}",
                                      kSomeTier, std::string(2000, 'x')));
  write_file(in(kSomeTier), std::string(3 * kPage, 'x'));
  testing::internal::CaptureStderr();
  auto file = tier();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_HAS(
      log,
      fmt::format("info: reclaimed 12.0 KiB in {}, left by pid 4711 (train a.json) that did not end properly",
                  path()));
  EXPECT_EQ(names().size(), 2u);
  EXPECT_FALSE(fs::exists(in(kSomeTier)));
  EXPECT_HAS_NOT(read_file(lock_file()), "xx") << "the old text's end";
  file.reset();
  EXPECT_TRUE(is_empty());
}

// Another run was killed before: the lock file's pid is not to blame for these.
TEST_F(DriveFileTest, BlamesNobodyWithoutEvidence) {
  write_file(lock_file(), fmt::format("pid 4711\nfile {}\n", "ziggurat-ffffffffffffffff.tier"));
  write_file(in(kSomeTier), "x");
  testing::internal::CaptureStderr();
  tier();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_HAS(log, "left by a run that did not end properly");
  EXPECT_TRUE(is_empty());
  testing::internal::CaptureStderr();
  tier();
  EXPECT_HAS_NOT(testing::internal::GetCapturedStderr(), "reclaimed");
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
  for (const std::string& name : canaries) write_file(in(name), "canary " + name);
  fs::create_directory(in("ziggurat-00000000000000d0.tier"));
  write_file(in("ziggurat-00000000000000d0.tier") / kSomeTier, "canary");
  fs::create_symlink("foo.tier", in("ziggurat-00000000000000e0.tier"));
  ASSERT_EQ(mkfifo(in("ziggurat-00000000000000f0.tier").c_str(), 0600), 0);
  const auto before = names();
  write_file(in(kSomeTier), "leftover");
  write_file(in("ziggurat-fedcba9876543210.tier"), "leftover");
  tier();
  EXPECT_EQ(names(), before);
  for (const std::string& name : canaries) EXPECT_EQ(read_file(in(name)), "canary " + name);
  EXPECT_EQ(read_file(in("ziggurat-00000000000000d0.tier") / kSomeTier), "canary");
  EXPECT_TRUE(fs::is_symlink(in("ziggurat-00000000000000e0.tier")));
}

// A second name of the same file is somebody's wish to keep it.
TEST_F(DriveFileTest, ALeftoverWithASecondNameKeepsItsBytes) {
  write_file(in("kept"), "canary");
  fs::create_hard_link(in("kept"), in(kSomeTier));
  tier();
  EXPECT_EQ(names(), std::vector<std::string>{"kept"});
  EXPECT_EQ(read_file(in("kept")), "canary");
}

TEST_F(DriveFileTest, NothingIsReclaimedWhereOneLives) {
  const std::string dead[] = {"ziggurat-0000000000000000.tier", "ziggurat-ffffffffffffffff.tier"};
  for (const std::string& name : dead) write_file(in(name), "dead");
  const OwnedFd living = locked(in(kSomeTier));
  write_file(in(kSomeTier), "living");
  const auto before = names();
  const Error e = refusal();
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_EQ(e.where(), in(kSomeTier));
  EXPECT_HAS(e.what(), "run that lives");
  EXPECT_EQ(names(), before);
  EXPECT_EQ(read_file(in(kSomeTier)), "living");
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
  write_file(data, "canary");
  first.reset();
  EXPECT_EQ(names(), std::vector<std::string>{data.filename()});
  EXPECT_EQ(read_file(data), "canary");
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
    EXPECT_EQ(try_lock(theirs.get()), EWOULDBLOCK) << file;
  }
  EXPECT_TRUE(has(refusal(), "in use by this process"));
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
  write_file(lock_file(), owner);
  write_file(in(kSomeTier), "perhaps alive");
  const auto before = names();
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Error e = error_of([&] { DriveLock::take(path(), kNfs); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), path());
    EXPECT_HAS(e.what(), "pid 4711 on elsewhere since 2026-01-02T03:04:05Z: ziggurat train a.json");
    EXPECT_HAS(e.what(), "end that run");
    EXPECT_HAS(e.what(), "by hand");
    EXPECT_EQ(names(), before);
    EXPECT_EQ(read_file(lock_file()), owner);
    EXPECT_EQ(read_file(in(kSomeTier)), "perhaps alive");
  }
  // As it says: without the files the directory is free; and our own host's are reclaimed there too.
  fs::remove(in(kSomeTier));
  DriveLock::take(path(), kNfs);
  EXPECT_TRUE(is_empty());
  write_file(lock_file(), fmt::format("pid 4711\nhost {}\nsince s\nfile {}\n", host_name(), kSomeTier));
  write_file(in(kSomeTier), "dead");
  DriveLock::take(path(), kNfs);
  EXPECT_TRUE(is_empty());
}

TEST_F(DriveFileTest, AForeignFileNamedLikeTheLockIsLeftAlone) {
  const auto expect_refused = [&](const std::string& text) {
    const Error e = refusal();
    EXPECT_EQ(e.code(), Errc::kUsage) << e.what();
    EXPECT_EQ(e.where(), lock_file());
    EXPECT_HAS(e.what(), text);
  };
  write_file(lock_file(), "[package]\nname = x\n");
  expect_refused("is no lock file of ziggurat's");
  EXPECT_EQ(read_file(lock_file()), "[package]\nname = x\n");
  fs::remove(lock_file());

  write_file(in("other"), "pid 1\n");
  fs::create_hard_link(in("other"), lock_file());
  expect_refused("is no lock file of ziggurat's");
  fs::remove(lock_file());
  fs::create_symlink("other", lock_file());
  expect_refused("is a symbolic link");
  fs::remove(lock_file());
  EXPECT_EQ(read_file(in("other")), "pid 1\n");

  fs::create_directory(lock_file());
  expect_refused("cannot be opened: Is a directory");
  fs::remove(lock_file());
  ASSERT_EQ(mkfifo(lock_file().c_str(), 0600), 0);
  expect_refused("is no lock file of ziggurat's");
}

}  // namespace
}  // namespace zg::io::test
