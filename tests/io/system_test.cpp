// What the machine may lack: io_uring, O_DIRECT, space, a directory; and what the engine then says.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "io/queue.hpp"
#include "io/topology.hpp"
#include "support.hpp"
#include "support/process.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

EngineOptions small(Backend backend) {
  EngineOptions options;
  options.backend = backend;
  options.block_size = 4 * kPage;
  return options;
}

EngineOptions required(Backend backend) {
  EngineOptions options = small(backend);
  options.require = true;
  return options;
}

// Writes and reads back through the engine.
bool works(Engine& engine) {
  const Memory out(10 * kPage), back(10 * kPage);
  out.fill(0, out.bytes(), 1);
  const Result written =
      engine.wait(engine.submit({.op = Op::kWrite, .data = out.data(), .bytes = out.bytes()}));
  const Result read =
      engine.wait(engine.submit({.op = Op::kRead, .data = back.data(), .bytes = back.bytes()}));
  return written.ok() && read.ok() &&
         std::memcmp(out.data(), back.data(), static_cast<std::size_t>(out.bytes())) == 0;
}

void expect_error(const EngineOptions& options, const DriveOptions& drive, Errc code,
                  const std::string& text) {
  const Error e = error_of([&] { make_engine(options, {drive}); });
  EXPECT_EQ(e.code(), code) << e.what();
  EXPECT_HAS(e.what(), text);
  EXPECT_HAS(e.what(), drive.path);
}

// A file system, mounted while the object lives; the path is empty where this user may not mount.
class Mounted {
 public:
  Mounted(const char* type, const char* options, unsigned long flags = 0) {
    if (mount("zg-test", directory_.path().c_str(), type, flags, options) == 0) path_ = directory_.path();
  }
  ~Mounted() {
    // Fails while anything in the kernel still holds a file there: an engine that is gone must not.
    if (!path_.empty()) {
      EXPECT_EQ(umount(path_.c_str()), 0) << errno_text(errno);
    }
  }
  Mounted(const Mounted&) = delete;
  Mounted& operator=(const Mounted&) = delete;
  const std::string& path() const { return path_; }

 private:
  TempDir directory_;
  std::string path_;
};

enum class Forbidden { kUring, kUringAndLibaio };
void forbid(Forbidden what, int error) {
  if (what == Forbidden::kUring) return zg::test::forbid_calls({SYS_io_uring_setup}, error);
  zg::test::forbid_calls({SYS_io_uring_setup, SYS_io_setup}, error);
}

class ForbiddenCalls : public testing::TestWithParam<int> {
 protected:
  ForbiddenCalls() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

[[noreturn]] void run_with_auto(const std::string& directory, Forbidden what, int error) {
  forbid(what, error);
  log::set_level(log::Level::kInfo);
  auto engine = make_engine(small(Backend::kAuto), {{directory, kMiB}});
  fprintf(stderr, "%s\n", engine->describe().c_str());
  // The back ends that work come first; each of the others says why it does not.
  std::string ranks;
  for (const BackendProbe& probe : probe_backends("")) {
    ranks += fmt::format("{}{} ", probe.works ? "" : "!", name_of(probe.backend));
    if (!probe.works) fprintf(stderr, "probe: %s\n", probe.reason.c_str());
  }
  const bool only_uring = what == Forbidden::kUring;
  const bool ranked =
      ranks == (only_uring ? "libaio threads ram !io_uring " : "threads ram !io_uring !libaio ");
  const Backend expected = only_uring ? Backend::kLibaio : Backend::kThreads;
  const bool good = engine->backend() == expected && works(*engine) && ranked;
  engine.reset();
  std::filesystem::remove(directory);  // this process has its own, and ends without destructors
  _exit(good ? 0 : 1);
}

[[noreturn]] void run_with_required(const std::string& directory, Backend backend, int error) {
  forbid(Forbidden::kUringAndLibaio, error);
  try {
    make_engine(required(backend), {{directory, kMiB}});
  } catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    std::filesystem::remove(directory);
    _exit(3);
  }
  _exit(0);
}

bool has_libaio() {
  for (const BackendProbe& probe : probe_backends("")) {
    if (probe.backend == Backend::kLibaio) return probe.works;
  }
  return false;
}

