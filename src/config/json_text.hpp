// Checks a configuration's text before it is parsed: nlohmann's parser takes some faults, or refuses them
// without a word of how to mend it. Private to src/config.
#pragma once
#include <string>
#include <string_view>

namespace zg::config {

// Looks at a text, which need not be JSON, as far as it is.
struct JsonText {
  explicit JsonText(std::string_view text);

  // The first thing that JSON does not have and people write, and how to mend it; empty: none.
  std::string mend;
  // The first key that an object has twice, as a path, with the lines of both; empty: none.
  std::string twice, twice_lines;
  // What is too large for any configuration: a key's length, or the number of an object's keys; empty:
  // nothing.
  std::string too_large;
};

}  // namespace zg::config
