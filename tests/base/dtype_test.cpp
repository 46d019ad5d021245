#include "ziggurat/base/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace zg {
namespace {

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kF64), 8u);
  EXPECT_EQ(size_of(DType::kI64), 8u);
  EXPECT_EQ(size_of(DType::kF32), 4u);
  EXPECT_EQ(size_of(DType::kI32), 4u);
  EXPECT_EQ(size_of(DType::kF16), 2u);
  EXPECT_EQ(size_of(DType::kBF16), 2u);
  EXPECT_EQ(size_of(DType::kU16), 2u);
  EXPECT_EQ(size_of(DType::kU8), 1u);
  EXPECT_STREQ(name_of(DType::kBF16), "bf16");
  EXPECT_STREQ(name_of(DType::kF64), "f64");
}

TEST(Half, EveryValueSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const std::uint16_t half = static_cast<std::uint16_t>(bits);
    const float value = half_to_float(half);
    if ((bits & 0x7fffu) > 0x7c00u) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(float_to_half(value) & 0x7e00u, 0x7e00u);
    } else {
      ASSERT_EQ(float_to_half(value), half) << value;
    }
  }
}

TEST(Half, KnownValues) {
  EXPECT_EQ(half_to_float(0x3c00), 1.0f);
  EXPECT_EQ(half_to_float(0xc000), -2.0f);
  EXPECT_EQ(half_to_float(0x7bff), 65504.0f);
  EXPECT_EQ(half_to_float(0x0001), 0x1p-24f);
  EXPECT_EQ(half_to_float(0x03ff), 1023 * 0x1p-24f);
  EXPECT_EQ(half_to_float(0x0400), 0x1p-14f);
  EXPECT_EQ(half_to_float(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::signbit(half_to_float(0x8000)));
  EXPECT_EQ(float_to_half(65519.99f), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(-1e10f), 0xfc00);
  EXPECT_EQ(float_to_half(-0.0f), 0x8000);
  EXPECT_EQ(float_to_half(1e-10f), 0);
}

// Between each two neighbours: the middle goes to the even one, what is nearer to one goes to it.
TEST(Half, RoundsToNearestEven) {
  for (std::uint16_t low = 0; low < 0x7bffu; ++low) {
    const std::uint16_t high = static_cast<std::uint16_t>(low + 1);
    const float middle = (half_to_float(low) + half_to_float(high)) / 2;
    const std::uint16_t even = (low & 1u) == 0 ? low : high;
    ASSERT_EQ(float_to_half(middle), even) << middle;
    ASSERT_EQ(float_to_half(-middle), even | 0x8000u) << middle;
    ASSERT_EQ(float_to_half(std::nextafter(middle, 0.0f)), low) << middle;
    ASSERT_EQ(float_to_half(std::nextafter(middle, 1e30f)), high) << middle;
  }
}

TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.0f + 0x1p-8f).bits, 0x3f80);             // tie, down to even
  EXPECT_EQ(bf16(1.0f + 0x1p-8f + 0x1p-20f).bits, 0x3f81);  // above the tie
  EXPECT_EQ(bf16(1.0f + 3 * 0x1p-8f).bits, 0x3f82);         // tie, up to even
  EXPECT_EQ(bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bf16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  // A NaN whose payload lies in the lower half must not become an infinity.
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(BFloat16, EveryValueSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    bf16 x;
    x.bits = static_cast<std::uint16_t>(bits);
    const float value = static_cast<float>(x);
    if (std::isnan(value)) continue;
    ASSERT_EQ(bf16(value).bits, bits);
  }
}

}  // namespace
}  // namespace zg
