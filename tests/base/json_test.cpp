#include "ziggurat/base/json.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "ziggurat/base/printable.hpp"

namespace zg {
namespace {

std::string problem_of(const std::string& text, const JsonBounds& bounds = {}) {
  const Error error = test::error_of([&] { (void)parse_json(text, "f.json", "mend it", bounds); });
  EXPECT_EQ(error.code(), Errc::kUsage);
  EXPECT_EQ(error.where(), "f.json");
  EXPECT_EQ(error.hint(), "mend it");
  return error.message();
}

TEST(BoundedJson, SaysWhereATextIsNone) {
  EXPECT_HAS(problem_of("{\"a\": 1,\n \"b\": tru\xff}"), "is no JSON: line 2, column 10: ");
  EXPECT_HAS(problem_of("{\"a\": 1,\n \"b\": tru\xff}"), "\\xff");
  EXPECT_HAS(problem_of("{\"a\": \n", {.first_line = 40}), "line 41, column 1: ");
  EXPECT_HAS(problem_of(""), "line 1, column 1");
  EXPECT_HAS(problem_of("{} x"), "line 1, column 4");
  EXPECT_HAS(problem_of("{\"a\": 1e999}"), "1e999");
  EXPECT_HAS(problem_of(std::string("{}\0{}", 5)), "column 3: a zero byte");
  EXPECT_LT(problem_of("[" + std::string(100'000, '1') + "x]").size(), 400u);
}

// Each list takes memory, and each depth a frame of a stack somewhere.
TEST(BoundedJson, HasABoundOnDepthAndValues) {
  const auto nested = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW((void)parse_json(nested(128), "f", ""));
  EXPECT_HAS(problem_of(nested(129)), "129 deep, 128 at most");
  EXPECT_HAS(problem_of(std::string(10'000'000, '[')), "10000000 deep");
  EXPECT_HAS(problem_of("[1,2,3,4]", {.values = 4}), "5 values, 4 at most");
  // What stands in a text is no list.
  EXPECT_NO_THROW(
      (void)parse_json("[\"" + std::string(1000, '[') + "\\\"[[,,\"]", "f", "", {.depth = 1, .values = 2}));
  EXPECT_EQ(parse_json("// one\n{\"a\": 1}", "f", "", {.comments = true})["a"], 1);
}

TEST(Printable, ATerminalObeysNothing) {
  EXPECT_EQ(printable("a\tb\nc \xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "a\tb\nc \xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("\x1b[2J\r\x7f\x01"), "\\x1b[2J\\x0d\\x7f\\x01");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // a control character of one byte more
  EXPECT_EQ(printable("\xe2\x80\xae"), "\\xe2\\x80\\xae");  // turns the direction of the text
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");           // no UTF-8
  EXPECT_EQ(printable("\xc0\xaf\xed\xa0\x80"), "\\xc0\\xaf\\xed\\xa0\\x80");  // too long; a surrogate
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  const Error error(Errc::kUsage, "fi\x1ble", "what\x1b[31m", "hint\x07");
  for (const std::string& text : {std::string(error.what()), error.message(), error.hint()})
    EXPECT_EQ(text.find_first_of("\x1b\x07"), text.npos) << text;
}

}  // namespace
}  // namespace zg
