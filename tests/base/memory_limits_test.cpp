// What limits memory, read from trees as /proc and /sys would show them, and each limit's refusal.
#include "ziggurat/base/memory_limits.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kNone = MemoryLimits::kNone;

class MemoryLimitsTest : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) const { test::write_file(root_ + file, text); }
  void version1(const std::string& group, const std::string& limit, std::int64_t used,
                std::int64_t cache) const {
    const std::string at = "/sys/fs/cgroup/memory" + group;
    write(at + "/memory.limit_in_bytes", limit + "\n");
    write(at + "/memory.usage_in_bytes", fmt::format("{}\n", used));
    write(at + "/memory.stat",
          fmt::format("inactive_file 1\ntotal_cache 5\ntotal_inactive_file {}\n", cache));
  }
  void version2(const std::string& group, const std::string& max, const std::string& high, std::int64_t used,
                std::int64_t cache) const {
    const std::string at = "/sys/fs/cgroup" + group;
    write(at + "/memory.max", max + "\n");
    write(at + "/memory.high", high + "\n");
    write(at + "/memory.current", fmt::format("{}\n", used));
    write(at + "/memory.stat", fmt::format("anon 9\ninactive_file {}\n", cache));
  }
  MemoryLimits read() const { return read_memory_limits(root_); }

  const test::TempDir directory_;
  const std::string& root_ = directory_.path();
};

TEST_F(MemoryLimitsTest, WhatIsNotThereLimitsNothing) {
  const MemoryLimits none = read();
  EXPECT_EQ(none.available, kNone);
  EXPECT_EQ(none.cgroup.left(), kNone);
  EXPECT_EQ(none.memlock, kNone);
  EXPECT_EQ(none.address_space, kNone);
  EXPECT_TRUE(none.nodes.empty());
  EXPECT_EQ(none.left(), kNone);
  EXPECT_NO_THROW(
      check_memory(none, {.name = "t", .bytes = kNone - 1, .pinned = true, .nodes = {{0, kNone}}}));
}

TEST_F(MemoryLimitsTest, TheMachineAndItsNodes) {
  write("/proc/meminfo", "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:   64 kB\n");
  write("/sys/devices/system/node/node10/meminfo", "Node 10 MemTotal: 9 kB\nNode 10 MemFree:  7 kB\n");
  write("/sys/devices/system/node/node2/meminfo",
        "Node 2 MemTotal: 50 kB\nNode 2 MemFree:  20 kB\nNode 2 Active(file): 3 kB\nNode 2 Inactive(file): 5 "
        "kB\n");
  write("/sys/devices/system/node/node/meminfo", "Node 3 MemFree:  20 kB\n");
  write("/sys/devices/system/node/nodes/meminfo", "Node 3 MemFree:  20 kB\n");
  const MemoryLimits limits = read();
  EXPECT_EQ(limits.available, 64 * kKiB);
  EXPECT_EQ(limits.left(), 64 * kKiB);
  ASSERT_EQ(limits.nodes.size(), 2u);
  EXPECT_EQ(limits.nodes[0].node, 2);
  EXPECT_EQ(limits.nodes[0].available, 25 * kKiB);
  EXPECT_EQ(limits.nodes[1].node, 10);
  EXPECT_EQ(limits.nodes[1].available, 7 * kKiB);
}

