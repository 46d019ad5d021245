// What the tests of io/ share: page-aligned memory, and the common helpers without their namespace.
#pragma once
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io::test {

using zg::test::error_of;
using zg::test::has;
using zg::test::read_file;
using zg::test::TempDir;
using zg::test::write_file;

inline constexpr std::int64_t kPage = 4096;

// The seed of a random test, printed.
inline std::uint64_t printed_seed() {
  const std::uint64_t seed = zg::test::test_seed(20240607);
  printf("seed %llu (ZG_TEST_SEED)\n", static_cast<unsigned long long>(seed));
  return seed;
}

class Memory {
 public:
  explicit Memory(std::int64_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw Error(Errc::kMemory, "mmap", errno_text(errno));
    data_ = static_cast<char*>(p);
  }
  ~Memory() { munmap(data_, static_cast<std::size_t>(bytes_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }
  char* at(std::int64_t offset) const { return data_ + offset; }
  std::int64_t bytes() const { return bytes_; }

  // Bytes that differ from word to word and from one `key` to another.
  void fill(std::int64_t offset, std::int64_t bytes, std::uint64_t key) const {
    for (std::int64_t i = 0; i < bytes; i += 8) {
      const std::uint64_t word =
          (key * 0x9E3779B97F4A7C15ull) ^ (static_cast<std::uint64_t>(i) * 0xD2B74407B1CE6E93ull);
      std::memcpy(data_ + offset + i, &word, sizeof(word));
    }
  }

 private:
  std::int64_t bytes_;
  char* data_ = nullptr;
};

}  // namespace zg::io::test
