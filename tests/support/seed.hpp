// The seed of a random test, ZG_TEST_SEED where it is set, to repeat a failure, else the test's own; and how
// many inputs it makes.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace zg::test {

inline std::uint64_t test_seed(std::uint64_t otherwise) {
  const char* text = std::getenv("ZG_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : otherwise;
}

// How many random inputs a test makes: ZG_TEST_INPUTS, where that is set.
inline std::uint64_t inputs_asked(std::uint64_t usual) {
  const char* asked = std::getenv("ZG_TEST_INPUTS");
  return asked == nullptr ? usual : std::strtoull(asked, nullptr, 10);
}

}  // namespace zg::test
