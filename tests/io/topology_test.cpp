// Where drives are attached, on machines that the tests describe by trees as sysfs has them.
#include "io/topology.hpp"

#include <fmt/core.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "support.hpp"

namespace zg::io::test {
namespace {

namespace fs = std::filesystem;

// Two sockets, four NVMe drives each: nvme0 to nvme3 on node 0, the others on node 1; 259:<8 i> is the drive,
// 259:<8 i + 1> a partition of it.
class TopologyTest : public testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 8; ++i) {
      const fs::path pci = pci_of(i);
      write_file(pci / "numa_node", fmt::format("{}\n", i / 4));
      add_disk(pci / fmt::format("nvme/nvme{}/nvme{}n1", i, i), fmt::format("259:{}", 8 * i));
      add_disk(disk_of(i) / fmt::format("nvme{}n1p1", i), fmt::format("259:{}", 8 * i + 1));
    }
  }
  fs::path pci_of(int i) const {
    return fs::path(root()) /
           fmt::format("devices/pci0000:{}0/0000:{}0:01.0/0000:{}{}:00.0", i / 4, i / 4, i / 4, i);
  }
  fs::path disk_of(int i) const { return pci_of(i) / fmt::format("nvme/nvme{}/nvme{}n1", i, i); }
  void link(const fs::path& from, const fs::path& to) const {
    fs::create_directories(from.parent_path());
    fs::create_symlink(fs::relative(to, from.parent_path()), from);
  }
  void add_disk(const fs::path& directory, const std::string& number) const {
    write_file(directory / "dev", number + "\n");
    link(fs::path(root()) / "dev/block" / number, directory);
  }
  // A device without a place of its own, over others.
  void add_virtual(const std::string& name, const std::string& number,
                   const std::vector<fs::path>& over) const {
    const fs::path directory = fs::path(root()) / "devices/virtual/block" / name;
    add_disk(directory, number);
    for (const fs::path& part : over) link(directory / "slaves" / part.filename(), part);
  }
  fs::path virtual_of(const std::string& name) const {
    return fs::path(root()) / "devices/virtual/block" / name;
  }
  int node(const std::string& number) const { return numa_node_of_device(number, root()); }
  std::string root() const { return directory_.path(); }

  TempDir directory_;
};

TEST_F(TopologyTest, EveryDriveAndItsPartitions) {
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(node(fmt::format("259:{}", 8 * i)), i / 4) << i;
    EXPECT_EQ(node(fmt::format("259:{}", 8 * i + 1)), i / 4) << "partition of " << i;
  }
}

TEST_F(TopologyTest, TheControllersOwnFileCountsToo) {
  fs::remove(pci_of(5) / "numa_node");
  EXPECT_EQ(node("259:40"), -1);
  write_file(pci_of(5) / "nvme/nvme5/numa_node", "1\n");
  EXPECT_EQ(node("259:40"), 1);
}

TEST_F(TopologyTest, DevicesOverDevices) {
  add_virtual("md0", "9:0", {disk_of(0), disk_of(3)});
  add_virtual("md1", "9:1", {disk_of(3), disk_of(4)});
  add_virtual("dm-0", "254:0", {virtual_of("md0")});
  add_virtual("dm-1", "254:1", {disk_of(6) / "nvme6n1p1"});
  add_virtual("dm-2", "254:2", {virtual_of("dm-1"), virtual_of("md1")});
  add_disk(virtual_of("md0") / "md0p1", "9:16");
  EXPECT_EQ(node("9:0"), 0);
  EXPECT_EQ(node("9:1"), -1) << "over two sockets";
  EXPECT_EQ(node("254:0"), 0);
  EXPECT_EQ(node("254:1"), 1);
  EXPECT_EQ(node("254:2"), -1);
  EXPECT_EQ(node("9:16"), 0) << "a partition of an md";
}

// As the kernel lists drives that can be reached through several controllers.
TEST_F(TopologyTest, AnNvmeSubsystem) {
  const auto add = [&](int n, const std::vector<int>& controllers) {
    const fs::path subsystem =
        fs::path(root()) / fmt::format("devices/virtual/nvme-subsystem/nvme-subsys{}", n);
    add_disk(subsystem / fmt::format("nvme{}n1", n), fmt::format("260:{}", n));
    write_file(subsystem / "model", "a drive\n");
    for (const int c : controllers)
      link(subsystem / fmt::format("nvme{}", c), pci_of(c) / fmt::format("nvme/nvme{}", c));
  };
  add(1, {7});
  add(2, {0, 1});
  add(3, {0, 7});
  EXPECT_EQ(node("260:1"), 1);
  EXPECT_EQ(node("260:2"), 0);
  EXPECT_EQ(node("260:3"), -1);
}

TEST_F(TopologyTest, WhatMakesNoSenseIsUnknown) {
  EXPECT_EQ(node("1:1"), -1);
  EXPECT_EQ(node(""), -1);
  EXPECT_EQ(numa_node_of_device("259:0", root() + "/none"), -1);
  for (const char* text : {"", "\n", "none\n", "-1\n", "-7\n", "99999999999999999999\n", "1 2\n"}) {
    write_file(pci_of(7) / "numa_node", text);
    EXPECT_EQ(node("259:56"), -1) << text;
  }
  write_file(fs::path(root()) / "dev/block/8:0", "no link");
  EXPECT_EQ(node("8:0"), -1);
  fs::create_symlink("nowhere", fs::path(root()) / "dev/block/8:1");
  EXPECT_EQ(node("8:1"), -1);
  add_virtual("dm-8", "254:8", {virtual_of("dm-9")});
  add_virtual("dm-9", "254:9", {virtual_of("dm-8")});
  EXPECT_EQ(node("254:8"), -1) << "a loop";
}

TEST_F(TopologyTest, APathIsLookedUpByItsDevice) {
  struct stat info {};
  ASSERT_EQ(stat(root().c_str(), &info), 0);
  const std::string number = fmt::format("{}:{}", major(info.st_dev), minor(info.st_dev));
  EXPECT_EQ(numa_node_of(root(), root()), -1);
  link(fs::path(root()) / "dev/block" / number, disk_of(6));
  EXPECT_EQ(numa_node_of(root(), root()), 1);
  write_file(fs::path(root()) / "file", "");
  EXPECT_EQ(numa_node_of(root() + "/file", root()), 1);
  EXPECT_EQ(numa_node_of(root() + "/none", root()), -1);
}

TEST_F(TopologyTest, OnlyCpusThatTheThreadMayUse) {
  cpu_set_t before;
  CPU_ZERO(&before);
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  std::vector<int> allowed;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &before)) allowed.push_back(cpu);
  }
  const fs::path nodes = fs::path(root()) / "devices/system/node";
  write_file(nodes / "node0/cpulist", "0-4095\n");
  write_file(nodes / "node1/cpulist", "40000-40003\n");
  write_file(nodes / "node2/cpulist", "garbage\n");
  EXPECT_EQ(cpus_of_node(0, root()), allowed);
  EXPECT_TRUE(cpus_of_node(1, root()).empty());
  EXPECT_TRUE(cpus_of_node(2, root()).empty());
  EXPECT_TRUE(cpus_of_node(3, root()).empty());
  EXPECT_TRUE(cpus_of_node(-1, root()).empty());

  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(allowed.back()), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(cpus_of_node(0, root()), std::vector<int>{allowed.back()});
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

}  // namespace
}  // namespace zg::io::test
