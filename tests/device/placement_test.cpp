// Which node's memory serves which device, on machines that the tests describe.
#include <gtest/gtest.h>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg::test {
namespace {

using Shares = std::vector<NodeShare>;
constexpr std::int64_t kPage = 4096;

std::vector<MemoryUser> users(const std::string& name, const std::vector<int>& nodes) {
  std::vector<MemoryUser> all;
  for (std::size_t i = 0; i < nodes.size(); ++i) all.push_back({name + std::to_string(i), nodes[i]});
  return all;
}
std::int64_t sum(const Shares& shares) {
  std::int64_t bytes = 0;
  for (const NodeShare& share : shares) bytes += share.bytes;
  return bytes;
}

// Two sockets of 64 GiB, 16 cores each.
NodeTopology two_sockets() {
  return read_node_topology("pack:2 [numa(memory=68719476736)] core:16 pu:1");
}

TEST(Placement, TwoSocketsEightDevicesEightDrives) {
  const NodeTopology topology = two_sockets();
  ASSERT_EQ(topology.nodes, (std::vector<NodeTopology::Node>{{0, 64 * kGiB}, {1, 64 * kGiB}}));
  const std::vector<int> nodes{0, 0, 0, 0, 1, 1, 1, 1}, mixed{1, 0, 1, 0, 1, 0, 1, 0};
  const MemoryPlacement p =
      place_on_numa_nodes(topology, users("gpu", nodes), users("nvme", mixed), 96 * kGiB);
  EXPECT_EQ(p.device_nodes, nodes);
  EXPECT_EQ(p.drive_nodes, mixed);
  ASSERT_EQ(p.device_shares.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(p.device_shares[i], (Shares{{nodes[i], 12 * kGiB}})) << i;
}

TEST(Placement, WhatItsNodeCannotHoldComesFromTheNext) {
  // All devices on one socket, and more than it has.
  const MemoryPlacement p = place_on_numa_nodes(two_sockets(), users("gpu", {0, 0, 0, 0}), {}, 96 * kGiB);
  for (const Shares& shares : p.device_shares) EXPECT_EQ(shares, (Shares{{0, 16 * kGiB}, {1, 8 * kGiB}}));
  // Three on one socket, one on the other: whose node is full takes from the neighbour only what that leaves.
  const MemoryPlacement q = place_on_numa_nodes(two_sockets(), users("gpu", {0, 0, 0, 1}), {}, 112 * kGiB);
  const std::int64_t third = 64 * kGiB / 3 / kPage * kPage;
  EXPECT_EQ(q.device_shares[3], (Shares{{1, 28 * kGiB}}));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(sum(q.device_shares[i]), 28 * kGiB);
    EXPECT_EQ(q.device_shares[i][0].node, 0);
    EXPECT_NEAR(static_cast<double>(q.device_shares[i][0].bytes), static_cast<double>(third), 2 * kPage);
    EXPECT_EQ(q.device_shares[i][1].node, 1);
  }
  // More than there is: nobody's node, for the limits to refuse.
  const MemoryPlacement r = place_on_numa_nodes(two_sockets(), users("gpu", {0}), {}, 130 * kGiB);
  EXPECT_EQ(r.device_shares[0], (Shares{{0, 64 * kGiB}, {1, 64 * kGiB}, {-1, 2 * kGiB}}));
}

TEST(Placement, OneNodeDecidesNothing) {
  const NodeTopology topology = read_node_topology("pack:1 [numa(memory=8589934592)] core:4 pu:2");
  ASSERT_EQ(topology.nodes.size(), 1u);
  const MemoryPlacement p =
      place_on_numa_nodes(topology, users("gpu", {0, -1}), users("nvme", {0}), 4 * kGiB + kPage);
  EXPECT_EQ(p.device_nodes, (std::vector<int>{-1, -1}));
  EXPECT_EQ(p.drive_nodes, (std::vector<int>{-1}));
  EXPECT_EQ(p.device_shares, (std::vector<Shares>{{{-1, 2 * kGiB + kPage}}, {{-1, 2 * kGiB}}}));
  EXPECT_EQ(place_on_numa_nodes(topology, {}, {}, kGiB).device_shares, (std::vector<Shares>{{{-1, kGiB}}}));
}

TEST(Placement, WithoutDevicesTheDrivesDecide) {
  const MemoryPlacement even = place_on_numa_nodes(two_sockets(), {}, users("nvme", {0, 0, 1, 1}), 8 * kGiB);
  EXPECT_EQ(even.device_shares, (std::vector<Shares>{{{0, 4 * kGiB}, {1, 4 * kGiB}}}));
  const MemoryPlacement odd = place_on_numa_nodes(two_sockets(), {}, users("nvme", {1, 1, 1, 0}), 8 * kGiB);
  EXPECT_EQ(odd.device_shares, (std::vector<Shares>{{{0, 2 * kGiB}, {1, 6 * kGiB}}}));
  const MemoryPlacement unknown = place_on_numa_nodes(two_sockets(), {}, users("nvme", {-1, 1}), 8 * kGiB);
  EXPECT_EQ(unknown.device_shares, (std::vector<Shares>{{{1, 4 * kGiB}, {-1, 4 * kGiB}}}));
  EXPECT_EQ(unknown.drive_nodes, (std::vector<int>{-1, 1}));
}

// Node 2 has the device but no memory (as behind an accelerator's socket), node 3 is nearest to it.
TEST(Placement, ANodeWithoutMemoryBorrowsFromTheNearest) {
  NodeTopology topology;
  topology.nodes = {{0, 32 * kGiB}, {1, 32 * kGiB}, {2, 0}, {3, 8 * kGiB}};
  topology.distances = {{10, 12, 32, 32}, {12, 10, 32, 28}, {32, 28, 10, 12}, {32, 28, 12, 10}};
  const MemoryPlacement p =
      place_on_numa_nodes(topology, users("gpu", {2}), users("nvme", {2, 0}), 50 * kGiB);
  EXPECT_EQ(p.device_nodes, (std::vector<int>{3}));
  EXPECT_EQ(p.drive_nodes, (std::vector<int>{3, 0}));
  EXPECT_EQ(p.device_shares[0], (Shares{{3, 8 * kGiB}, {1, 32 * kGiB}, {0, 10 * kGiB}}));
  // With one node that has memory there is nothing to decide, however many have none.
  topology.nodes = {{0, 0}, {1, 32 * kGiB}};
  topology.distances.clear();
  EXPECT_EQ(place_on_numa_nodes(topology, users("gpu", {0}), {}, kGiB).device_nodes, (std::vector<int>{-1}));
  EXPECT_EQ(place_on_numa_nodes({}, users("gpu", {0}), {}, kGiB).device_shares,
            (std::vector<Shares>{{{-1, kGiB}}}));
}

TEST(Placement, EveryByteIsPlacedWhateverTheMachine) {
  for (const char* text :
       {"pack:2 [numa(memory=1073741824)] core:4 pu:1", "pack:4 [numa(memory=1000000000)] core:2 pu:1",
        "pack:2 numa(memory=1073741824):4 core:2 pu:1", "core:1 pu:1"}) {
    const NodeTopology topology = read_node_topology(text);
    ASSERT_FALSE(topology.nodes.empty()) << text;
    for (const std::size_t devices : {0, 1, 3, 8}) {
      std::vector<int> nodes;
      for (std::size_t i = 0; i < devices; ++i) nodes.push_back(static_cast<int>(i * i % 5) - 1);
      for (const std::int64_t budget : {std::int64_t{0}, kPage, 3 * kGiB + 4097, 40 * kGiB}) {
        const MemoryPlacement p =
            place_on_numa_nodes(topology, users("gpu", nodes), users("nvme", {0, 3, -1}), budget);
        std::int64_t all = 0;
        std::vector<std::int64_t> of_node(topology.nodes.size());
        for (const Shares& shares : p.device_shares) {
          all += sum(shares);
          for (const NodeShare& share : shares) {
            if (share.node >= 0) of_node[static_cast<std::size_t>(share.node)] += share.bytes;
          }
        }
        EXPECT_EQ(all, budget) << text;
        for (std::size_t n = 0; n < of_node.size(); ++n)
          EXPECT_LE(of_node[n], topology.nodes[n].bytes) << text;
      }
    }
  }
}

TEST(Placement, TheTopologyOfThisMachineCanBeRead) {
  const NodeTopology topology = read_node_topology();
  ASSERT_FALSE(topology.nodes.empty());
  EXPECT_GT(topology.nodes.front().bytes, 0);
  for (const auto& row : topology.distances) EXPECT_EQ(row.size(), topology.nodes.size());
  EXPECT_THROW(read_node_topology("two sockets, please"), Error);
}

}  // namespace
}  // namespace zg::test