TEST_P(ForbiddenCalls, AutoFallsBackToLibaioAndSaysWhy) {
  if (!has_libaio()) GTEST_SKIP() << "no libaio here";
  const TempDir directory;
  EXPECT_EXIT(run_with_auto(directory.path(), Forbidden::kUring, GetParam()), testing::ExitedWithCode(0),
              "info: io_uring is unavailable(.|\n)*libaio .*io_uring unavailable(.|\n)*probe: io_uring");
}

TEST_P(ForbiddenCalls, AutoFallsBackToThreadsAndSaysWhy) {
  const TempDir directory;
  EXPECT_EXIT(run_with_auto(directory.path(), Forbidden::kUringAndLibaio, GetParam()),
              testing::ExitedWithCode(0),
              "info: io_uring is unavailable(.|\n)*info: libaio is unavailable(.|\n)*"
              "threads .*io_uring unavailable.*libaio unavailable(.|\n)*probe: libaio");
}

TEST_P(ForbiddenCalls, RequiredIsAnErrorThatHelps) {
  const TempDir directory;
  if (!probe_path(directory.path(), 0).direct) GTEST_SKIP() << "O_DIRECT, required too, is missing here";
  const auto expect = [&](Backend backend, const char* text) {
    EXPECT_EXIT(run_with_required(directory.path(), backend, GetParam()), testing::ExitedWithCode(3), text);
  };
  const bool forbidden = GetParam() == EPERM;
  expect(Backend::kUring, forbidden ? "io_uring.*(seccomp|io_uring_disabled)" : "io_uring.*Linux 5.11");
  expect(Backend::kLibaio, forbidden ? "libaio.*seccomp" : "libaio.*CONFIG_AIO");
}

std::string name_of_errno(const testing::TestParamInfo<int>& info) {
  return info.param == EPERM ? "eperm" : "enosys";
}
INSTANTIATE_TEST_SUITE_P(Errors, ForbiddenCalls, testing::Values(EPERM, ENOSYS), name_of_errno);

// What was asked of io_uring and is not to be had.
TEST(Modes, IopollWorksOrSaysWhyNot) {
  const TempDir directory;
  EngineOptions options = small(Backend::kUring);
  options.iopoll = true;
  auto engine = make_engine(options, {{directory.path(), kMiB}});
  if (engine->backend() != Backend::kUring) GTEST_SKIP() << engine->describe();
  EXPECT_TRUE(works(*engine));
  if (engine->describe().find("no IOPOLL (") == std::string::npos) {
    EXPECT_HAS(engine->describe(), "IOPOLL");
    return;
  }
  engine.reset();  // one at a time in a directory
  options.require = true;
  if (!probe_path(directory.path(), 0).direct) GTEST_SKIP() << "O_DIRECT, required too, is missing here";
  const TempDir other;
  const Error e = error_of([&] { make_engine(options, {{other.path(), kMiB}}); });
  EXPECT_HAS(e.what(), "IOPOLL is required");
  EXPECT_HAS(e.hint(), "poll_queues");
}

TEST(Modes, RegistrationSwitchedOffIsSaid) {
  const TempDir directory;
  EngineOptions options = small(Backend::kUring);
  options.registered = false;
  const auto engine = make_engine(options, {{directory.path(), kMiB}});
  if (engine->backend() != Backend::kUring) GTEST_SKIP() << engine->describe();
  const Memory memory(4 * kPage);
  engine->register_memory(memory.data(), memory.bytes());
  EXPECT_HAS(engine->describe(), "nothing registered");
  EXPECT_HAS_NOT(engine->describe(), "registered buffers");
  engine->unregister_memory(memory.data());
  EXPECT_EQ(make_uring_queue(-1, 1, {.registered = false})->register_memory(memory.data(), memory.bytes()),
            "registration is switched off");
}

