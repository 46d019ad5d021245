#include "ziggurat/base/philox.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace zg {
namespace {

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Philox4{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  constexpr std::uint32_t kOnes = 0xffffffffu;
  EXPECT_EQ(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Philox4{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32_10({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (Philox4{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Fnv1a64, KnownAnswers) {
  EXPECT_EQ(fnv1a64(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(fnv1a64("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(fnv1a64("foobar"), 0x85944171f73967e8ull);
}

TEST(NamedRandom, SeedNameAndIndexAllMatter) {
  const NamedRandom a(1, "wte"), same(1, "wte"), other_name(1, "wpe"), other_seed(2, "wte");
  EXPECT_EQ(a.block(7), same.block(7));
  EXPECT_NE(a.block(7), a.block(8));
  EXPECT_NE(a.block(7), a.block(7 + (1ull << 32)));
  EXPECT_NE(a.block(7), other_name.block(7));
  EXPECT_NE(a.block(7), other_seed.block(7));
  EXPECT_NE(NamedRandom(1, "x").block(0), NamedRandom(1 + (1ull << 32), "x").block(0));
}

TEST(NamedRandom, UniformStaysInsideAndIsEven) {
  const NamedRandom r(3, "uniform");
  constexpr int kCount = 100000;
  double sum = 0;
  for (int i = 0; i < kCount; ++i) {
    const float u = r.uniform(static_cast<std::uint64_t>(i));
    ASSERT_GT(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += static_cast<double>(u);
  }
  // Standard error sqrt(1/12 / n); five of them.
  EXPECT_NEAR(sum / kCount, 0.5, 5 * std::sqrt(1.0 / 12 / kCount));
}

TEST(NamedRandom, NormalHasItsMoments) {
  const NamedRandom r(3, "normal");
  constexpr int kCount = 100000;
  double sum = 0, squares = 0, fourth = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = static_cast<double>(r.normal(static_cast<std::uint64_t>(i)));
    sum += x, squares += x * x, fourth += x * x * x * x;
  }
  // Variances of x, x^2 and x^4 are 1, 2 and 96; five standard errors.
  EXPECT_NEAR(sum / kCount, 0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0 / kCount));
  EXPECT_NEAR(fourth / kCount, 3, 5 * std::sqrt(96.0 / kCount));
}

TEST(NamedRandom, BelowCoversItsRange) {
  const NamedRandom r(5, "below");
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const std::uint64_t x = r.below(i, 7);
    ASSERT_LT(x, 7u);
    seen.insert(x);
    EXPECT_EQ(r.below(i, 1), 0u);
    EXPECT_LT(r.below(i, ~0ull), ~0ull);
  }
  EXPECT_EQ(seen.size(), 7u);
}

}  // namespace
}  // namespace zg
