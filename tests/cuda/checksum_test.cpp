// The checksum of device memory against that of xxHash itself, bit for bit.
#include <random>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

std::uint64_t on_device(std::vector<std::uint64_t>& words, std::int64_t bytes) {
  std::vector<std::uint64_t> result(1, 0xdeadbeef);
  std::vector<char> scratch(static_cast<std::size_t>(cuda::checksum_scratch_bytes(bytes)), '\xff');
  OnDevice data(words), out(result);
  OnDevice sums(scratch);
  cuda::checksum(launch(), bytes, data.data(), sums.data(), out.data());
  out.fetch();
  return result[0];
}

void expect_same(std::int64_t bytes, std::mt19937_64& random) {
  std::vector<std::uint64_t> words(static_cast<std::size_t>(bytes / 8));
  for (auto& word : words) word = random();
  EXPECT_EQ(on_device(words, bytes), XXH3_64bits(words.data(), static_cast<std::size_t>(bytes))) << bytes;
}

// Ends of stripes, of blocks, and of what the walk takes at once, with a word more and less.
TEST(Checksum, IsThatOfTheHost) {
  std::mt19937_64 random(7);
  for (const std::int64_t at :
       {256, 320, 1024, 1088, 2048, 4096, 15 * 1024, 16 * 1024, 17 * 1024, 32 * 1024}) {
    for (const std::int64_t more : {-8, 0, 8, 56, 64, 72}) expect_same(at + more, random);
  }
  for (int i = 0; i < 40; ++i) expect_same(248 + 8 * static_cast<std::int64_t>(random() % 5000), random);
  expect_same(is_gpu() ? 4 << 20 : 256 << 10, random);
}

TEST(Checksum, OfZerosAndOnes) {
  for (const std::uint64_t word : {std::uint64_t{0}, ~std::uint64_t{0}}) {
    std::vector<std::uint64_t> words(4096 / 8, word);
    EXPECT_EQ(on_device(words, 4096), XXH3_64bits(words.data(), 4096));
  }
}

// Any order of threads.
TEST(Checksum, DoesNotDependOnOrder) {
  std::mt19937_64 random(8);
  for_each_order([&] { expect_same(20000, random); });
}

TEST(Checksum, SeesEveryBit) {
  std::vector<std::uint64_t> words(4096 / 8, 0x0123456789abcdefu);
  const std::uint64_t before = on_device(words, 4096);
  for (const std::size_t word : {0, 1, 7, 8, 127, 128, 383, 384, 503, 504, 511}) {
    for (const int bit : {0, 31, 32, 63}) {
      words[word] ^= std::uint64_t{1} << bit;
      EXPECT_NE(on_device(words, 4096), before) << word << ", " << bit;
      words[word] ^= std::uint64_t{1} << bit;
    }
  }
}

}  // namespace
}  // namespace zg::test
