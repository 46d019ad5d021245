#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

// All 65536 upper halves with lower halves at, beside and between the ties.
std::vector<float> rounding_cases() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  return values;
}

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
  std::vector<float> values = rounding_cases();
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
      if constexpr (std::is_same_v<Out, bf16>) {
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
      expect_finish<float, bf16>(n), expect_finish<float, float>(n), expect_finish<double, double>(n);
    }
  });
}

TEST(FinishGradient, SameBitsForAnyNumberOfThreads) {
  for_each_thread_count([](int) { expect_finish<float, bf16>(300001); });
}

TEST(FinishGradient, NonFiniteValuesReachTheNorm) {
  for_each_target([] {
    for (const std::size_t where : {0u, 17u, 1999u}) {
      std::vector<float> in(2000, 0.5f);
      std::vector<bf16> out(2000);
      in[where] = std::numeric_limits<float>::infinity();
      EXPECT_TRUE(std::isinf((host::finish_gradient<float, bf16>(2000, in.data(), out.data()))));
      in[where] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan((host::finish_gradient<float, bf16>(2000, in.data(), out.data()))));
      in[where] = std::numeric_limits<float>::max();  // rounds to infinity in bf16: what was written counts
      EXPECT_TRUE(std::isinf((host::finish_gradient<float, bf16>(2000, in.data(), out.data()))));
    }
  });
}

}  // namespace
}  // namespace zg::test