[[noreturn]] void run_without_memlock(const std::string& directory) {
  const rlimit none{.rlim_cur = 16 * kPage, .rlim_max = 16 * kPage};
  if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || setuid(65534) != 0) _exit(77);
  auto engine = make_engine(small(Backend::kAuto), {{directory, kMiB}});
  const Memory memory(8 * kMiB);
  engine->register_memory(memory.data(), memory.bytes());
  fprintf(stderr, "%s\n", engine->describe().c_str());
  const Result result = engine->wait(engine->submit({.data = memory.data(), .bytes = kMiB}));
  engine->unregister_memory(memory.data());
  engine.reset();
  std::filesystem::remove(directory);
  _exit(result.ok() ? 0 : 1);
}

// No privileges and no memlock: registration is refused (or the ring itself is), transfers go on.
TEST(Registration, RefusedByMemlockLimit) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  if (geteuid() != 0) GTEST_SKIP() << "needs to start as root to become somebody without privileges";
  const TempDir directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0777), 0);
  ASSERT_EQ(chown(directory.path().c_str(), 65534, 65534), 0);
  EXPECT_EXIT(run_without_memlock(directory.path()), testing::ExitedWithCode(0),
              "buffers not registered: .*(memlock|sparse)|libaio|threads");
}

[[noreturn]] void run_with_few_threads(const std::string& directory) {
  const rlimit few{.rlim_cur = 12, .rlim_max = 12};
  if (setgid(65534) != 0 || setuid(65534) != 0 || setrlimit(RLIMIT_NPROC, &few) != 0) _exit(2);
  int errors = 0;
  for (const int queues : {64, 1}) {  // the engine's own, and those of a pool
    EngineOptions options = small(Backend::kThreads);
    options.queue_depth = 64;
    options.queues = queues;
    options.threads = queues == 1 ? 64 : 1;
    try {
      make_engine(options, {{directory, kMiB}});
    } catch (const Error& e) {
      fprintf(stderr, "%s\n", e.what());
      errors +=
          e.code() == Errc::kMemory && std::string(e.what()).find("and no more") != std::string::npos ? 1 : 0;
    }
  }
  std::filesystem::remove(directory);
  _exit(errors == 2 ? 0 : 1);
}

TEST(Limits, ThreadsThatCannotBeMadeAreAnErrorNotAHang) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  if (geteuid() != 0) GTEST_SKIP() << "needs to start as root to become somebody without privileges";
  const TempDir directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0777), 0);
  ASSERT_EQ(chown(directory.path().c_str(), 65534, 65534), 0);
  EXPECT_EXIT(run_with_few_threads(directory.path()), testing::ExitedWithCode(0), "ulimit -u");
}

TEST(Paths, MissingDirectoryIsTheUsersError) {
  const TempDir directory;
  expect_error(small(Backend::kAuto), {directory.path() + "/none", kMiB}, Errc::kUsage, "No such file");
}

TEST(Paths, AFileIsNoDirectory) {
  const TempDir directory;
  const std::string file = directory.path() + "/file";
  fclose(fopen(file.c_str(), "w"));
  expect_error(small(Backend::kAuto), {file, kMiB}, Errc::kUsage, "is no directory");
}

TEST(Paths, ReadOnlyDirectoryIsTheUsersError) {
  const Mounted read_only("tmpfs", "size=1m", MS_RDONLY);
  if (!read_only.path().empty()) {
    expect_error(small(Backend::kAuto), {read_only.path(), kMiB}, Errc::kUsage, "Read-only file system");
    return;
  }
  const TempDir directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0555), 0);
  if (access(directory.path().c_str(), W_OK) == 0) GTEST_SKIP() << "this user may write everywhere";
  expect_error(small(Backend::kAuto), {directory.path(), kMiB}, Errc::kUsage, "Permission denied");
}

TEST(Paths, AFullDiskSaysWhatIsNeededAndFree) {
  const Mounted full("tmpfs", "size=1m");
  if (full.path().empty()) GTEST_SKIP() << "may not mount";
  expect_error(small(Backend::kThreads), {full.path(), 2 * kMiB}, Errc::kIo,
               "needs 2.0 MiB, 1020.0 KiB free");
  const auto engine = make_engine(small(Backend::kThreads), {{full.path(), kMiB / 2}});
  EXPECT_TRUE(works(*engine));
}

TEST(Paths, TooMuchForAnyDisk) {
  const TempDir directory;
  expect_error(small(Backend::kAuto), {directory.path(), std::int64_t{1} << 50}, Errc::kIo, directory.path());
  EXPECT_TRUE(directory.is_empty());
}

