// Tables: how much of each tier a segment is charged.
#include "ziggurat/store/table.hpp"

#include <gtest/gtest.h>

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

TEST(TensorTable, CountsPagesAtTheHostAndGranulesAtTheDevice) {
  constexpr std::int64_t kGranule = 16 * kPage;
  TensorTable table(2, kGranule);
  EXPECT_EQ(table.device_granule(), kGranule);
  // Whole segments of 5 pages and a byte, and a rest of one byte.
  constexpr std::int64_t kSegment = 5 * kPage + 1;
  const TensorId cut = table.add({.name = "cut",
                                  .dtype = DType::kU8,
                                  .count = 2 * kSegment + 1,
                                  .segment_elements = kSegment,
                                  .versions = 2});
  const TensorId large =
      table.add({.name = "large", .dtype = DType::kU8, .count = kGranule + 1, .lowest = Tier::kHost});
  ASSERT_EQ(table.segment_count(), 4);
  const std::int64_t pages[] = {6, 6, 1, 17}, granules[] = {1, 1, 1, 2};
  for (SegmentId id = 0; id < 4; ++id) {
    const Segment& s = table.segment(id);
    EXPECT_EQ(s.charge_at(Tier::kHost), pages[id] * kPage) << id;
    EXPECT_EQ(s.charge_at(Tier::kNvme), pages[id] * kPage) << id;
    EXPECT_EQ(s.charge_at(Tier::kDevice), granules[id] * kGranule) << id;
  }
  EXPECT_EQ(table.total_charge(Tier::kHost), 30 * kPage);
  EXPECT_EQ(table.total_charge(Tier::kDevice), 5 * kGranule);
  EXPECT_EQ(table.nvme_bytes(), 2 * 13 * kPage);
  table.remove(cut);
  EXPECT_EQ(table.total_charge(Tier::kHost), 17 * kPage);
  EXPECT_EQ(table.total_charge(Tier::kDevice), 2 * kGranule);
  EXPECT_EQ(table.nvme_bytes(), 0);
  table.remove(large);
  EXPECT_EQ(table.total_charge(Tier::kDevice), 0);
}

TEST(TensorTable, CountsPagesWhereNothingElseIsSaid) {
  TensorTable table(1);
  table.add({.name = "t", .dtype = DType::kU8, .count = kPage + 1});
  EXPECT_EQ(table.segment(0).charge_at(Tier::kDevice), 2 * kPage);
  EXPECT_EQ(table.total_charge(Tier::kDevice), table.total_charge(Tier::kHost));
}

TEST(TensorTableDeathTest, AGranuleThatIsNoWholePagesIsABug) {
  EXPECT_DEATH(TensorTable(1, 6000), "a granule of 6000 bytes");
}

}  // namespace
}  // namespace zg::test
