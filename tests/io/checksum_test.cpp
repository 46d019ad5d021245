// The vector variants must agree: a drive written by one may be read by another.
#include <gtest/gtest.h>

#include <vector>

#include "io/checksum.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io {
namespace {

TEST(Checksum, AllVariantsAgree) {
  const NamedRandom random(1, "checksum");
  std::vector<unsigned char> bytes(100'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(random.block(i)[0]);
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{240}, std::size_t{241},
                              std::size_t{4096}, std::size_t{99'999}}) {
    const std::uint64_t expected = checksum_portable(bytes.data(), n);
    EXPECT_EQ(checksum(bytes.data(), n), expected) << n;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      EXPECT_EQ(checksum_avx2(bytes.data(), n), expected) << n;
    }
    if (__builtin_cpu_supports("avx512f")) {
      EXPECT_EQ(checksum_avx512(bytes.data(), n), expected) << n;
    }
#endif
  }
  bytes[50'000] ^= 1;
  EXPECT_NE(checksum(bytes.data(), 99'999), checksum_portable(bytes.data() + 1, 99'998));
}

// XXH3's published value of the empty input.
TEST(Checksum, KnownAnswer) {
  EXPECT_EQ(checksum(nullptr, 0), 0x2D06800538D394C2ull);
}

}  // namespace
}  // namespace zg::io
