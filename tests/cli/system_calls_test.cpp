// System calls that a sandbox refuses, and limits on threads and memory: a run goes on without what it cannot
// have, or says in one sentence what it lacks. It never ends by a signal or an assertion.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "cli/fixture.hpp"
#include "support/places.hpp"

namespace zg::cli_test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // what takes terabytes of addresses, threads and calls of its own
#else
constexpr bool kSanitized = false;
#endif

struct Call {
  const char* name;
  unsigned number;
};
#define ZG_CALL(name) \
  Call {              \
#name, SYS_##name \
  }

// Those that the program makes by itself or through libraries, and that it could do without. The loader needs
// the others before main().
const Call kCalls[] = {
    ZG_CALL(io_uring_setup),
    ZG_CALL(io_uring_enter),
    ZG_CALL(io_uring_register),
    ZG_CALL(io_setup),
    ZG_CALL(io_submit),
    ZG_CALL(io_getevents),
    ZG_CALL(io_destroy),
    ZG_CALL(eventfd2),
    ZG_CALL(sched_getaffinity),
    ZG_CALL(sched_setaffinity),
    ZG_CALL(sched_yield),
    ZG_CALL(getcpu),
    ZG_CALL(madvise),
    ZG_CALL(mbind),
    ZG_CALL(get_mempolicy),
    ZG_CALL(set_mempolicy),
    ZG_CALL(move_pages),
    ZG_CALL(mlock),
    ZG_CALL(munlock),
    ZG_CALL(mremap),
    ZG_CALL(mincore),
    ZG_CALL(membarrier),
    ZG_CALL(fallocate),
    ZG_CALL(ftruncate),
    ZG_CALL(flock),
    ZG_CALL(statx),
    ZG_CALL(statfs),
    ZG_CALL(fstatfs),
    ZG_CALL(copy_file_range),
    ZG_CALL(sendfile),
    ZG_CALL(fadvise64),
    ZG_CALL(fsync),
    ZG_CALL(fdatasync),
    ZG_CALL(pwrite64),
    ZG_CALL(lseek),
    ZG_CALL(getdents64),
    ZG_CALL(unlinkat),
    ZG_CALL(readlinkat),
    ZG_CALL(mkdirat),
    ZG_CALL(faccessat),
    ZG_CALL(memfd_create),
    ZG_CALL(prctl),
    ZG_CALL(getrandom),
    ZG_CALL(pidfd_open),
    ZG_CALL(getrusage),
    ZG_CALL(uname),
    ZG_CALL(sysinfo),
    ZG_CALL(times),
    ZG_CALL(setpriority),
    ZG_CALL(ioprio_set),
    ZG_CALL(clone3),
    ZG_CALL(clone),
    ZG_CALL(ppoll),
    ZG_CALL(kill),
    ZG_CALL(rt_sigaction),
    ZG_CALL(sigaltstack),
    ZG_CALL(clock_nanosleep),
    ZG_CALL(nanosleep),
    ZG_CALL(socket),
    ZG_CALL(getcwd),
    ZG_CALL(prlimit64),
    ZG_CALL(set_robust_list),
#if defined(SYS_rseq)
    ZG_CALL(rseq),
#endif
#if defined(__x86_64__)
    ZG_CALL(poll),
    ZG_CALL(rename),
    ZG_CALL(unlink),
    ZG_CALL(mkdir),
    ZG_CALL(readlink),
    ZG_CALL(access),
    ZG_CALL(stat),
    ZG_CALL(lstat),
    ZG_CALL(open),
    ZG_CALL(dup2),
    ZG_CALL(pipe),
    ZG_CALL(getrlimit),
#endif
};

const Strings kDrive{"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=disk", "steps=2"};

class Refused : public CliTest {
 protected:
  Refused() { fs::create_directory(path("disk")); }
  // An end as it should be: done, or one message. Nothing stays on the drive, unless removing it is refused.
  void expect_fair(const Outcome& o, bool may_leave = false) const {
    EXPECT_FALSE(o.timed_out);
    EXPECT_EQ(o.signal, 0) << o.err;
    EXPECT_TRUE(o.code == 0 || o.code == 1 || o.code == 2) << o.code << "\n" << o.err;
    if (o.code != 0) {
      message_of(o);
      EXPECT_HAS_NOT(o.err, "bug in ziggurat");
    }
    if (!may_leave) {
      EXPECT_TRUE(fs::is_empty(path("disk"))) << o.err;
    }
  }
  void clean() const {
    fs::remove_all(path("out"));
    fs::remove_all(path("disk"));
    fs::create_directory(path("disk"));
  }
};

class RefusedCalls : public Refused, public ::testing::WithParamInterface<Call> {};

TEST_P(RefusedCalls, AreDoneWithoutOrNamed) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer makes calls of its own";
  const Call call = GetParam();
  const std::string name = call.name;
  for (const int error : {EPERM, ENOSYS}) {
    SCOPED_TRACE(error == EPERM ? "EPERM" : "ENOSYS");
    const Outcome o = run(Launch{.arguments = Strings{"train", "config.json"} + sets(kDrive),
                                 .in_child = [&] { test::forbid_calls({call.number}, error); }});
    if (o.code == test::kCannotForbid) GTEST_SKIP() << "seccomp filters are not allowed here";
    expect_fair(o, name.find("unlink") != std::string::npos);
    clean();
  }
}

INSTANTIATE_TEST_SUITE_P(All, RefusedCalls, ::testing::ValuesIn(kCalls),
                         [](const auto& call) { return std::string(call.param.name); });

