// The seed of a random test: ZG_TEST_SEED where it is set, to repeat a failure, else the test's own.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace zg::test {

inline std::uint64_t test_seed(std::uint64_t otherwise) {
  const char* text = std::getenv("ZG_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : otherwise;
}

}  // namespace zg::test
