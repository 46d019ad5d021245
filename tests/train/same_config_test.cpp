// Which key differs between the configurations of two processes.
#include "train/same_config.hpp"

#include <gtest/gtest.h>

namespace zg {
namespace {

TEST(SameConfig, NamesTheFirstKeyThatDiffers) {
  const std::string one = R"({"steps": 5, "tiers": {"nvme": [{"path": "a"}, {"path": "b"}]}})";
  const auto difference = [&](const std::string& other) { return first_difference(one, other); };
  EXPECT_EQ(difference(one).key, "");
  EXPECT_EQ(difference(R"({"tiers": {"nvme": [{"path": "a"}, {"path": "b"}]}, "steps": 5})").key, "");
  const ConfigDifference path =
      difference(R"({"steps": 5, "tiers": {"nvme": [{"path": "a"}, {"path": "c"}]}})");
  EXPECT_EQ(path.key, "tiers.nvme.1.path");
  EXPECT_EQ(path.first, "\"b\"");
  EXPECT_EQ(path.second, "\"c\"");
  const ConfigDifference more =
      difference(R"({"seed": 2, "steps": 5, "tiers": {"nvme": [{"path": "a"}, {"path": "b"}]}})");
  EXPECT_EQ(more.key, "seed");
  EXPECT_EQ(more.first, "not set");
  EXPECT_EQ(more.second, "2");
}

}  // namespace
}  // namespace zg
