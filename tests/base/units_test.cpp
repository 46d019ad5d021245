#include "ziggurat/base/units.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace zg {
namespace {

TEST(ParseBytes, SizesAsPeopleWriteThem) {
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("48MiB"), 48 * kMiB);
  EXPECT_EQ(parse_bytes("1.5 GB"), 1500000000);
  EXPECT_EQ(parse_bytes("1.5GiB"), 3 * kGiB / 2);
  EXPECT_EQ(parse_bytes("2k"), 2000);
  EXPECT_EQ(parse_bytes("2 kib"), 2048);
  EXPECT_EQ(parse_bytes("2Ki"), 2048);
  EXPECT_EQ(parse_bytes("7 B"), 7);
  EXPECT_EQ(parse_bytes("1TiB"), 1024 * kGiB);
  EXPECT_EQ(parse_bytes("1PB"), 1000000000000000);
  EXPECT_EQ(parse_bytes(".5MiB"), kMiB / 2);
}

TEST(ParseBytes, EverythingElseIsNoSize) {
  for (const char* text : {"", " ", "MiB", "-1", "-5MiB", "12 parsecs", "1.5 XB", "1MiBs", "1 Mb/s", "nan",
                           "inf", "1e30", "9999999PiB", "12 34", "1..5"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
  }
}

TEST(ParseBytes, ReadsWhatFormatBytesWrites) {
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{1023}, kKiB, 10 * kMiB, 3 * kGiB, 2048 * kGiB}) {
    EXPECT_EQ(parse_bytes(format_bytes(bytes)), bytes) << format_bytes(bytes);
  }
}

TEST(Format, Bytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(48 * kMiB), "48.0 MiB");
  EXPECT_EQ(format_bytes(5 * kGiB / 2), "2.50 GiB");
  EXPECT_EQ(format_bytes(3 * 1024 * kGiB), "3.00 TiB");
}

TEST(Format, Rate) {
  EXPECT_EQ(format_rate(3.21e9), "3.21 GB/s");
  EXPECT_EQ(format_rate(4.56e6), "4.6 MB/s");
  EXPECT_EQ(format_rate(1500), "1.5 kB/s");
}

TEST(Format, Seconds) {
  EXPECT_EQ(format_seconds(0.0351), "35.1 ms");
  EXPECT_EQ(format_seconds(2.34), "2.3 s");
  EXPECT_EQ(format_seconds(12), "12 s");
  EXPECT_EQ(format_seconds(245), "4:05");
  EXPECT_EQ(format_seconds(3723), "1:02:03");
  EXPECT_EQ(format_seconds(59.7), "1:00");
}

TEST(RoundUp, ToTheNextMultiple) {
  EXPECT_EQ(round_up(0, 4096), 0);
  EXPECT_EQ(round_up(1, 4096), 4096);
  EXPECT_EQ(round_up(4096, 4096), 4096);
  EXPECT_EQ(round_up(4097, 4096), 8192);
}

TEST(NearestName, SuggestsSlipsOnly) {
  const std::vector<std::string> keys = {"train_batch_size", "gradient_clipping", "steps"};
  EXPECT_EQ(nearest_name("train_batchsize", keys), "train_batch_size");
  EXPECT_EQ(nearest_name("step", keys), "steps");
  EXPECT_EQ(nearest_name("zero_optimization", keys), std::nullopt);
  EXPECT_EQ(nearest_name("x", keys), std::nullopt);
}

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("", "ab"), 2);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("flaw", "lawn"), 2);
}

}  // namespace
}  // namespace zg
