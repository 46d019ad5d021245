// Where the files of the tree and what was built for the tests are. One object knows the paths, so that a
// compiler's cache serves every copy of the tree with all others.
#pragma once
#include <string>

namespace zg::test {

std::string in_source(const std::string& path);  // "tests/reference/chats.json", from the top of the tree
std::string built_program();                     // ziggurat
std::string built_for_tests(const std::string& file);  // "zg_tier_writer", "libzg_faulty_drive.so"

}  // namespace zg::test
