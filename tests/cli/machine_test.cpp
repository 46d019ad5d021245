// Machines that lack something: each lack is named, or survived with "auto" and said so.
#include <fcntl.h>
#include <linux/magic.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "cli/fixture.hpp"
#include "support/places.hpp"

namespace zg::cli_test {
namespace {

// A file system of a few bytes, mounted where only this process and its children see it.
class SmallDisk {
 public:
  // tmpfs; empty optional where mounting is not allowed.
  static std::optional<SmallDisk> in_memory(const std::string& directory, const std::string& size) {
    if (!apart()) return std::nullopt;
    fs::create_directories(directory);
    if (mount("none", directory.c_str(), "tmpfs", 0, ("size=" + size).c_str()) != 0) return std::nullopt;
    return SmallDisk(directory);
  }
  // ext4 in a file, which takes root, loop devices and mkfs.
  static std::optional<SmallDisk> on_loop(const std::string& directory, std::uintmax_t bytes) {
    if (geteuid() != 0 || !apart()) return std::nullopt;
    fs::create_directories(directory);
    const std::string image = directory + ".img";
    std::ofstream(image).close();
    fs::resize_file(image, bytes);
    const std::string command = "(mkfs.ext4 -q -F -m 0 -O ^has_journal '" + image + "' && mount -o loop '" +
                                image + "' '" + directory + "') >/dev/null 2>&1";
    if (std::system(command.c_str()) != 0) return std::nullopt;
    return SmallDisk(directory);
  }
  SmallDisk(SmallDisk&& other) noexcept : directory_(std::exchange(other.directory_, {})) {}
  ~SmallDisk() {
    if (!directory_.empty()) umount2(directory_.c_str(), MNT_DETACH);
  }

