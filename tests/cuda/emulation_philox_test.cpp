// Philox as kernels compute it. (On a GPU its numbers are seen through the kernels that use them.)
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/philox.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::test {
namespace {

void words(uint4 counter, uint2 key, unsigned* out) {
  const uint4 w = cuda::philox4x32_10(counter, key);
  out[0] = w.x, out[1] = w.y, out[2] = w.z, out[3] = w.w;
}

std::vector<unsigned> on_device(const Philox4& c, const std::array<std::uint32_t, 2>& k) {
  std::vector<unsigned> out(4);
  cuda::launch("words", words, cuda::Launch{}, cuda::Shape{1, 1}, make_uint4(c[0], c[1], c[2], c[3]),
               make_uint2(k[0], k[1]), out.data());
  return out;
}

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds), as in tests/base/philox_test.cpp.
TEST(CudaPhilox, KnownAnswers) {
  EXPECT_EQ(on_device({0, 0, 0, 0}, {0, 0}),
            (std::vector<unsigned>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  constexpr unsigned kOnes = 0xffffffffu;
  EXPECT_EQ(on_device({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (std::vector<unsigned>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(on_device({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (std::vector<unsigned>{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(CudaPhilox, EveryWordOfCounterAndKeyMattersAsOnTheHost) {
  for (unsigned bit = 0; bit < 192; ++bit) {
    Philox4 counter = {1, 2, 3, 4};
    std::array<std::uint32_t, 2> key = {5, 6};
    (bit < 128 ? counter[bit / 32] : key[(bit - 128) / 32]) ^= 1u << bit % 32;
    const Philox4 host = philox4x32_10(counter, key);
    ASSERT_EQ(on_device(counter, key), std::vector<unsigned>(host.begin(), host.end())) << bit;
  }
}

}  // namespace
}  // namespace zg::test
