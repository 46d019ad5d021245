// Values as integers with a scale, against their definition in double.
#include "ziggurat/kernels/quantize.hpp"

#include <cmath>
#include <cstring>

#include "kernels/host/elementwise.hpp"
#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

using kernels::quantized_block_bytes;
using kernels::quantized_bytes;

template <class T>
class HostQuantize : public testing::Test {
 protected:
  // What comes back.
  static Matrix<T> through(Matrix<T>& values, int bits) {
    const std::int64_t n = values.cols();
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(quantized_bytes(n, bits)) + 1, 0xa5);
    host::quantize<T>(n, values.data(), bits, codes.data());
    EXPECT_EQ(codes.back(), 0xa5) << "written behind the end";
    Matrix<T> back(1, n, 3);
    host::dequantize<T>(n, codes.data(), bits, false, back.data());
    back.expect_gaps_intact("what comes back");
    return back;
  }
};
TYPED_TEST_SUITE(HostQuantize, StorageTypes);

// Codes within a block's scale, unlike scales beside each other, and a last block that is not whole.
TYPED_TEST(HostQuantize, IsWrongByAtMostHalfAScale) {
  using T = TypeParam;
  auto random = generator(1);
  for (const int bits : {8, 4}) {
    for (const std::int64_t n : {1, 2, 255, 256, 257, 4096 + 77}) {
      SCOPED_TRACE(testing::Message() << bits << " bits, " << n << " values");
      Matrix<T> values(1, n);
      values.fill_normal(random);
      for (std::int64_t i = 0; i < n; ++i)
        values.set(0, i, values.get(0, i) * std::exp2(static_cast<double>(i / kQuantBlock % 9) - 4));
      Matrix<T> back = this->through(values, bits);
      for (std::int64_t first = 0; first < n; first += kQuantBlock) {
        const std::int64_t end = std::min(n, first + kQuantBlock);
        double most = 0;
        for (std::int64_t i = first; i < end; ++i) most = std::max(most, std::abs(values.get(0, i)));
        const double step = most / kernels::largest_code(bits);
        std::int64_t exact = 0;
        for (std::int64_t i = first; i < end; ++i) {
          const double expected = std::nearbyint(values.get(0, i) / step) * step;
          // The roundings of the scale, of the quotient, which may decide a tie, and of the product.
          const double slack = bound<T>(most, 4, most) + 0x1p-24 * most;  // the scale is fp32
          ASSERT_NEAR(back.get(0, i), values.get(0, i), step / 2 + slack) << i;
          exact += std::abs(back.get(0, i) - expected) <= slack ? 1 : 0;
        }
        EXPECT_GE(exact, (end - first) - 1) << "all but perhaps a tie are the nearest code";
      }
    }
  }
}

TYPED_TEST(HostQuantize, KeepsZerosAndTheLargest) {
  using T = TypeParam;
  for (const int bits : {8, 4}) {
    Matrix<T> values(1, 600);
    values.set(0, 300, -1.75), values.set(0, 301, 1.75);
    Matrix<T> back = this->through(values, bits);
    for (std::int64_t i = 0; i < 600; ++i) {
      const double expected = values.get(0, i);
      const double slack = bound<T>(1.75, 3, 1.75) + 0x1p-24 * 1.75;
      EXPECT_NEAR(back.get(0, i), expected, expected == 0 ? 0 : slack) << i;
    }
  }
}

// A gradient that overflowed must be seen behind the exchange, too.
TYPED_TEST(HostQuantize, ABlockThatIsNotFiniteComesBackAsNaN) {
  using T = TypeParam;
  for (const int bits : {8, 4}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      Matrix<T> values(1, 700);
      values.fill(1);
      values.set(0, 511, bad);
      Matrix<T> back = this->through(values, bits);
      for (std::int64_t i = 0; i < 700; ++i) EXPECT_EQ(std::isnan(back.get(0, i)), i / kQuantBlock == 1) << i;
    }
  }
}

TYPED_TEST(HostQuantize, AddsToWhatIsThere) {
  using T = TypeParam;
  auto random = generator(2);
  Matrix<T> values(1, 300), sum(1, 300);
  values.fill_normal(random), sum.fill_normal(random);
  const Matrix<T> before = sum;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(quantized_bytes(300, 8)));
  host::quantize<T>(300, values.data(), 8, codes.data());
  Matrix<T> alone(1, 300);
  host::dequantize<T>(300, codes.data(), 8, false, alone.data());
  host::dequantize<T>(300, codes.data(), 8, true, sum.data());
  for (std::int64_t i = 0; i < 300; ++i) {
    const double expected = before.get(0, i) + alone.get(0, i);
    // `alone` was rounded once more than what was added.
    EXPECT_NEAR(sum.get(0, i), expected, bound<T>(expected, 3, 8) + bound<T>(alone.get(0, i), 0, 0)) << i;
  }
}

// The format: files and other machines do not have it, but ranks of one run may be of different kinds.
TEST(Quantize, HasItsFormat) {
  const float values[5] = {7, -7, 3.4f, -3.6f, 0};
  std::uint8_t codes[132];
  host::quantize<float>(5, values, 4, codes);
  float scale = 0;
  std::memcpy(&scale, codes, 4);
  EXPECT_EQ(scale, 1.0f);
  EXPECT_EQ(codes[4], 0x97);  // 7, -7
  EXPECT_EQ(codes[5], 0xc3);  // 3, -4
  EXPECT_EQ(codes[6], 0);
  EXPECT_EQ(quantized_block_bytes(4), 132);
  EXPECT_EQ(quantized_bytes(257, 8), 520);
}

}  // namespace
}  // namespace zg::test
