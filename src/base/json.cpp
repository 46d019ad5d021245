#include "ziggurat/base/json.hpp"

#include <algorithm>

namespace zg {

namespace {

// Counts a text's nesting depth and number of values without parsing it, from the brackets and commas outside
// of strings.
struct Shape {
  std::int64_t depth = 0, deepest = 0, values = 1;

  explicit Shape(std::string_view text) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      switch (text[i]) {
        case '"':
          i = end_of_text(text, i + 1);
          break;
        case '[':
        case '{':
          deepest = std::max(deepest, ++depth);
          ++values;
          break;
        case ']':
        case '}':
          --depth;
          break;
        case ',':
          ++values;
          break;
        default:
          break;
      }
    }
  }

 private:
  static std::size_t end_of_text(std::string_view text, std::size_t i) {
    for (i = text.find_first_of("\"\\", i); i < text.size() && text[i] == '\\';)
      i = text.find_first_of("\"\\", i + 2);
    return std::min(i, text.size());
  }
};

}  // namespace

std::string json_out_of_bounds(std::string_view text, const JsonBounds& bounds) {
  if (const std::size_t zero = text.find('\0'); zero != text.npos)
    return json_problem(text, static_cast<std::int64_t>(zero) + 1, "a zero byte", bounds.first_line);
  const Shape shape(text);
  if (shape.deepest > bounds.depth)
    return fmt::format("nests objects and lists {} deep, {} at most expected", shape.deepest, bounds.depth);
  if (shape.values > bounds.values)
    return fmt::format("has {} values, {} at most expected", shape.values, bounds.values);
  return {};
}

std::string json_problem(std::string_view text, std::int64_t byte, const std::string& what,
                         std::int64_t first_line) {
  // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while parsing value -
  // ..."
  std::string cause = what;
  for (const char* end : {"] ", "column ", ": "}) {
    if (cause.empty() || (cause[0] != '[' && std::string_view(end) == "] ")) continue;
    const std::size_t at = cause.find(end);
    const bool place = what.find("parse error at line") != what.npos;
    if (at == cause.npos || (std::string_view(end) != "] " && !place)) continue;
    cause.erase(0, at + std::string_view(end).size());
  }
  constexpr std::size_t kShown = 200;  // characters; the parser quotes whole tokens, which may be long
  if (cause.size() > kShown) cause = cause.substr(0, kShown) + " ...";
  if (byte < 1) return "is no JSON: " + cause;
  const std::string_view before = text.substr(0, static_cast<std::size_t>(byte - 1));
  const auto line = first_line + std::count(before.begin(), before.end(), '\n');
  const std::size_t newline = before.rfind('\n');
  const std::size_t column = newline == before.npos ? before.size() + 1 : before.size() - newline;
  return fmt::format("is no JSON: line {}, column {}: {}", line, column, cause);
}

}  // namespace zg
