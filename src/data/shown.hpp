// Shortens texts from files for error messages, since a file may have a token of megabytes. Pure; any thread.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

// The text or, if it has more than `most` bytes, its beginning and its size.
inline std::string shown(std::string_view text, std::size_t most = 60) {
  if (text.size() <= most) return std::string(text);
  const std::string_view begin = text.substr(0, most);
  return fmt::format("{}... ({} bytes)", begin.substr(0, utf8::whole_prefix(begin)), text.size());
}

}  // namespace zg