// Calls without which a run must do, where they are refused: nothing that it needs depends on them.
TEST_F(Refused, WhatARunCanDoWithoutItDoesWithout) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer makes calls of its own";
  const Call spare[] = {ZG_CALL(io_uring_enter), ZG_CALL(io_getevents), ZG_CALL(sched_getaffinity),
                        ZG_CALL(madvise),        ZG_CALL(fallocate),    ZG_CALL(getrandom),
                        ZG_CALL(mbind),          ZG_CALL(fadvise64),    ZG_CALL(prctl)};
  for (const Call& call : spare) {
    SCOPED_TRACE(call.name);
    const Outcome o = run(Launch{.arguments = Strings{"train", "config.json"} + sets(kDrive),
                                 .in_child = [&] { test::forbid_calls({call.number}, EPERM); }});
    if (o.code == test::kCannotForbid) GTEST_SKIP() << "seccomp filters are not allowed here";
    EXPECT_EQ(o.code, 0) << o.err;
    clean();
  }
}

TEST_F(Refused, TheMachineIsProbedWithoutThem) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer makes calls of its own";
  for (const Call& call : {ZG_CALL(sched_getaffinity), ZG_CALL(uname), ZG_CALL(io_uring_enter),
                           ZG_CALL(io_getevents), ZG_CALL(getrusage)}) {
    SCOPED_TRACE(call.name);
    for (const Strings& words :
         {Strings{"probe", "disk", "--size", "0"},
          Strings{"io-bench", "--path", "disk", "--size", "1MiB", "--seconds", "0.1"}}) {
      const Outcome o =
          run(Launch{.arguments = words, .in_child = [&] { test::forbid_calls({call.number}, EPERM); }});
      if (o.code == test::kCannotForbid) GTEST_SKIP() << "seccomp filters are not allowed here";
      expect_fair(o);
    }
  }
}

// As another user, since no limit on threads holds for root. No other process of this user runs.
void become_lone_user(rlim_t threads) {
  constexpr uid_t kUser = 61234;
  const rlimit limit{.rlim_cur = threads, .rlim_max = threads};
  if (setresgid(kUser, kUser, kUser) != 0 || setrlimit(RLIMIT_NPROC, &limit) != 0 ||
      setresuid(kUser, kUser, kUser) != 0 || access(test::built_program().c_str(), X_OK) != 0)
    _exit(125);
}

TEST_F(Refused, ThreadsThatCannotBeHadAreNamedWithTheirLimit) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer starts threads of its own";
  if (geteuid() != 0) GTEST_SKIP() << "needs to start as root to become a user of its own";
  fs::permissions(directory_, fs::perms(0777));
  fs::permissions(path("disk"), fs::perms(0777));
  rlim_t threads = 1;
  for (int done = 0; done < 2 && threads < 200;
       ++threads) {  // each thread of the run in turn is the one too many
    SCOPED_TRACE(threads);
    const Outcome o = run(Launch{.arguments = Strings{"train", "config.json"} + sets(kDrive),
                                 .in_child = [threads] { become_lone_user(threads); },
                                 .limit = std::chrono::seconds(100)});
    if (o.code == 125) GTEST_SKIP() << "another user cannot run the program here";
    EXPECT_TRUE(fs::is_empty(path("disk"))) << o.err;
    fs::remove_all(path("out"));
    if (o.code == 0) {
      ++done;
      continue;
    }
    EXPECT_EQ(o.code, 2) << o.err;
    const std::string message = message_of(o);
    EXPECT_HAS(message, "cannot be started beside the ");
    EXPECT_HAS(message, fmt::format("ulimit -u is {}", threads));
  }
  EXPECT_GT(threads, 4u);
  EXPECT_LT(threads, 200u);
}

void limit_addresses(rlim_t bytes) {
  const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
  if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(125);
}

TEST_F(Refused, TooLittleMemoryIsSaid) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer takes terabytes of addresses";
  int refused = 0, done = 0;
  for (rlim_t mib = 40; done < 2 && mib < 4000; mib += 15) {
    SCOPED_TRACE(mib);
    const Outcome o = run(Launch{.arguments = Strings{"train", "config.json"} + sets(kDrive),
                                 .in_child = [mib] { limit_addresses(mib << 20); },
                                 .limit = std::chrono::seconds(100)});
    // Libraries that cannot be loaded end the process before its first instruction, in one way or another.
    const Outcome loaded =
        run(Launch{.arguments = {"--version"}, .in_child = [mib] { limit_addresses(mib << 20); }});
    if (loaded.code != 0) continue;
    expect_fair(o);
    done += o.code == 0 ? 1 : 0;
    refused += o.code == 0 ? 0 : 1;
    clean();
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(done, 0);
}

// Sends both signals when the run has begun.
void interrupt_twice() {
  if (fork() != 0) return;
  const pid_t run = getppid();
  for (int i = 0; i < 6000 && kill(run, 0) == 0 && access("out/log.jsonl", F_OK) != 0; ++i) usleep(10'000);
  kill(run, SIGTERM);
  kill(run, SIGINT);
  _exit(0);
}

TEST_F(Refused, ASuddenEndClearsItsDrives) {
  const Outcome o = run(Launch{
      .arguments = Strings{"train", "config.json"} + sets(kDrive) + sets({"steps=100000", "eval.every=0"}),
      .in_child = interrupt_twice});
  EXPECT_EQ(o.code, 130) << o.err;
  EXPECT_FALSE(fs::exists(path("out/model")));  // it ended at once
  EXPECT_TRUE(fs::is_empty(path("disk")));
}

}  // namespace
}  // namespace zg::cli_test
