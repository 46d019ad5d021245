// JSON from untrusted files: parsed with bounds on depth and size, and with errors that name the place.
// Needs nlohmann-json.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "ziggurat/base/error.hpp"

namespace zg {

struct JsonBounds {
  std::int64_t depth = 128;         // nesting of objects and lists
  std::int64_t values = 8'000'000;  // number of values; each takes up to 100 bytes of memory
  std::int64_t first_line = 1;      // the text's first line in its file
  bool comments = false;            // "//" and "/* */" are taken for blanks
};

// Checks a text before it is parsed. Returns the problem: its depth, its number of values, or a zero byte,
// which nlohmann's parser takes for the end. Empty: none.
std::string json_out_of_bounds(std::string_view text, const JsonBounds& bounds);
// "line 3, column 14: ..." from the message of nlohmann's parser, with the place counted from the
// file's begin.
std::string json_problem(std::string_view text, std::int64_t byte, const std::string& what,
                         std::int64_t first_line);

// Parses a whole text. Throws Error(kUsage) at `where`, with line, column and cause, for a text that is not
// JSON or is out of bounds.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& where, const std::string& hint,
                const JsonBounds& bounds = {}) {
  const std::string problem = json_out_of_bounds(text, bounds);
  if (!problem.empty()) throw Error(Errc::kUsage, where, problem, hint);
  try {
    return Json::parse(text.begin(), text.end(), nullptr, true, bounds.comments);
  } catch (const nlohmann::json::parse_error& e) {
    throw Error(Errc::kUsage, where,
                json_problem(text, static_cast<std::int64_t>(e.byte), e.what(), bounds.first_line), hint);
  } catch (const nlohmann::json::exception& e) {  // a number too large for a double
    throw Error(Errc::kUsage, where, json_problem(text, -1, e.what(), bounds.first_line), hint);
  }
}

}  // namespace zg
