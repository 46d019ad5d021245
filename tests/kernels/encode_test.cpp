// Trained weights in FP8 on the host: codes by definition, the same on every instruction set and for any
// number of threads.
#include "kernels/host/fp8.hpp"
#include "tests/kernels/encode_cases.hpp"
#include "tests/support/coded_matrix.hpp"

namespace zg::test {
namespace {

struct Encoded {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
};
Encoded encoded(const std::vector<float>& x) {
  const auto n = static_cast<std::int64_t>(x.size());
  Encoded e{std::vector<std::uint8_t>(x.size()),
            std::vector<float>(static_cast<std::size_t>(kFp8Weights.blocks(1, n)))};
  host::encode_fp8(n, x.data(), e.codes.data(), e.scales.data());
  return e;
}

// The nearest number of e4m3; of two, the one with the even code.
std::uint8_t nearest(float value) {
  const int sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 127);
  const double size = std::abs(static_cast<double>(value));
  int best = 0;
  for (int code = 1; code < 127; ++code) {
    const double far = std::abs(Coded::e4m3(code) - size), least = std::abs(Coded::e4m3(best) - size);
    if (far < least || (far == least && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(sign | best);
}

TEST(EncodeFp8, HasTheNearestCodesOnEveryInstructionSet) {
  for_each_target([] {
    for (const std::int64_t n : {1, 5, 127, 128, 129, 1151, 3000}) {
      const std::vector<float> x = weights_to_encode(n);
      const Encoded e = encoded(x);
      for (std::size_t b = 0; b < e.scales.size(); ++b) {
        float most = 0;
        const std::size_t begin = 128 * b, end = std::min(x.size(), begin + 128);
        for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::abs(x[i]));
        const float factor = most >= 0x1p-117f ? 1 / most * 448 : 1;
        EXPECT_EQ(e.scales[b], 1 / factor);
        for (std::size_t i = begin; i < end; ++i)
          ASSERT_EQ(e.codes[i], nearest(x[i] * factor)) << i << " of " << n << ": " << x[i];
      }
    }
  });
}

// Blocks that are too small for a scale become zeros, and never NaNs.
TEST(EncodeFp8, OfFiniteWeightsIsFinite) {
  for (const float size : {0x1p-149f, 0x1p-126f, 0x1p-118f, 0x1p-117f, 1.0f, 3e38f}) {
    std::vector<float> x(128, 0.0f);
    x[3] = size, x[4] = -size / 3;
    const Encoded e = encoded(x);
    std::vector<float> back(128);
    host::decode<float>(
        {.format = kFp8Weights, .rows = 1, .cols = 128, .codes = e.codes.data(), .scales = e.scales.data()},
        back.data());
    for (std::size_t i = 0; i < back.size(); ++i) {
      const double error = std::abs(static_cast<double>(back[i]) - x[i]);
      EXPECT_LE(error, size < 0x1p-117f ? size : size * 0x1p-4) << i << ", " << size;
    }
  }
}

TEST(EncodeFp8, SameBitsForAnyNumberOfThreads) {
  const std::vector<float> x = weights_to_encode(100000);
  const Encoded first = encoded(x);
  for_each_thread_count([&](int) {
    const Encoded e = encoded(x);
    ASSERT_EQ(e.codes, first.codes);
    ASSERT_EQ(std::memcmp(e.scales.data(), first.scales.data(), first.scales.size() * sizeof(float)), 0);
  });
}

}  // namespace
}  // namespace zg::test
