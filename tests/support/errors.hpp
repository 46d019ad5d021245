// Expected errors, and what their texts must say.
#pragma once
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "ziggurat/base/error.hpp"

namespace zg::test {

// The Error that `work` throws, if it throws one.
template <class Work>
std::optional<Error> thrown_by(const Work& work) {
  try {
    (void)work();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// The Error that `work` must throw. Where it throws none, the test fails at the caller's line, and an Error
// with empty texts is returned.
template <class Work>
Error error_of(const Work& work, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (const std::optional<Error> error = thrown_by(work)) return *error;
  ADD_FAILURE_AT(file, line) << "no error was thrown";
  return Error(Errc::kUsage, "", "");
}

inline bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}
inline bool has(const Error& error, std::string_view part) {
  return has(error.what(), part);
}

inline testing::AssertionResult expect_has(const char* expression, const char*, std::string_view text,
                                           std::string_view part) {
  if (has(text, part)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << expression << " lacks \"" << part << "\":\n" << text;
}
inline testing::AssertionResult expect_has_not(const char* expression, const char*, std::string_view text,
                                               std::string_view part) {
  if (!has(text, part)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << expression << " has \"" << part << "\":\n" << text;
}

}  // namespace zg::test

// That `part` occurs in `text`, and that it does not; where it fails, the message shows the whole text.
#define EXPECT_HAS(text, part) EXPECT_PRED_FORMAT2(::zg::test::expect_has, text, part)
#define EXPECT_HAS_NOT(text, part) EXPECT_PRED_FORMAT2(::zg::test::expect_has_not, text, part)
