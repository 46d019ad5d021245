#include "ziggurat/base/printable.hpp"

#include <fmt/format.h>

#include <iterator>

namespace zg {
namespace {

// The length of the character at the beginning of `text` if it is well-formed UTF-8 and no control character;
// else 0.
std::size_t shown(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return (first >= 0x20 && first != 0x7f) || first == '\n' || first == '\t' ? 1 : 0;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0))
    return 0;  // overlong form; surrogate
  if ((first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90))
    return 0;                                     // overlong form; above U+10FFFF
  if (first == 0xc2 && byte(1) < 0xa0) return 0;  // control characters
  // Marks that change the direction of the text around them.
  if (first == 0xe2 && ((byte(1) == 0x80 && byte(2) >= 0xaa && byte(2) <= 0xae) ||
                        (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9)))
    return 0;
  return length;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t n = shown(text);
    if (n > 0) {
      out.append(text.substr(0, n));
    } else {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(text[0]));
    }
    text.remove_prefix(n > 0 ? n : 1);
  }
  return out;
}

}  // namespace zg
