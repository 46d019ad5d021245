// What is wrong with a model file of SentencePiece, before its library is given it: the library trusts the
// table of replacements inside, and a long piece or replacement makes it take any time or memory. Pure; any
// thread.
#pragma once
#include <string>
#include <string_view>

namespace zg {

// Empty: nothing that this check looks for.
std::string sentencepiece_problem(std::string_view model);

}  // namespace zg