TEST(Direct, TmpfsIsBufferedAndSaysSo) {
  if (access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  const TempDir directory("/dev/shm");
  const PathProbe probe = probe_path(directory.path(), 0);
  if (probe.filesystem != "tmpfs") GTEST_SKIP() << "/dev/shm is " << probe.filesystem;
  EXPECT_FALSE(probe.direct);
  for (const Backend backend : {Backend::kAuto, Backend::kThreads}) {
    testing::internal::CaptureStderr();
    auto engine = make_engine(small(backend), {{directory.path(), kMiB}});
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_HAS(log, "warning: " + directory.path() + ": without O_DIRECT");
    EXPECT_HAS(engine->describe(), "buffered on " + directory.path());
    EXPECT_TRUE(works(*engine));
    engine.reset();
    expect_error(required(backend), {directory.path(), kMiB}, Errc::kIo, "O_DIRECT is required");
  }
}

// ramfs has neither O_DIRECT nor fallocate.
TEST(Direct, RamfsIsBufferedAndSparseAndSaysSo) {
  const Mounted ramfs("ramfs", "");
  if (ramfs.path().empty()) GTEST_SKIP() << "may not mount";
  testing::internal::CaptureStderr();
  const auto engine = make_engine(small(Backend::kAuto), {{ramfs.path(), kMiB}});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_HAS(log, "ramfs refuses O_DIRECT");
  EXPECT_HAS(log, "space is not reserved (ramfs cannot reserve space: Operation not supported");
  EXPECT_HAS(engine->describe(), "space not reserved");
  EXPECT_TRUE(works(*engine));
}

TEST(Probe, SaysWhatWorks) {
  const TempDir directory;
  const auto probes = probe_backends(directory.path());
  ASSERT_EQ(probes.size(), 4u);
  for (std::size_t i = 0; i < probes.size(); ++i) {
    const BackendProbe& probe = probes[i];
    EXPECT_FALSE(probe.reason.empty());
    if (probe.backend >= Backend::kThreads) {
      EXPECT_TRUE(probe.works) << probe.reason;
    }
    // The better one of two back ends that work comes first, and both come before one that does not work.
    if (i > 0) {
      EXPECT_LT(std::pair(!probes[i - 1].works, probes[i - 1].backend),
                std::pair(!probe.works, probe.backend));
    }
  }
  for (const BackendProbe& probe : probe_backends(directory.path() + "/none"))
    EXPECT_EQ(probe.works, probe.backend == Backend::kRam) << probe.reason;
  EXPECT_TRUE(directory.is_empty());
}

TEST(Probe, MeasuresAPath) {
  const TempDir directory;
  const PathProbe probe = probe_path(directory.path(), 9 * kMiB);
  EXPECT_NE(probe.filesystem, "unknown");
  EXPECT_GT(probe.free_bytes, 0);
  EXPECT_GT(probe.read_bytes_per_second, 0);
  EXPECT_GT(probe.write_bytes_per_second, 0);
  EXPECT_FALSE(probe.direct_reason.empty());
  EXPECT_EQ(probe.numa_node, numa_node_of(directory.path()));
  EXPECT_TRUE(directory.is_empty());
  EXPECT_THROW(probe_path(directory.path() + "/none", 0), Error);
}

TEST(Options, OutOfRangeIsTheUsersError) {
  const TempDir directory;
  const auto refused = [&](auto change) {
    EngineOptions options = small(Backend::kRam);
    change(options);
    EXPECT_THROW(make_engine(options, {{"", kMiB}}), Error);
  };
  refused([](EngineOptions& o) { o.block_size = 1000; });
  refused([](EngineOptions& o) { o.block_size = 0; });
  refused([](EngineOptions& o) { o.queue_depth = -1; });
  refused([](EngineOptions& o) { o.threads = 0; });
  refused([](EngineOptions& o) { o.queues = 0; });
  EXPECT_THROW(make_engine(small(Backend::kRam), {}), Error);
  EXPECT_THROW(make_engine(small(Backend::kThreads), {{directory.path(), 0}}), Error);
}

}  // namespace
}  // namespace zg::io::test
