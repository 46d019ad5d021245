// Text from files and other programs, made safe to show.
#pragma once
#include <string>
#include <string_view>

namespace zg {

// The text with control characters (but newlines and tabs) and bytes that are no UTF-8 written as "\x1b": a
// terminal obeys none of it. Error and the log do this with all that they are given.
std::string printable(std::string_view text);

}  // namespace zg
