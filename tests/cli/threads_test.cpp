// Threads and cores of whole runs: they change no bit, and what cannot be had is said.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

const Strings kTiers{"tiers.device=400KiB", "tiers.host=400KiB", "tiers.nvme.0.path=."};
Strings with(const Strings& overrides) {
  return Strings{"train", "config.json"} + sets(kTiers + overrides);
}

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  return CPU_COUNT(&set);
}

// As in a sandbox that lets nobody choose his cores.
void forbid_affinity() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_sched_setaffinity, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{static_cast<unsigned short>(std::size(rules)), rules};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    _exit(125);
}

// As under taskset.
void keep_one_core() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) _exit(125);
  for (std::size_t cpu = 0, kept = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set) && kept++ > 0) CPU_CLR(cpu, &set);
  }
  if (sched_setaffinity(0, sizeof(set), &set) != 0) _exit(125);
}

class Threads : public CliTest {
 protected:
  Threads() { train({"output.dir=plain"}); }
  void expect_same_bits() const {
    EXPECT_EQ(read("out/model/model.safetensors"), read("plain/model/model.safetensors"));
    fs::remove_all(path("out"));
  }
};

TEST_F(Threads, ChangeNoBit) {
  Outcome o = run(with({}) + Strings{"--threads", "1"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("threads    1 compute on node "), std::string::npos) << o.err;
  expect_same_bits();
  // The flag wins over the file.
  o = run(with({"threads.compute=4000"}) + Strings{"--threads", "1"});
  EXPECT_EQ(o.code, 0) << o.err;
  expect_same_bits();
  o = run(Launch{.arguments = with({}), .in_child = keep_one_core});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("threads    1 compute on node "), std::string::npos) << o.err;
  expect_same_bits();
  if (cores() < 2) return;
  o = run(with({"threads.reserved=1", "threads.bind=true"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find(", bound to them; reserved: "), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("(threads.reserved is 1)"), std::string::npos) << o.err;
  expect_same_bits();
}

TEST_F(Threads, MoreThanThereAreIsAMistake) {
  const std::string more = std::to_string(cores() + 1);
  const Outcome o = run(with({}) + Strings{"--threads", more});
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_NE(message_of(o).find("threads.compute: asks for " + more + " threads"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("hint: at most " + std::to_string(cores())), std::string::npos) << o.err;
}

TEST_F(Threads, WhereBindingIsForbiddenItIsSaidOnce) {
  if (cores() < 2) GTEST_SKIP() << "one core: nothing to bind";
  Outcome o = run(Launch{.arguments = with({"threads.reserved=1"}), .in_child = forbid_affinity});
  if (o.code == 125) GTEST_SKIP() << "seccomp filters are not allowed here";
  EXPECT_EQ(o.code, 0) << o.err;
  const std::string text = "threads are not bound to cores ";
  const std::size_t at = o.err.find(text);
  ASSERT_NE(at, std::string::npos) << o.err;
  EXPECT_NE(o.err.find("Operation not permitted", at), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("Operation not permitted", o.err.find('\n', at)), std::string::npos) << o.err;
  EXPECT_NE(o.err.find(", not bound; reserved: "), std::string::npos) << o.err;
  expect_same_bits();
  // Asked for, it is missed.
  o = run(Launch{.arguments = with({"threads.bind=true"}), .in_child = forbid_affinity});
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(message_of(o).find("threads.bind: is true, but threads cannot be bound"), std::string::npos)
      << o.err;
  expect_nothing_half_written();
  // Not wanted, it is not missed.
  o = run(Launch{.arguments = with({"threads.bind=false"}), .in_child = forbid_affinity});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err.find("not permitted"), std::string::npos) << o.err;
  expect_same_bits();
}

TEST_F(CliTest, ProbeSaysWhoGetsWhichCores) {
  const Outcome o = run(Strings{"probe", ".", "--size", "0"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("\nthreads    "), std::string::npos) << o.out;
  EXPECT_NE(o.out.find(" compute on node "), std::string::npos) << o.out;
}

}  // namespace
}  // namespace zg::cli_test
