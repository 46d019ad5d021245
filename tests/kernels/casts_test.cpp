// Casts of the host, and the conversions of the 16-bit types.
#include "tests/kernels/cast_cases.hpp"
#include "tests/kernels/host_kernels.hpp"

namespace zg::test {
namespace {

struct HostCasting : HostKernels {
  static constexpr bool kExactNans = true;
  template <class In, class Out>
  static void finish_gradient(std::int64_t n, const In* in, Out* out, double* norm_sq, double*) {
    *norm_sq += host::finish_gradient<In, Out>(n, in, out);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Casts, testing::Types<HostCasting>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, FinishGradient, testing::Types<HostCasting>);

// Nearest bf16 by distances in double, ties to the even one; 2^128 stands for infinity.
std::uint16_t nearest_bf16(float value) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t below = static_cast<std::uint16_t>(u >> 16);  // towards zero
  if (std::isinf(value)) return below;
  const auto magnitude = [](std::uint32_t bits) {
    const std::uint32_t positive = bits & 0x7fffu;
    if (positive == 0x7f80u) return 0x1p128;
    return static_cast<double>(std::bit_cast<float>(positive << 16));
  };
  const double size = std::abs(static_cast<double>(value));
  const double down = size - magnitude(below), up = magnitude(below + 1u) - size;
  if (down != up) return down < up ? below : static_cast<std::uint16_t>(below + 1);
  return (below & 1u) == 0 ? below : static_cast<std::uint16_t>(below + 1);
}

void expect_rounded(float value, std::uint16_t bits) {
  if (std::isnan(value)) {
    EXPECT_EQ(bits & 0x7fc0u, 0x7fc0u);  // a quiet NaN of the same sign
    EXPECT_EQ(bits >> 15, std::bit_cast<std::uint32_t>(value) >> 31);
  } else {
    ASSERT_EQ(bits, nearest_bf16(value)) << value;
  }
}

TEST(Conversions, FloatToBf16RoundsToNearestEven) {
  for (const float v : bf16_rounding_cases()) expect_rounded(v, bf16(v).bits);
}

TEST(Conversions, Bf16ToFloatIsExact) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    bf16 x;
    x.bits = static_cast<std::uint16_t>(i);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(static_cast<float>(x)), i << 16);
  }
}

// Nearest half by distances in double, ties to the even one; a NaN's sign and the payload's high bits stay.
std::uint16_t expected_half(float value) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(value), sign = (u >> 16) & 0x8000u;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x1ffu));
  const double size = std::abs(static_cast<double>(value));
  // The largest half that is not above it, by bisection: halves are ordered as their bits are.
  std::uint32_t below = 0, above = 0x7c01u;
  while (above - below > 1) {
    const std::uint32_t middle = (below + above) / 2;
    (half_magnitude(middle) <= size ? below : above) = middle;
  }
  if (below < 0x7c00u) {
    const double down = size - half_magnitude(below), up = half_magnitude(below + 1) - size;
    if (up < down || (up == down && (below & 1u) != 0)) ++below;
  }
  return static_cast<std::uint16_t>(sign | below);
}

TEST(Conversions, FloatToFp16RoundsToNearestEven) {
  for (const float v : half_rounding_cases())
    ASSERT_EQ(fp16(v).bits, expected_half(v)) << std::bit_cast<std::uint32_t>(v);
}

TEST(Conversions, Fp16ToFloatIsExact) {
  std::vector<fp16> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].bits = static_cast<std::uint16_t>(i);
    const std::uint32_t size = all[i].bits & 0x7fffu;
    const float f = static_cast<float>(all[i]);
    ASSERT_EQ(std::signbit(f), i >= 0x8000u) << i;
    if (size > 0x7c00u) {
      ASSERT_TRUE(std::isnan(f)) << i;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(f) & 0x7fffffu, ((size & 0x3ffu) << 13) | 0x400000u) << i;
    } else if (size == 0x7c00u) {
      ASSERT_TRUE(std::isinf(f)) << i;
    } else {
      ASSERT_EQ(std::abs(static_cast<double>(f)), half_magnitude(size)) << i;
    }
  }
}

TEST(HostCasts, ZeroLeavesGaps) {
  for (const std::int64_t cols : {1, 43, 40000}) {
    Matrix<bf16> x(5, cols, 3);
    x.fill(1.5);
    host::zero({5, cols * 2}, {reinterpret_cast<char*>(x.data()), x.ld() * 2});
    x.expect_gaps_intact("x");
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) ASSERT_EQ(x.at(r, c).bits, 0);
    }
  }
}

// The order that casts.cpp documents: parts, in each 16 interleaved sums, all added in order.
template <class Out>
double sum_of_squares_in_order(const std::vector<Out>& written) {
  const std::size_t n = written.size();
  const std::size_t part = std::max<std::size_t>(16 * 1024, (n + 255) / 256);
  double total = 0;
  for (std::size_t begin = 0; begin < n; begin += part) {
    double sums[16] = {}, of_part = 0;
    for (std::size_t i = begin; i < std::min(n, begin + part); ++i) {
      const double v = value_of(written[i]);
      sums[(i - begin) % 16] += v * v;
    }
    for (const double s : sums) of_part += s;
    total += of_part;
  }
  return total;
}

template <class In, class Out>
void expect_sum_in_order(std::size_t n) {
  auto random = generator(n);
  std::normal_distribution<double> normal(0, 3);
  std::vector<In> in(n);
  for (auto& v : in) v = static_cast<In>(normal(random));
  std::vector<Out> out;
  const double norm = finish<HostCasting>(in, out, 0);
  for (std::size_t i = 0; i < n; ++i) {
    const Out rounded = static_cast<Out>(in[i]);
    ASSERT_EQ(std::memcmp(&out[i], &rounded, sizeof(Out)), 0) << i;
  }
  EXPECT_EQ(norm, sum_of_squares_in_order(out)) << n;
}

TEST(HostFinishGradient, SameBitsOnEveryInstructionSet) {
  for_each_target([] {
    for (const std::size_t n : {0u, 1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 16384u, 16385u, 50001u}) {
      expect_sum_in_order<float, bf16>(n), expect_sum_in_order<float, fp16>(n);
      expect_sum_in_order<float, float>(n), expect_sum_in_order<double, double>(n);
    }
  });
}

TEST(HostFinishGradient, SameBitsForAnyNumberOfThreads) {
  for_each_thread_count(
      [](int) { expect_sum_in_order<float, bf16>(300001), expect_sum_in_order<float, fp16>(300001); });
}

}  // namespace
}  // namespace zg::test