TEST_F(MemoryLimitsTest, Version2TheTightestGroupCounts) {
  write("/proc/self/cgroup", "0::/user/run\n");
  write("/proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  version2("/user/run", "max", "max", 1000, 0);
  EXPECT_EQ(read().cgroup.left(), kNone);
  version2("/user", "50000", "max", 30000, 6000);
  EXPECT_EQ(read().cgroup.file, "/sys/fs/cgroup/user/memory.max");
  EXPECT_EQ(read().cgroup.left(), 26000);
  EXPECT_EQ(read().left(), 26000);
  version2("/user/run", "40000", "20000", 5000, 0);
  EXPECT_EQ(read().cgroup.file, "/sys/fs/cgroup/user/run/memory.high");
  EXPECT_EQ(read().cgroup.left(), 15000);
  version2("/user/run", "4000", "max", 5000, 0);
  EXPECT_EQ(read().cgroup.left(), 0) << "already past it";
}

TEST_F(MemoryLimitsTest, Version1BesideAnEmptyVersion2) {
  write("/proc/self/cgroup", "9:name=systemd:/\n4:memory,hugetlb:/jobs/7\n1:cpu:/\n0::/\n");
  write("/proc/self/mountinfo",
        "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "33 30 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory,hugetlb\n");
  version1("/jobs/7", "9223372036854771712", 4096, 0);
  EXPECT_EQ(read().cgroup.left(), kNone);
  version1("/jobs/7", "1048576", 524288, 131072);
  EXPECT_EQ(read().cgroup.file, "/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes");
  EXPECT_EQ(read().cgroup.limit, 1048576);
  EXPECT_EQ(read().cgroup.left(), 1048576 - 524288 + 131072);
  version1("/", "500000", 200000, 0);
  EXPECT_EQ(read().cgroup.left(), 300000) << "the root's counts for all";
}

// Its own group is the mount's root there, and /proc names it as the outside does, or not below the mount at
// all.
TEST_F(MemoryLimitsTest, InAContainer) {
  write("/proc/self/mountinfo",
        "33 30 0:29 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  version1("", "7000", 1000, 0);
  version1("/inner", "6500", 1000, 0);
  for (const auto& [path, left] :
       {std::pair{"/docker/abc", 6000}, {"/docker/abc/inner", 5500}, {"/other", 6000}}) {
    write("/proc/self/cgroup", fmt::format("4:memory:{}\n", path));
    EXPECT_EQ(read().cgroup.left(), left) << path;
  }
}

TEST_F(MemoryLimitsTest, LimitsOfTheProcess) {
  const std::string head = "Limit                     Soft Limit           Hard Limit           Units     \n";
  write("/proc/self/limits",
        head + "Max locked memory         8388608              9000000              bytes     \n" +
            "Max address space         unlimited            unlimited            bytes     \n");
  write("/proc/self/status",
        "VmSize:\t     100 kB\nVmLck:\t      12 kB\nVmPin:\t       4 kB\nCapEff:\t0000000000000000\n");
  MemoryLimits limits = read();
  EXPECT_EQ(limits.memlock, 8388608);
  EXPECT_EQ(limits.locked, 16 * kKiB);
  EXPECT_EQ(limits.address_space, kNone);
  EXPECT_EQ(limits.mapped, 100 * kKiB);
  write("/proc/self/status", "VmSize:\t     100 kB\nCapEff:\t0000000000004000\n");
  write("/proc/self/limits", head + "Max address space         123456     unlimited   bytes\n");
  limits = read();
  EXPECT_EQ(limits.memlock, kNone) << "CAP_IPC_LOCK";
  EXPECT_EQ(limits.address_space, 123456);
}

TEST(CheckMemory, EachLimitRefusesByItsName) {
  struct Case {
    MemoryLimits limits;
    MemoryDemand demand;
    std::vector<std::string> message, hint;
  };
  MemoryLimits machine, group, node, lock, space;
  machine.available = 3 * kMiB;
  group.cgroup = {"/sys/fs/cgroup/a/memory.max", 8 * kMiB, 5 * kMiB};
  node.nodes = {{0, 9 * kMiB}, {1, 3 * kMiB}};
  lock.memlock = 8 * kMiB;
  lock.locked = 5 * kMiB;
  space.address_space = 8 * kMiB;
  space.mapped = 5 * kMiB;
  const MemoryDemand plain{.name = "tiers.host", .bytes = 3 * kMiB};
  MemoryDemand pinned = plain, bound = plain;
  pinned.pinned = true;
  bound.nodes = {{1, 3 * kMiB}};
  const std::vector<Case> cases{
      {machine, plain, {"free memory", "3.0 MiB"}, {"free memory"}},
      {group,
       plain,
       {"/sys/fs/cgroup/a/memory.max", "3.0 MiB of 8.0 MiB"},
       {"raise /sys/fs/cgroup/a/memory.max"}},
      {node, bound, {"NUMA node 1", "3.0 MiB"}, {"node 1"}},
      {lock, pinned, {"memlock", "8.0 MiB", "5.0 MiB"}, {"ulimit -l", "CAP_IPC_LOCK"}},
      {space, plain, {"address space", "8.0 MiB", "5.0 MiB"}, {"ulimit -v"}},
  };
  for (const Case& c : cases) {
    EXPECT_NO_THROW(check_memory(c.limits, c.demand)) << c.message[0];
    MemoryDemand more = c.demand;
    ++more.bytes;
    for (auto& n : more.nodes) ++n.bytes;
    const Error e = test::error_of([&] { check_memory(c.limits, more); });
    EXPECT_EQ(e.code(), Errc::kMemory);
    EXPECT_EQ(e.where(), "tiers.host");
    EXPECT_HAS_NOT(e.message(), "; ") << "only one refuses: " << e.message();
    for (const auto& text : c.message) EXPECT_HAS(e.message(), text);
    for (const auto& text : c.hint) EXPECT_HAS(e.hint(), text);
  }
  EXPECT_NO_THROW(check_memory(lock, {.name = "t", .bytes = kGiB})) << "not pinned";
  EXPECT_THROW(check_memory(space, {.name = "t", .bytes = 1, .addresses = 4 * kMiB}), Error);
}

TEST(CheckMemory, AllThatRefuseAreNamedAtOnce) {
  MemoryLimits limits;
  limits.available = limits.memlock = 1;
  limits.cgroup = {"/g/memory.max", 2, 1};
  const Error e = test::error_of([&] { check_memory(limits, {.name = "t", .bytes = kMiB, .pinned = true}); });
  for (const char* text : {"1.0 MiB", "free memory", "/g/memory.max", "memlock"})
    EXPECT_HAS(e.message(), text);
}

TEST(CheckMemory, ThisMachineAnswers) {
  const MemoryLimits limits = read_memory_limits();
  EXPECT_GT(limits.available, 0);
  EXPECT_LT(limits.available, kNone);
  EXPECT_GT(limits.mapped, 0);
  EXPECT_GT(limits.left(), 0);
  EXPECT_GT(available_memory(), 0);
}

}  // namespace
}  // namespace zg
