// Text from files and other programs, made safe to show.
#pragma once
#include <string>
#include <string_view>

namespace zg {

// The text with control characters (except newlines and tabs) and bytes that are not UTF-8 escaped, as in
// "\x1b", so that a terminal obeys none of them. Error and the log apply this to all their texts.
std::string printable(std::string_view text);

}  // namespace zg
