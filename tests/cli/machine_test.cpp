// Machines that lack something: each lack is named, or survived with "auto" and said so.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "cli/fixture.hpp"

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
    EXPECT_NE(message.find(part), std::string::npos) << message;
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

TEST_F(CliTest, AModelThatFindsNoSpaceIsNotHalfSaved) {
  // Room for tokens and log, not for the model's 138 KiB.
  const auto disk = SmallDisk::in_memory(path("disk"), "100k");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  const Outcome o = run(with({"tiers.nvme.0.path=.", "output.dir=disk/out"}));
  EXPECT_EQ(o.code, 1) << o.err;
  const std::string message = message_of(o);
  EXPECT_NE(message.find("disk/out/model"), std::string::npos) << message;
  EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(path("disk/out/model/model.safetensors")));
  expect_nothing_half_written();
  EXPECT_EQ(log("disk/out/log.jsonl").size(), 5u);  // the run itself is on record
}

TEST_F(CliTest, TokensThatFindNoSpaceAreNotHalfWritten) {
  const auto disk = SmallDisk::in_memory(path("disk"), "16k");
  if (!disk) GTEST_SKIP() << "nothing can be mounted here: " << std::strerror(errno);
  const Outcome o = run(with({"tiers.nvme.0.path=.", "output.dir=disk/out"}));
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(message_of(o).find("No space left on device"), std::string::npos) << o.err;
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
  EXPECT_NE(o.err.find("/dev/shm: without O_DIRECT (tmpfs"), std::string::npos) << o.err;
  EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));

  const Outcome required =
      run(with({"tiers.nvme.0.path=" + where, "aio.backend=threads", "output.dir=strict"}));
  EXPECT_EQ(required.code, 1) << required.err;
  EXPECT_NE(message_of(required).find("O_DIRECT is required"), std::string::npos) << required.err;
}

// io_uring_setup fails with EPERM, as under a container's default profile.
void forbid_io_uring() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{static_cast<unsigned short>(std::size(rules)), rules};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    _exit(125);
}

TEST_F(CliTest, WithoutIoUringThreadsDoTheIo) {
  train({"output.dir=plain"});
  const Outcome o = run(Launch{.arguments = with({"tiers.nvme.0.path=."}), .in_child = forbid_io_uring});
  if (o.code == 125) GTEST_SKIP() << "seccomp filters are not allowed here";
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("I/O through threads, as io_uring is unavailable"), std::string::npos) << o.err;
  EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));
  fs::remove_all(path("out"));

  const Outcome required = run(Launch{.arguments = with({"tiers.nvme.0.path=.", "aio.backend=io_uring"}),
                                      .in_child = forbid_io_uring});
  EXPECT_EQ(required.code, 1) << required.err;
  const std::string message = message_of(required);
  EXPECT_NE(message.find("io_uring"), std::string::npos) << message;
  EXPECT_NE(message.find("Operation not permitted"), std::string::npos) << message;
  expect_nothing_half_written();

  const Outcome probe = run(Launch{.arguments = {"probe", ".", "--size", "0"}, .in_child = forbid_io_uring});
  EXPECT_EQ(probe.code, 0) << probe.err;
  EXPECT_NE(probe.out.find("io_uring  does not work"), std::string::npos) << probe.out;
  EXPECT_NE(probe.out.find("threads   works"), std::string::npos) << probe.out;
}

// As a user who may not do everything.
void become_nobody() {
  if (geteuid() == 0 && (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0))
    _exit(125);
  if (access(ZG_BINARY, X_OK) != 0) _exit(125);
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
    EXPECT_NE(message_of(o).find(c.place), std::string::npos) << o.err;
    EXPECT_NE(o.err.find("Permission denied"), std::string::npos) << o.err;
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
  EXPECT_NE(message_of(o).find("text.txt"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("Permission denied"), std::string::npos) << o.err;
  expect_nothing_half_written();
}

}  // namespace
}  // namespace zg::cli_test
