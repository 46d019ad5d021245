// Seeds of random tests: the test's own, or what ZG_TEST_SEED says, to run a failure again.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace zg::test {

inline std::uint64_t test_seed(std::uint64_t otherwise) {
  const char* text = std::getenv("ZG_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : otherwise;
}

}  // namespace zg::test
