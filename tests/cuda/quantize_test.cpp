// Values as integers with a scale: the same bits as on the host.
#include "ziggurat/kernels/quantize.hpp"

#include <cstring>

#include "kernels/host/elementwise.hpp"
#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

using kernels::quantized_bytes;

template <class T>
class CudaQuantize : public testing::Test {};
TYPED_TEST_SUITE(CudaQuantize, StorageTypes);

// `offset`: elements behind an aligned address.
template <class T>
void expect_bits_of_the_host(std::int64_t n, int bits, std::int64_t offset, double bad) {
  SCOPED_TRACE(testing::Message() << n << " values, " << bits << " bits, offset " << offset);
  Matrix<T> values(1, n + offset + 5), sum(1, n + offset + 5);
  auto random = generator(3);
  values.fill_normal(random), sum.fill_normal(random);
  for (std::int64_t i = 0; i < n; ++i) {
    const double factor = std::exp2(static_cast<double>(i / kQuantBlock % 30) - 20);
    values.set(0, offset + i, values.get(0, offset + i) * factor);
  }
  if (bad != 0 && n > 2) values.set(0, offset + 2, bad);
  const auto bytes = static_cast<std::size_t>(quantized_bytes(n, bits));
  std::vector<std::uint8_t> expected(bytes), codes(bytes + 8, 0xa5);
  host::quantize<T>(n, values.data() + offset, bits, expected.data());
  OnDevice<T> d_values(values), d_sum(sum);
  OnDevice<std::uint8_t> d_codes(codes);
  cuda::quantize<T>(launch(), n, d_values.data() + offset, bits, d_codes.data());
  d_codes.fetch();
  ASSERT_EQ(std::memcmp(codes.data(), expected.data(), bytes), 0);
  for (std::size_t i = bytes; i < codes.size(); ++i) ASSERT_EQ(codes[i], 0xa5) << "written behind the end";
  for (const bool add : {false, true}) {
    Matrix<T> by_host = sum;
    host::dequantize<T>(n, expected.data(), bits, add, by_host.data() + offset);
    d_sum.refill();
    cuda::dequantize<T>(launch(), n, d_codes.data(), bits, add, d_sum.data() + offset);
    Matrix<T> before = sum;
    d_sum.fetch();
    for (std::int64_t i = 0; i < sum.cols(); ++i) {
      if (std::isnan(by_host.get(0, i))) {
        ASSERT_TRUE(std::isnan(sum.get(0, i))) << i;
      } else {
        ASSERT_EQ(std::memcmp(&sum.at(0, i), &by_host.at(0, i), sizeof(T)), 0)
            << i << ": " << sum.get(0, i) << ", expected " << by_host.get(0, i);
      }
    }
    sum = before;
  }
}

TYPED_TEST(CudaQuantize, HasTheBitsOfTheHost) {
  for (const int bits : {8, 4}) {
    for (const std::int64_t n : {1, 7, 256, 260, 2048, 5000}) {
      for (const std::int64_t offset : {0, 1}) {
        expect_bits_of_the_host<TypeParam>(n, bits, offset, 0);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(CudaQuantize, HasTheBitsOfTheHostWhereValuesAreNotFinite) {
  for (const float bad : {INFINITY, -INFINITY, NAN})
    expect_bits_of_the_host<TypeParam>(700, 8, 0, bad);
}

TYPED_TEST(CudaQuantize, HasTheBitsOfTheHostAtTheEndsOfTheRange) {
  using T = TypeParam;
  for (const int bits : {8, 4}) {
    for (const double size : {1e-44, 1e-40, 6e-8, 6e4, 3e38}) {
      std::vector<T> values(256), back(256, T(0)), expected(256);
      for (std::size_t i = 0; i < 256; ++i)
        values[i] = static_cast<T>(static_cast<Acc<T>>(size * (static_cast<double>(i) / 255 - 0.3)));
      std::vector<std::uint8_t> host(260), codes(260);
      host::quantize<T>(256, values.data(), bits, host.data());
      host::dequantize<T>(256, host.data(), bits, false, expected.data());
      OnDevice<T> d_values(values), d_back(back);
      OnDevice<std::uint8_t> d_codes(codes);
      cuda::quantize<T>(launch(), 256, d_values.data(), bits, d_codes.data());
      cuda::dequantize<T>(launch(), 256, d_codes.data(), bits, false, d_back.data());
      d_codes.fetch(), d_back.fetch();
      const auto bytes = static_cast<std::size_t>(quantized_bytes(256, bits));
      EXPECT_EQ(std::memcmp(codes.data(), host.data(), bytes), 0) << size;
      for (std::size_t i = 0; i < 256; ++i) {
        const auto is_nan = [](T x) { return std::isnan(static_cast<double>(static_cast<Acc<T>>(x))); };
        const bool both_nan = is_nan(back[i]) && is_nan(expected[i]);
        EXPECT_TRUE(both_nan || std::memcmp(&back[i], &expected[i], sizeof(T)) == 0) << size << ", " << i;
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
