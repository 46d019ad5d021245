// The assignment of cores, on machines that the tests describe.
#include "ziggurat/base/cores.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<int>;

// `nodes` of `physical` cores, whose hyperthreads are numbered as Linux mostly does: first all first ones,
// then all second ones.
CoreTopology machine(int nodes, int physical, int hyperthreads) {
  CoreTopology t;
  for (int n = 0; n < nodes; ++n) {
    t.nodes.push_back({n, {}});
    for (int h = 0; h < hyperthreads; ++h) {
      for (int p = 0; p < physical; ++p)
        t.nodes.back().cores.push_back({(h * nodes + n) * physical + p, n * physical + p});
    }
  }
  return t;
}

Ints range(int first, int last) {
  Ints cpus;
  for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  return cpus;
}

Ints joined(Ints a, const Ints& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Ints cpus_of(const CoreTopology::Node& node) {
  Ints cpus;
  for (const CoreTopology::Core& core : node.cores) cpus.push_back(core.cpu);
  return cpus;
}

// What must hold on any machine, for any request.
void expect_sound(const CoreTopology& t, const CoreWishes& w, const CoreAssignment& a) {
  std::vector<const CoreTopology::Node*> with_cores;
  for (const auto& node : t.nodes) {
    if (!node.cores.empty()) with_cores.push_back(&node);
  }
  ASSERT_EQ(a.nodes.size(), with_cores.size());
  int cores_left = 0;
  for (std::size_t i = 0; i < a.nodes.size(); ++i) {
    const NodeCores& n = a.nodes[i];
    EXPECT_EQ(n.node, with_cores[i]->node);
    EXPECT_GE(n.compute.size(), 1u);
    EXPECT_GE(n.threads, 0);
    EXPECT_LE(n.threads, static_cast<int>(n.compute.size()));
    cores_left += static_cast<int>(n.compute.size());
    // Each core has one use.
    Ints all = joined(n.compute, n.drives);
    if (n.devices != n.drives || !w.reserved) all = joined(all, n.devices);
    std::sort(all.begin(), all.end());
    Ints expected = cpus_of(*with_cores[i]);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(all, expected);
    const int reserved = static_cast<int>(expected.size() - n.compute.size());
    if (w.reserved) {
      EXPECT_EQ(reserved, *w.reserved);
    }
    // At most one physical core is shared by who computes and who does not.
    std::map<int, std::set<bool>> uses;
    for (const auto& core : with_cores[i]->cores)
      uses[core.physical].insert(std::count(n.compute.begin(), n.compute.end(), core.cpu) > 0);
    EXPECT_LE(std::count_if(uses.begin(), uses.end(), [](const auto& use) { return use.second.size() > 1; }),
              1);
  }
  EXPECT_EQ(a.threads(), w.compute.value_or(cores_left));
  EXPECT_GE(a.threads(), 1);
  // Evenly: who has two fewer than another has no room for more.
  for (const NodeCores& few : a.nodes) {
    for (const NodeCores& many : a.nodes) {
      if (many.threads > few.threads + 1) {
        EXPECT_EQ(few.threads, static_cast<int>(few.compute.size()));
      }
    }
  }
  // Everybody has a home, his own if that has cores.
  const auto expect_home = [&](const Ints& wished, const Ints& homes) {
    ASSERT_EQ(homes.size(), wished.size());
    for (std::size_t u = 0; u < homes.size(); ++u) {
      ASSERT_GE(homes[u], 0);
      ASSERT_LT(homes[u], static_cast<int>(a.nodes.size()));
      for (const NodeCores& n : a.nodes) {
        if (n.node == wished[u]) {
          EXPECT_EQ(a.nodes[static_cast<std::size_t>(homes[u])].node, wished[u]);
        }
      }
    }
  };
  expect_home(w.drives, a.drive_nodes);
  expect_home(w.devices, a.device_nodes);
}

// What the rule alone demands.
void expect_rule(const CoreWishes& w, const CoreAssignment& a) {
  for (std::size_t i = 0; i < a.nodes.size(); ++i) {
    const NodeCores& n = a.nodes[i];
    const auto at_home = [&](const Ints& homes) {
      return static_cast<std::size_t>(std::count(homes.begin(), homes.end(), static_cast<int>(i)));
    };
    const std::size_t size = n.compute.size() + n.drives.size() + n.devices.size();
    const std::size_t drives = at_home(a.drive_nodes), devices = at_home(a.device_nodes);
    if (size < static_cast<std::size_t>(kFewCores) || w.bind == Binding::kOff) {
      EXPECT_EQ(n.drives.size() + n.devices.size(), 0u);
      continue;
    }
    EXPECT_EQ(n.drives.size(), std::min(drives, size / 8));
    EXPECT_EQ(n.devices.size(), std::min(devices, size / 4 - n.drives.size()));
    EXPECT_EQ(n.devices.empty(), devices == 0);
  }
}

TEST(Cores, EveryMachineAndWish) {
  int refused = 0, granted = 0;
  for (int nodes = 1; nodes <= 3; ++nodes)
    for (int physical = 1; physical <= 17; ++physical)
      for (int hyperthreads = 1; hyperthreads <= 2; ++hyperthreads)
        for (int drives = 0; drives <= 4; ++drives)
          for (int devices = 0; devices <= 3; ++devices)
            for (int reserved = -1; reserved <= 5; ++reserved)
              for (const int compute :
                   {-1, 1, 2, 3, 7, nodes * physical, nodes * physical * hyperthreads, 103}) {
                const CoreTopology t = machine(nodes, physical, hyperthreads);
                CoreWishes w;
                for (int d = 0; d < drives; ++d) w.drives.push_back(d % (nodes + 1) - 1);
                for (int d = 0; d < devices; ++d) w.devices.push_back((d + 1) % (nodes + 2) - 1);
                if (reserved >= 0) w.reserved = reserved;
                if (compute >= 0) w.compute = compute;
                const int size = physical * hyperthreads;
                const bool fits = reserved < size && compute <= nodes * (size - std::max(reserved, 0));
                try {
                  const CoreAssignment a = assign_cores(t, w);
                  expect_sound(t, w, a);
                  if (reserved < 0 && compute < 0) expect_rule(w, a);
                  EXPECT_TRUE(fits);
                  ++granted;
                } catch (const Error& e) {
                  EXPECT_EQ(e.code(), Errc::kUsage);
                  EXPECT_FALSE(fits) << e.what();
                  ++refused;
                }
                if (testing::Test::HasFailure())
                  FAIL() << nodes << " nodes of " << physical << " times " << hyperthreads << ", " << drives
                         << " drives, " << devices << " devices, reserved " << reserved << ", compute "
                         << compute;
              }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(granted, 1000);
}

// Odd nodes, some without cores, some cut up by the process's mask.
TEST(Cores, RandomMachines) {
  const std::uint64_t seed = test::test_seed(20261121);
  printf("seed %llu (ZG_TEST_SEED)\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); };
  for (int round = 0; round < 3000; ++round) {
    CoreTopology t;
    int cpu = 0;
    const int nodes = 1 + below(5), hyperthreads = 1 + below(4), left_out = below(4);
    for (int n = 0; n < nodes; ++n) {
      t.nodes.push_back({n * 2, {}});
      for (int p = below(24); p > 0; --p) {
        const int physical = cpu;
        for (int h = 0; h < hyperthreads; ++h, ++cpu) {
          if (below(8) >= left_out) t.nodes.back().cores.push_back({cpu, physical});
        }
      }
    }
    if (t.cores() == 0) continue;
    CoreWishes w;
    for (int d = below(9); d > 0; --d) w.drives.push_back(below(12) - 2);
    for (int d = below(9); d > 0; --d) w.devices.push_back(below(12) - 2);
    if (below(2) == 0) w.compute = 1 + below(t.cores());
    w.bind = static_cast<Binding>(below(3));
    const CoreAssignment a = assign_cores(t, w);
    expect_sound(t, w, a);
    if (!w.compute) expect_rule(w, a);
    ASSERT_FALSE(testing::Test::HasFailure()) << "round " << round;
  }
}

TEST(Cores, TwoCoresKeepBoth) {
  const CoreAssignment a = assign_cores(machine(1, 2, 1), {.drives = {-1}, .devices = {}});
  ASSERT_EQ(a.nodes.size(), 1u);
  EXPECT_EQ(a.nodes[0], (NodeCores{.node = 0, .compute = {0, 1}, .threads = 2}));
  EXPECT_FALSE(a.bind);
  EXPECT_TRUE(a.cores_of_drive(0).empty());
  EXPECT_EQ(a.describe(),
            "2 compute on node 0 (cores 0-1); reserved: none (a node of fewer than 8 cores keeps "
            "them all)");
}

TEST(Cores, EightCoresWithADriveAndADevice) {
  const CoreAssignment a = assign_cores(machine(1, 8, 1), {.drives = {0}, .devices = {0}});
  EXPECT_EQ(a.nodes[0],
            (NodeCores{.node = 0, .compute = range(2, 7), .threads = 6, .drives = {0}, .devices = {1}}));
  EXPECT_TRUE(a.bind);
  EXPECT_EQ(a.cores_of_drive(0), Ints{0});
  EXPECT_EQ(a.cores_of_device(0), Ints{1});
  EXPECT_EQ(a.describe(),
            "6 compute on node 0 (cores 2-7), bound to them; reserved: 0 of node 0 for drives, 1 "
            "of node 0 "
            "for devices (one for each, at most an eighth of a node's cores for drives)");
  // Nobody needs one: none is reserved.
  EXPECT_EQ(assign_cores(machine(1, 8, 1), {}).threads(), 8);
  EXPECT_FALSE(assign_cores(machine(1, 8, 1), {}).bind);
}

TEST(Cores, TwoSocketsWithHyperthreadsEightDrivesAndEightGpus) {
  CoreWishes w{.drives = {0, 0, 0, 0, 1, 1, 1, 1}, .devices = {0, 0, 0, 0, 1, 1, 1, 1}};
  const CoreTopology t = machine(2, 64, 2);
  CoreAssignment a = assign_cores(t, w);
  // Node 0 has 0-63 and their hyperthreads 128-191: two physical cores a purpose.
  EXPECT_EQ(a.nodes[0].drives, (Ints{0, 1, 128, 129}));
  EXPECT_EQ(a.nodes[0].devices, (Ints{2, 3, 130, 131}));
  EXPECT_EQ(a.nodes[0].compute, joined(range(4, 63), range(132, 191)));
  EXPECT_EQ(a.nodes[1].drives, (Ints{64, 65, 192, 193}));
  EXPECT_EQ(a.threads(), 240);
  EXPECT_EQ(a.reserved(), 16);
  EXPECT_TRUE(a.bind);
  EXPECT_EQ(a.cores_of_drive(7), a.nodes[1].drives);
  EXPECT_EQ(a.cores_of_device(0), a.nodes[0].devices);
  EXPECT_EQ(a.describe().substr(0, 109),
            "120 compute on node 0 (cores 4-63,132-191), 120 on node 1 (cores 68-127,196-255), bound to "
            "them; reserved: 0-");
  // A limit is spread evenly, and changes nothing of what is reserved while there is room.
  w.compute = 101;
  a = assign_cores(t, w);
  EXPECT_EQ(a.nodes[0].threads, 51);
  EXPECT_EQ(a.nodes[1].threads, 50);
  EXPECT_EQ(a.reserved(), 16);
  // All cores were asked for: they are had.
  w.compute = 256;
  a = assign_cores(t, w);
  EXPECT_EQ(a.reserved(), 0);
  EXPECT_EQ(a.threads(), 256);
  EXPECT_EQ(a.why, "threads.compute takes them all");
  w.compute = 1;
  a = assign_cores(t, w);
  EXPECT_EQ(a.nodes[0].threads, 1);
  EXPECT_EQ(a.nodes[1].threads, 0);
}

TEST(Cores, HyperthreadsGoTogetherAndLoneOnesFirstWhereTheyFit) {
  // 0 and 10, 1 alone, 2 and 12, ..., 8 and 18: 1's other hyperthread is not ours.
  CoreTopology t{{{0, {}}}};
  for (int cpu = 0; cpu < 9; ++cpu) {
    t.nodes[0].cores.push_back({cpu, cpu});
    if (cpu != 1) t.nodes[0].cores.push_back({cpu + 10, cpu});
  }
  EXPECT_EQ(assign_cores(t, {.drives = {0}}).nodes[0].drives, Ints{1});
  EXPECT_EQ(assign_cores(t, {.drives = {0, 0}}).nodes[0].drives, (Ints{0, 10}));
  EXPECT_EQ(assign_cores(t, {.drives = {0}, .reserved = 3}).nodes[0].drives, (Ints{0, 1, 10}));
  EXPECT_EQ(assign_cores(t, {.drives = {0}, .reserved = 5}).nodes[0].drives, (Ints{0, 1, 2, 10, 12}));
}

TEST(Cores, UsersOfUnknownNodesGoWhereTheFewestAre) {
  const CoreTopology t = machine(2, 16, 1);
  EXPECT_EQ(assign_cores(t, {.drives = {-1, 0, -1, 0}}).drive_nodes, (Ints{1, 0, 1, 0}));
  // A node of memory alone is as good as none.
  CoreTopology far = t;
  far.nodes.push_back({2, {}});
  const CoreAssignment a = assign_cores(far, {.drives = {0, 2}});
  EXPECT_EQ(a.nodes.size(), 2u);
  EXPECT_EQ(a.drive_nodes, (Ints{0, 1}));
}

TEST(Cores, AWishReplacesTheRule) {
  const CoreTopology t = machine(1, 2, 1);
  CoreAssignment a = assign_cores(t, {.drives = {0}, .reserved = 1});
  EXPECT_EQ(a.nodes[0], (NodeCores{.node = 0, .compute = {1}, .threads = 1, .drives = {0}}));
  EXPECT_TRUE(a.bind);
  EXPECT_EQ(a.why, "threads.reserved is 1");
  // One reserved core serves both devices; of two or more each device has one.
  a = assign_cores(t, {.drives = {0}, .devices = {0}, .reserved = 1});
  EXPECT_EQ(a.cores_of_drive(0), Ints{0});
  EXPECT_EQ(a.cores_of_device(0), Ints{0});
  EXPECT_EQ(a.reserved(), 1);
  a = assign_cores(machine(1, 8, 1), {.drives = {0}, .devices = {0}, .reserved = 4});
  EXPECT_EQ(a.nodes[0].drives, (Ints{0, 1, 2}));
  EXPECT_EQ(a.nodes[0].devices, (Ints{3}));
  // None is reserved where none is asked for, though there are many.
  a = assign_cores(machine(1, 64, 1), {.drives = {0}, .devices = {0}, .reserved = 0});
  EXPECT_EQ(a.threads(), 64);
  EXPECT_FALSE(a.bind);
}

TEST(Cores, Binding) {
  EXPECT_TRUE(assign_cores(machine(1, 2, 1), {.bind = Binding::kOn}).bind);
  EXPECT_TRUE(assign_cores(machine(2, 2, 1), {}).bind);
  const CoreAssignment never = assign_cores(machine(2, 16, 1), {.drives = {0}, .bind = Binding::kOff});
  EXPECT_FALSE(never.bind);
  EXPECT_EQ(never.threads(), 32);
  EXPECT_TRUE(never.cores_of_drive(0).empty());
  // Asked for, cores are kept free all the same, but nobody is bound to them.
  const CoreAssignment free =
      assign_cores(machine(1, 16, 1), {.drives = {0}, .reserved = 2, .bind = Binding::kOff});
  EXPECT_EQ(free.threads(), 14);
  EXPECT_TRUE(free.cores_of_drive(0).empty());
}

TEST(Cores, MoreThanThereIsIsRefused) {
  const auto refusal = [](const CoreTopology& t, const CoreWishes& w) {
    try {
      (void)assign_cores(t, w);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("granted");
  };
  EXPECT_EQ(refusal(machine(1, 2, 1), {.compute = 3}),
            "threads.compute: asks for 3 threads, but this process may use 2 cores\n  hint: at most 2; "
            "\"auto\" takes "
            "them all");
  EXPECT_HAS(refusal(machine(1, 2, 1), {.compute = 2, .reserved = 1}),
             "may use 1 core beside those of threads.reserved");
  EXPECT_EQ(refusal(machine(1, 2, 1), {.reserved = 2}),
            "threads.reserved: asks for 2 cores of each node, but this process may use 2 of node 0, one of "
            "which must "
            "compute\n  hint: at most 1");
  // The smallest node decides.
  CoreTopology t = machine(2, 8, 1);
  t.nodes[1].cores.resize(2);
  EXPECT_HAS(refusal(t, {.reserved = 2}), "of node 1");
}

TEST(CpuList, IsParsedAndWritten) {
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11\n"), (Ints{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("5"), (Ints{5}));
  EXPECT_EQ(parse_cpu_list("8,2-3,3"), (Ints{2, 3, 8}));
  for (const char* text : {"", "\n", "a", "1-", "-1", "3-1", "1,,2", "0-99999999", "1;2", "0-3x"})
    EXPECT_TRUE(parse_cpu_list(text).empty()) << text;
  for (const char* text : {"", "0", "0-1", "0-3,8,10-11", "1,3,5-6"})
    EXPECT_EQ(format_cpu_list(parse_cpu_list(text)), text);
}

// The topology of a machine whose files stand in a folder of the test.
class CoreTopologyTest : public testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) const {
    test::write_file(root_ / "sys/devices/system/" + file, text + "\n");
  }
  CoreTopology read(const Ints& usable) const { return read_core_topology(usable, root_.path()); }
  const test::TempDir root_;
};

TEST_F(CoreTopologyTest, NodesAndHyperthreads) {
  write("node/node0/cpulist", "0-1,4-5");
  write("node/node1/cpulist", "2-3,6-7");
  write("node/node10/cpulist", "");  // memory alone
  write("node/nodes/cpulist", "0");  // no node
  for (int cpu = 0; cpu < 8; ++cpu) {
    const std::string siblings = std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4);
    write("cpu/cpu" + std::to_string(cpu) + "/topology/" +
              (cpu < 2 ? "thread_siblings_list" : "core_cpus_list"),
          siblings);
  }
  using Nodes = std::vector<CoreTopology::Node>;
  EXPECT_EQ(read(range(0, 7)).nodes,
            (Nodes{{0, {{0, 0}, {1, 1}, {4, 0}, {5, 1}}}, {1, {{2, 2}, {3, 3}, {6, 2}, {7, 3}}}, {10, {}}}));
  // A process that may use some only; 9 belongs to no node.
  EXPECT_EQ(read({1, 5, 6, 9}).nodes, (Nodes{{0, {{1, 1}, {5, 1}, {9, 9}}}, {1, {{6, 2}}}, {10, {}}}));
  EXPECT_EQ(read({6}).nodes, (Nodes{{0, {}}, {1, {{6, 2}}}, {10, {}}}));
  EXPECT_EQ(read({6}).cores(), 1);
}

