// Checks a configuration's text before it is parsed: nlohmann's parser accepts some mistakes, or refuses them
// without a hint how to mend them. Private to src/config.
#pragma once
#include <string>
#include <string_view>

namespace zg::config {

// The result of checking a text. The text need not be JSON; it is checked as far as it is valid.
struct JsonText {
  explicit JsonText(std::string_view text);

  // The first common mistake that is not valid JSON, and how to mend it; empty: none.
  std::string mend;
  // The first key that an object has twice, as a path, with the lines of both; empty: none.
  std::string twice, twice_lines;
  // The first excess over the limits: a key that is too long, or an object with too many keys; empty: none.
  std::string too_large;
};

}  // namespace zg::config
