#include "ziggurat/base/error.hpp"

#include <gtest/gtest.h>

#include "ziggurat/base/view.hpp"

namespace zg {
namespace {

TEST(Error, SaysWhereWhatAndHow) {
  const Error e(Errc::kUsage, "run.json: tiers.host", "'10 XB' is no size", "write 10GB or 10GiB");
  EXPECT_STREQ(e.what(), "run.json: tiers.host: '10 XB' is no size\n  hint: write 10GB or 10GiB");
  EXPECT_EQ(e.where(), "run.json: tiers.host");
  EXPECT_EQ(e.message(), "'10 XB' is no size");
  EXPECT_EQ(e.hint(), "write 10GB or 10GiB");
  EXPECT_STREQ(Error(Errc::kIo, "", "broken").what(), "broken");
  EXPECT_STREQ(Error(Errc::kIo, "/dev/x", "broken").what(), "/dev/x: broken");
}

TEST(Error, ExitCodes) {
  EXPECT_EQ(Error(Errc::kUsage, "", "").exit_code(), 2);
  EXPECT_EQ(Error(Errc::kMemory, "", "").exit_code(), 2);
  EXPECT_EQ(Error(Errc::kIo, "", "").exit_code(), 1);
  EXPECT_EQ(Error(Errc::kDevice, "", "").exit_code(), 1);
  EXPECT_EQ(Error(Errc::kInterrupted, "", "").exit_code(), 130);
}

TEST(Error, ErrnoText) {
  EXPECT_EQ(errno_text(ENOENT), "No such file or directory (errno 2)");
}

TEST(Assert, EvaluatesItsOperandsOnceAndPasses) {
  int evaluations = 0;
  ZG_ASSERT_EQ(++evaluations, 1);
  ZG_ASSERT(++evaluations == 2, "{}", "not built");
  ZG_ASSERT_LE(evaluations, 2);
  EXPECT_EQ(evaluations, 2);
}

TEST(AssertDeathTest, PrintsBothOperands) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int a = 3, b = 4;
  EXPECT_DEATH(ZG_ASSERT_EQ(a, b), "error_test.cpp:[0-9]+: this is a bug.*a == b: 3 against 4");
  EXPECT_DEATH(ZG_ASSERT(a > b, "block {}", 17), "a > b: block 17");
  EXPECT_DEATH(ZG_ASSERT(a > b), "a > b");
}

// What a file says may stand in a message.
TEST(Error, LongTextsAreShortened) {
  std::string text = "begins here";
  while (text.size() < 100'000) text += "\xc3\xa9";
  const Error e(Errc::kUsage, text, text + " ends here", text);
  for (const std::string& shown : {std::string(e.what()), e.message(), e.hint()}) {
    EXPECT_LT(shown.size(), 25'000u);
    EXPECT_NE(shown.find("begins here"), shown.npos);
    EXPECT_EQ(shown.find("\\x"), shown.npos) << "a character was cut";
  }
  EXPECT_NE(e.message().find(" bytes ...] "), e.message().npos);
  EXPECT_TRUE(e.message().ends_with(" ends here"));
  EXPECT_EQ(Error(Errc::kUsage, "a", std::string(8000, 'b')).message(), std::string(8000, 'b'));
}

TEST(Error, ControlCharactersCountAsTheirLongerTexts) {
  const std::string much(100'000, '\x1b');
  const Error e(Errc::kUsage, much, much, much);
  EXPECT_LT(std::string(e.what()).size(), 25'000u);
  EXPECT_LT(e.message().size(), 8'100u);
  EXPECT_LT(e.hint().size(), 8'100u);
  EXPECT_TRUE(e.message().starts_with("\\x1b\\x1b"));
}

TEST(View, RangesKeepTheLeadingDimension) {
  float data[20] = {};
  const View v(data, DType::kF32, 4, 3, 5);
  EXPECT_EQ(v.count(), 12);
  EXPECT_TRUE(v);
  EXPECT_FALSE(View());
  const View rows = v.row_range(1, 2), cols = v.col_range(2, 1);
  EXPECT_EQ(rows.as<float>(), data + 5);
  EXPECT_EQ(rows.rows, 2);
  EXPECT_EQ(rows.ld, 5);
  EXPECT_EQ(cols.as<float>(), data + 2);
  EXPECT_EQ(cols.cols, 1);
  EXPECT_EQ(cols.ld, 5);
}

TEST(ViewDeathTest, WrongType) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  float x = 0;
  const View v(&x, DType::kF32, 1, 1);
  EXPECT_DEATH(v.as<double>(), "dtype == dtype_of");
}

}  // namespace
}  // namespace zg
