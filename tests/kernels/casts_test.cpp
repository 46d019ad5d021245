#include "tests/kernels/cast_cases.hpp"

namespace zg::test {
namespace {

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

TEST(Casts, FloatToBf16RoundsToNearestEven) {
  std::vector<float> values = bf16_rounding_cases();
  const std::int64_t n = static_cast<std::int64_t>(values.size());
  for (const float v : values) expect_rounded(v, bf16(v).bits);
  for_each_target([&] {
    std::vector<bf16> out(values.size());
    host::cast<float, bf16>({1, n}, {values.data(), n}, {out.data(), n});
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(out[i].bits, bf16(values[i]).bits) << values[i];
  });
}

TEST(Casts, Bf16ToFloatIsExact) {
  std::vector<bf16> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<std::uint16_t>(i);
  for_each_target([&] {
    std::vector<float> out(all.size());
    host::cast<bf16, float>({1, 65536}, {all.data(), 65536}, {out.data(), 65536});
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), static_cast<std::uint32_t>(i) << 16);
    }
  });
}

// The magnitude of a half, by its definition; 2^16 stands for infinity.
double half_magnitude(std::uint32_t bits) {
  const std::uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
  if (exponent == 0) return std::ldexp(static_cast<double>(fraction), -24);
  return std::ldexp(1024.0 + fraction, static_cast<int>(exponent) - 25);
}

// Every half and every tie between two neighbours, with the floats on either side, and numbers of all sizes.
std::vector<float> half_rounding_cases() {
  std::vector<float> values = bf16_rounding_cases();
  for (std::uint32_t half = 0; half <= 0x7c00u; ++half) {
    const double exact = half_magnitude(half), tie = (exact + half_magnitude(half + 1)) / 2;
    for (const double at : {exact, tie}) {
      const float f = static_cast<float>(at);
      EXPECT_EQ(static_cast<double>(f), at);
      for (const float v : {std::nextafter(f, 0.0f), f, std::nextafter(f, 1e30f)}) {
        values.push_back(v), values.push_back(-v);
      }
    }
  }
  return values;
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

TEST(Casts, FloatToFp16RoundsToNearestEven) {
  const std::vector<float> values = half_rounding_cases();
  const std::int64_t n = static_cast<std::int64_t>(values.size());
  for (const float v : values) ASSERT_EQ(fp16(v).bits, expected_half(v)) << std::bit_cast<std::uint32_t>(v);
  for_each_target([&] {
    std::vector<fp16> out(values.size());
    host::cast<float, fp16>({1, n}, {values.data(), n}, {out.data(), n});
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(out[i].bits, fp16(values[i]).bits) << std::bit_cast<std::uint32_t>(values[i]);
    }
  });
}

TEST(Casts, Fp16ToFloatIsExact) {
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
  for_each_target([&] {
    std::vector<float> out(all.size());
    host::cast<fp16, float>({1, 65536}, {all.data(), 65536}, {out.data(), 65536});
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]),
                std::bit_cast<std::uint32_t>(static_cast<float>(all[i])))
          << i;
    }
  });
}

template <class In, class Out>
void expect_cast() {
  for (const std::int64_t cols : kWidths) {
    auto random = generator(7);
    Matrix<In> in(5, cols, 3);
    Matrix<Out> out(5, cols, 2);
    in.fill_normal(random, 0, 10);
    host::cast<In, Out>({5, cols}, in, out);
    out.expect_gaps_intact("out");
    Matrix<Out> expected(5, cols);
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        expected.set(r, c, in.get(r, c));
        ASSERT_EQ(out.get(r, c), expected.get(r, c)) << r << ", " << c;
      }
    }
  }
}

TEST(Casts, EveryPairWithGaps) {
  for_each_target([] {
    expect_cast<float, float>(), expect_cast<float, bf16>(), expect_cast<float, double>();
    expect_cast<bf16, float>(), expect_cast<bf16, bf16>(), expect_cast<bf16, double>();
    expect_cast<double, float>(), expect_cast<double, bf16>(), expect_cast<double, double>();
    expect_cast<fp16, float>(), expect_cast<fp16, bf16>(), expect_cast<fp16, double>();
    expect_cast<float, fp16>(), expect_cast<bf16, fp16>(), expect_cast<double, fp16>();
    expect_cast<fp16, fp16>();
  });
}

TEST(Casts, ZeroLeavesGaps) {
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
      double v;
      if constexpr (sizeof(Out) == 2) {
        v = static_cast<double>(static_cast<float>(written[i]));
      } else {
        v = static_cast<double>(written[i]);
      }
      sums[(i - begin) % 16] += v * v;
    }
    for (const double s : sums) of_part += s;
    total += of_part;
  }
  return total;
}

template <class In, class Out>
void expect_finish(std::size_t n) {
  auto random = generator(n);
  std::normal_distribution<double> normal(0, 3);
  std::vector<In> in(n + 1);
  for (auto& v : in) v = static_cast<In>(normal(random));
  std::vector<Out> out(n + 1, poison<Out>());
  const double norm = host::finish_gradient<In, Out>(static_cast<std::int64_t>(n), in.data(), out.data());
  EXPECT_EQ(std::memcmp(&out[n], std::vector<Out>{poison<Out>()}.data(), sizeof(Out)), 0);
  out.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    const Out rounded = static_cast<Out>(in[i]);
    ASSERT_EQ(std::memcmp(&out[i], &rounded, sizeof(Out)), 0) << i;
  }
  EXPECT_EQ(norm, sum_of_squares_in_order(out)) << n;
}

TEST(FinishGradient, SameBitsOnEveryInstructionSet) {
  for_each_target([] {
    for (const std::size_t n : {0u, 1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 16384u, 16385u, 50001u}) {
      expect_finish<float, bf16>(n), expect_finish<float, fp16>(n);
      expect_finish<float, float>(n), expect_finish<double, double>(n);
    }
  });
}

TEST(FinishGradient, SameBitsForAnyNumberOfThreads) {
  for_each_thread_count([](int) { expect_finish<float, bf16>(300001), expect_finish<float, fp16>(300001); });
}

template <class Out>
void expect_not_finite(float too_large) {
  std::vector<Out> out(2000);
  expect_norm_not_finite(out.size(), too_large, [&](const std::vector<float>& in) {
    return host::finish_gradient<float, Out>(2000, in.data(), out.data());
  });
}

TEST(FinishGradient, NonFiniteValuesReachTheNorm) {
  for_each_target([] {
    // The ties between the largest finite numbers and the powers of two that they do not reach.
    expect_not_finite<bf16>(0x1.ffp127f);
    expect_not_finite<fp16>(65520.0f);
  });
}

}  // namespace
}  // namespace zg::test
