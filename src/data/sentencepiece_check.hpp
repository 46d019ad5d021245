// Checks a SentencePiece model file before it is passed to the library. The library trusts the file's table
// of replacements, and a long piece or replacement can make it take unbounded time or memory. Pure; any
// thread.
#pragma once
#include <string>
#include <string_view>

namespace zg {

// Describes the problem that was found; empty: none.
std::string sentencepiece_problem(std::string_view model);

}  // namespace zg
