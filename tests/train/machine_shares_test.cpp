// What each of several processes on one machine gets of it.
#include <gtest/gtest.h>

#include <algorithm>

#include "ziggurat/train/node.hpp"

namespace zg {
namespace {

CoreTopology topology(const std::vector<std::vector<std::pair<int, int>>>& nodes) {
  CoreTopology t;
  for (const auto& cores : nodes) {
    t.nodes.push_back({static_cast<int>(t.nodes.size()), {}});
    for (const auto& [cpu, physical] : cores) t.nodes.back().cores.push_back({cpu, physical});
  }
  return t;
}

TEST(SharesOfAMachine, CoresAreDividedWithoutRest) {
  // Two nodes of two physical cores, each with two hyperthreads.
  const CoreTopology t = topology({{{0, 0}, {1, 1}, {4, 0}, {5, 1}}, {{2, 2}, {3, 3}, {6, 2}, {7, 3}}});
  EXPECT_EQ(share_of_cores(t, 0, 2), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(share_of_cores(t, 1, 2), (std::vector<int>{2, 3, 6, 7}));
  EXPECT_EQ(share_of_cores(t, 0, 4), (std::vector<int>{0, 4}));
  EXPECT_EQ(share_of_cores(t, 3, 4), (std::vector<int>{3, 7}));
  EXPECT_EQ(share_of_cores(t, 0, 1).size(), 8u);
  for (int parts = 1; parts <= 8; ++parts) {
    std::vector<int> all;
    for (int part = 0; part < parts; ++part) {
      const std::vector<int> share = share_of_cores(t, part, parts);
      EXPECT_GE(share.size(), 8u / static_cast<unsigned>(parts));
      all.insert(all.end(), share.begin(), share.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7})) << parts;
  }
}

TEST(SharesOfAMachine, FewCoresAreShared) {
  const CoreTopology t = topology({{{0, 0}, {1, 1}}});
  for (int part = 0; part < 5; ++part) EXPECT_EQ(share_of_cores(t, part, 5), std::vector<int>{part % 2});
}

TEST(SharesOfAMachine, EachProcessHasItsDirectory) {
  EXPECT_EQ(drive_directory("/mnt", 0, 1), "/mnt");
  EXPECT_EQ(drive_directory("/mnt", 0, 3), "/mnt");
  EXPECT_EQ(drive_directory("/mnt", 2, 3), "/mnt/ziggurat-process-2");
}

}  // namespace
}  // namespace zg