TEST_F(CoreTopologyTest, WithoutFilesThereIsOneNode) {
  using Nodes = std::vector<CoreTopology::Node>;
  EXPECT_EQ(read({0, 3}).nodes, (Nodes{{0, {{0, 0}, {3, 3}}}}));
  write("node/node0/cpulist", "garbage");
  write("cpu/cpu3/topology/core_cpus_list", "7");  // does not know itself
  EXPECT_EQ(read({0, 3}).nodes, (Nodes{{0, {{0, 0}, {3, 3}}}}));
}

TEST(CoresHere, AreThoseThatThisThreadMayUse) {
  const Ints before = usable_cores();
  ASSERT_FALSE(before.empty());
  EXPECT_EQ(read_core_topology().cores(), static_cast<int>(before.size()));
  std::thread([&] {
    ASSERT_EQ(bind_this_thread({before.back()}), 0);
    EXPECT_EQ(usable_cores(), Ints{before.back()});
    EXPECT_EQ(read_core_topology().cores(), 1);
    EXPECT_EQ(assign_cores(read_core_topology(), {}).threads(), 1);
    // None of these exists.
    EXPECT_EQ(bind_this_thread({8191}), EINVAL);
  }).join();
  EXPECT_EQ(usable_cores(), before);
}

}  // namespace
}  // namespace zg