  std::int64_t free_bytes() const {
    struct statvfs info {};
    EXPECT_EQ(statvfs(directory_.c_str(), &info), 0);
    return static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
  }
  // Until no more than `left` bytes are free.
  void fill(std::int64_t left) const {
    std::ofstream out(directory_ + "/ballast", std::ios::binary);
    const std::string block(4096, 'x');
    while (free_bytes() > left &&
           out.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
    out.close();
    sync();  // what writing it out will take, or give back, is counted now
  }

 private:
  explicit SmallDisk(std::string directory) : directory_(std::move(directory)) {}
  static bool apart() {
    return unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  }
  std::string directory_;
};

const Strings kTiers{"tiers.device=400KiB", "tiers.host=400KiB"};
Strings with(const Strings& overrides) {
  return Strings{"train", "config.json"} + sets(kTiers + overrides);
}

TEST_F(CliTest, ATierOnAFullDiskIsRefused) {
  const auto disk = SmallDisk::on_loop(path("disk"), 16 << 20);
  if (!disk) GTEST_SKIP() << "no ext4 can be mounted on a loop device here";
  disk->fill(200 << 10);
  const std::int64_t before = disk->free_bytes();
  const Outcome o = run(with({"tiers.nvme.0.path=disk"}));
  EXPECT_EQ(o.code, 1) << o.err;
  const std::string message = message_of(o);
  for (const char* part : {"disk: ", "needs", "free", "No space left on device"}) {
    EXPECT_HAS(message, part);
  }
  EXPECT_EQ(o.out, "");
  expect_nothing_half_written();
  EXPECT_EQ(disk->free_bytes(), before);
}

TEST_F(CliTest, ASmallDiskThatHoldsTheTierSuffices) {
  const auto disk = SmallDisk::on_loop(path("disk"), 16 << 20);
  if (!disk) GTEST_SKIP() << "no ext4 can be mounted on a loop device here";
  disk->fill(3 << 20);  // less than the link would be measured with on a large one
  const std::int64_t before = disk->free_bytes();
  const Outcome o = run(with({"tiers.nvme.0.path=disk"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(disk->free_bytes(), before);
}

// As a killed run leaves a drive that it filled.
void fill_with_leftover(const SmallDisk& disk, const std::string& directory) {
  disk.fill(0);
  fs::rename(directory + "/ballast", directory + "/ziggurat-0123456789abcdef.tier");
}

TEST_F(CliTest, ADriveThatAKilledRunHasFilledIsReclaimed) {
  const auto disk = SmallDisk::in_memory(path("disk"), "16m");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  const std::int64_t before = disk->free_bytes();
  fill_with_leftover(*disk, path("disk"));
  EXPECT_LT(disk->free_bytes(), 4096);
  const Outcome o = run(with({"tiers.nvme.0.path=disk"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.err, "reclaimed 16.0 MiB in disk");
  EXPECT_EQ(disk->free_bytes(), before);
}

TEST_F(CliTest, ADirectoryInUseIsLeftAloneFromTheStart) {
  const auto disk = SmallDisk::in_memory(path("disk"), "16m");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  write("disk/ziggurat.lock", "pid 1\nhost elsewhere\nsince yesterday\ncommand train of somebody\n");
  const int lock = open(path("disk/ziggurat.lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(lock, LOCK_EX | LOCK_NB), 0);
  // So full that a write without a check of the space would fail.
  fill_with_leftover(*disk, path("disk"));
  const Outcome o = run(with({"tiers.nvme.0.path=disk"}));
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_HAS(message_of(o), "disk: is in use by ziggurat, pid 1 on elsewhere") << o.err;
  EXPECT_TRUE(fs::exists(path("disk/ziggurat-0123456789abcdef.tier")));
  expect_nothing_half_written();
  close(lock);
}

TEST_F(CliTest, DrivesThatShareASmallDiskShareWhatIsFree) {
  const auto disk = SmallDisk::in_memory(path("disk"), "64m");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  fs::create_directories(path("disk/a"));
  fs::create_directories(path("disk/b"));
  const Strings drives{"tiers.nvme.0.path=disk/a", "tiers.nvme.1.path=disk/b"};
  const auto refused_with = [&](std::int64_t free) {
    disk->fill(free);
    const Outcome o = run(with(drives));
    EXPECT_EQ(o.code, 1) << o.err;
    for (const char* part : {"disk/a: ", "disk/b: ", "shared with disk/a", "No space left on device"})
      EXPECT_HAS(message_of(o), part) << o.err;
    EXPECT_TRUE(fs::is_empty(path("disk/a")) && fs::is_empty(path("disk/b")));
    expect_nothing_half_written();
    return message_of(o);
  };
  const std::string message = refused_with(100 << 10);
  const std::int64_t needed = std::stoll(message.substr(message.find('(') + 1));
  ASSERT_GT(needed, 512 << 10) << message;
  fs::remove(path("disk/ballast"));
  refused_with(needed - 8192);

  // Enough for the run, and not for half as much again; lock files need some pages, too.
  fs::remove(path("disk/ballast"));
  disk->fill(needed + needed / 20 + (64 << 10));
  const Outcome o = run(with(drives));
  EXPECT_EQ(o.code, 0) << o.err;
}

// Where the room goes later, the model is saved elsewhere: OutputDirectories of tests/train.
TEST_F(CliTest, AModelThatFindsNoSpaceIsRefusedBeforeTheFirstStep) {
  // Room for tokens and log, not for the model's 138 KiB.
  const auto disk = SmallDisk::in_memory(path("disk"), "100k");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  const Outcome o = run(with({"tiers.nvme.0.path=.", "output.dir=disk/out"}));
  EXPECT_EQ(o.code, 2) << o.err;
  const std::string message = message_of(o);
  EXPECT_HAS(message, "output.dir disk/out: has");
  EXPECT_HAS(message, "the model and the log take");
  EXPECT_FALSE(fs::exists(path("disk/out/model")));
  EXPECT_FALSE(fs::exists(path("disk/out/log.jsonl")));
  expect_nothing_half_written();
}

TEST_F(CliTest, ATimelineThatFindsNoSpaceLeavesTheOldOne) {
  const auto disk = SmallDisk::in_memory(path("disk"), "16k");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  write("disk/t.json", "the old one");
  const Outcome o = run(with({"tiers.nvme.0.path=."}) + Strings{"--trace", "disk/t.json"});
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_HAS(message_of(o), "disk/t.json: cannot be written: No space left on device");
  EXPECT_EQ(read("disk/t.json"), "the old one");
  EXPECT_EQ(std::distance(fs::directory_iterator(path("disk")), fs::directory_iterator()), 1);
  EXPECT_TRUE(fs::exists(path("out/model/model.safetensors")));
}

TEST_F(CliTest, TokensThatFindNoSpaceAreNotHalfWritten) {
  const auto disk = SmallDisk::in_memory(path("disk"), "16k");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  const Outcome o = run(with({"tiers.nvme.0.path=.", "output.dir=disk/out"}));
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_HAS(message_of(o), "No space left on device") << o.err;
  EXPECT_FALSE(fs::exists(path("disk/out/tokens/train.bin")));
  expect_nothing_half_written();
}

TEST_F(CliTest, ATierWithoutODirectIsSurvivedAndSaid) {
  std::string where = "/dev/shm";
  struct statfs info {};
  if (statfs(where.c_str(), &info) != 0 || info.f_type != TMPFS_MAGIC || access(where.c_str(), W_OK) != 0) {
    GTEST_SKIP() << "/dev/shm is no tmpfs that can be written";
  }
  train({"output.dir=plain"});
  const Outcome o = run(with({"tiers.nvme.0.path=" + where}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.err, "/dev/shm: without O_DIRECT (tmpfs");
  EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));

  const Outcome required =
      run(with({"tiers.nvme.0.path=" + where, "aio.backend=threads", "output.dir=strict"}));
  EXPECT_EQ(required.code, 1) << required.err;
  EXPECT_HAS(message_of(required), "O_DIRECT is required") << required.err;
}

// As io_uring's and libaio's calls fail under a container's default profile.
void forbid_io_uring() {
  test::forbid_calls({SYS_io_uring_setup}, EPERM);
}
void forbid_io_uring_and_libaio() {
  test::forbid_calls({SYS_io_uring_setup, SYS_io_setup}, EPERM);
}

// The next best does the I/O, and says why the better ones do not; the one that is required is missed.
class WithoutBackends : public CliTest {
 protected:
  bool trains(void (*in_child)(), const Strings& missing, const std::string& taken) const {
    train({"output.dir=plain"});
    const Outcome o = run(Launch{.arguments = with({"tiers.nvme.0.path=."}), .in_child = in_child});
    if (o.code == test::kCannotForbid) return false;
    EXPECT_EQ(o.code, 0) << o.err;
    for (const std::string& name : missing) {
      const std::size_t at = o.err.find(name + " is unavailable for I/O: ");
      EXPECT_NE(at, std::string::npos) << o.err;
      if (at == std::string::npos) continue;
      const std::string line = o.err.substr(at, o.err.find('\n', at) - at);
      EXPECT_HAS(line, "Operation not permitted");
    }
    EXPECT_HAS(o.err, "I/O        " + taken + " (");
    EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));
    fs::remove_all(path("out"));
    return true;
  }
  void expect_missed(void (*in_child)(), const std::string& backend) const {
    const Outcome o = run(
        Launch{.arguments = with({"tiers.nvme.0.path=.", "aio.backend=" + backend}), .in_child = in_child});
    EXPECT_EQ(o.code, 1) << o.err;
    const std::string message = message_of(o);
    EXPECT_HAS(message, backend);
    EXPECT_HAS(message, "Operation not permitted");
    expect_nothing_half_written();
  }
  // What `probe` says of the back ends.
  void expect_probed(void (*in_child)(), const Strings& lines) const {
    const Outcome o = run(Launch{.arguments = {"probe", ".", "--size", "0"}, .in_child = in_child});
    EXPECT_EQ(o.code, 0) << o.err;
    for (const std::string& line : lines) EXPECT_HAS(o.out, line);
  }
};

TEST_F(WithoutBackends, WithoutIoUringLibaioDoesTheIo) {
  if (!trains(forbid_io_uring, {"io_uring"}, "libaio"))
    GTEST_SKIP() << "seccomp filters are not allowed here";
  expect_missed(forbid_io_uring, "io_uring");
  expect_probed(forbid_io_uring, {"io_uring  does not work", "libaio    works", "threads   works"});
}

TEST_F(WithoutBackends, WithoutLibaioTooThreadsDoTheIo) {
  if (!trains(forbid_io_uring_and_libaio, {"io_uring", "libaio"}, "threads"))
    GTEST_SKIP() << "seccomp filters are not allowed here";
  expect_missed(forbid_io_uring_and_libaio, "io_uring");
  expect_missed(forbid_io_uring_and_libaio, "libaio");
  expect_probed(forbid_io_uring_and_libaio,
                {"io_uring  does not work", "libaio    does not work", "threads   works"});
}

// The program as a user without privileges.
void become_nobody() {
  if (geteuid() == 0 && (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0))
    _exit(125);
  if (access(test::built_program().c_str(), X_OK) != 0) _exit(125);
}

TEST_F(CliTest, DirectoriesThatMayNotBeWrittenAreNamed) {
  fs::create_directories(path("locked"));
  fs::create_directories(path("open"));
  fs::permissions(directory_, fs::perms(0755));
  fs::permissions(path("locked"), fs::perms(0555));
  fs::permissions(path("open"), fs::perms(0777));
  const struct {
    Strings arguments;
    const char* place;
  } cases[] = {
      {with({"output.dir=locked"}), "output.dir locked: "},
      {with({"output.dir=locked/run"}), "output.dir locked/run: "},
      {with({"output.dir=open/run", "tiers.nvme.0.path=locked"}), "locked: "},
      {with({"output.dir=open/run"}) + Strings{"--trace", "locked/t.json"}, "--trace locked/t.json: "},
      {{"probe", "locked", "--size", "0"}, "locked: "},
  };
  for (const auto& c : cases) {
    const Outcome o = run(Launch{.arguments = c.arguments, .in_child = become_nobody});
    if (o.code == 125) GTEST_SKIP() << "another user cannot run the program here";
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_HAS(message_of(o), c.place) << o.err;
    EXPECT_HAS(o.err, "Permission denied");
    expect_nothing_half_written();
    EXPECT_TRUE(fs::is_empty(path("locked")));
    EXPECT_FALSE(fs::exists(path("open/run/log.jsonl")));
  }
}

TEST_F(CliTest, AFileThatMayNotBeReadIsNamed) {
  fs::permissions(directory_, fs::perms(0777));
  fs::permissions(path("text.txt"), fs::perms::none);
  const Outcome o = run(Launch{.arguments = {"train", "config.json"}, .in_child = become_nobody});
  if (o.code == 125) GTEST_SKIP() << "another user cannot run the program here";
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_HAS(message_of(o), "text.txt") << o.err;
  EXPECT_HAS(o.err, "Permission denied");
  expect_nothing_half_written();
}

}  // namespace
}  // namespace zg::cli_test
