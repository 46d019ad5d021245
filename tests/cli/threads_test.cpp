// Threads and cores of whole runs: they change no bit, and what cannot be had is said.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

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

// As in a sandbox that forbids to choose cores.
void forbid_affinity() {
  test::forbid_calls({SYS_sched_setaffinity}, EPERM);
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
  EXPECT_HAS(o.err, "threads    1 compute on node ");
  expect_same_bits();
  // The flag wins over the file.
  o = run(with({"threads.compute=4000"}) + Strings{"--threads", "1"});
  EXPECT_EQ(o.code, 0) << o.err;
  expect_same_bits();
  o = run(Launch{.arguments = with({}), .in_child = keep_one_core});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.err, "threads    1 compute on node ");
  expect_same_bits();
  if (cores() < 2) return;
  o = run(with({"threads.reserved=1", "threads.bind=true"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.err, ", bound to them; reserved: ");
  EXPECT_HAS(o.err, "(threads.reserved is 1)");
  expect_same_bits();
}

TEST_F(Threads, MoreThanThereAreIsAMistake) {
  const std::string more = std::to_string(cores() + 1);
  const Outcome o = run(with({}) + Strings{"--threads", more});
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_HAS(message_of(o), "threads.compute: asks for " + more + " threads") << o.err;
  EXPECT_HAS(o.err, "hint: at most " + std::to_string(cores()));
}

TEST_F(Threads, WhereBindingIsForbiddenItIsSaidOnce) {
  if (cores() < 2) GTEST_SKIP() << "one core: nothing to bind";
  Outcome o = run(Launch{.arguments = with({"threads.reserved=1"}), .in_child = forbid_affinity});
  if (o.code == test::kCannotForbid) GTEST_SKIP() << "seccomp filters are not allowed here";
  EXPECT_EQ(o.code, 0) << o.err;
  const std::string text = "threads are not bound to cores ";
  const std::size_t at = o.err.find(text);
  ASSERT_NE(at, std::string::npos) << o.err;
  EXPECT_NE(o.err.find("Operation not permitted", at), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("Operation not permitted", o.err.find('\n', at)), std::string::npos) << o.err;
  EXPECT_HAS(o.err, ", not bound; reserved: ");
  expect_same_bits();
  // Binding that was asked for and cannot be had is an error.
  o = run(Launch{.arguments = with({"threads.bind=true"}), .in_child = forbid_affinity});
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_HAS(message_of(o), "threads.bind: is true, but threads cannot be bound") << o.err;
  expect_nothing_half_written();
  // Where binding is not wanted, nothing is said.
  o = run(Launch{.arguments = with({"threads.bind=false"}), .in_child = forbid_affinity});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS_NOT(o.err, "not permitted");
  expect_same_bits();
}

TEST_F(CliTest, ProbeSaysWhoGetsWhichCores) {
  const Outcome o = run(Strings{"probe", ".", "--size", "0"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.out, "\nthreads    ");
  EXPECT_HAS(o.out, " compute on node ");
}

}  // namespace
}  // namespace zg::cli_test
