#include "support/places.hpp"

namespace zg::test {

std::string in_source(const std::string& path) {
  return std::string(ZG_SOURCE_DIR "/") + path;
}
std::string built_program() {
  return ZG_BINARY;
}
std::string built_for_tests(const std::string& file) {
  return std::string(ZG_TESTS_DIR "/") + file;
}

}  // namespace zg::test
