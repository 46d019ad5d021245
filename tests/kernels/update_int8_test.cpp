// Moments in 8 bits: the code by itself, and what it does to training.
#include "kernels/host/update_int8.hpp"

#include "tests/kernels/update_support.hpp"

namespace zg::test {
namespace {

using host::int8::decode;
using host::int8::encode;
using host::int8::scale_of;

std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
// Random of the least and the greatest that rounding may add.
constexpr std::uint32_t kDown = 0, kUp = 0xfffff;

TEST(UpdateInt8, ZeroBytesAreZeroMoments) {
  for (const int moment : {0, 1}) {
    EXPECT_EQ(bits_of(decode(moment, 0, 0.0f)), 0u);
    EXPECT_EQ(bits_of(scale_of(moment, 0)), 0u);
    for (const float largest : {1e-30f, 1.0f, 1e30f}) {
      EXPECT_EQ(bits_of(decode(moment, encode(moment, 0, scale_of(moment, bits_of(largest)), kDown),
                               scale_of(moment, bits_of(largest)))),
                0u);
    }
  }
}

// A first moment errs by less than (|m| + a) / 8: a step of the code at |m| + a. (The sum is rounded to fp32,
// by 2^-24 of it.)
TEST(UpdateInt8, ErrorOfFirstMoments) {
  auto random = generator(1);
  std::uniform_real_distribution<double> exponent(-150, 127.9), below(-25, 0);
  for (int i = 0; i < 200000; ++i) {
    const float largest = static_cast<float>(std::exp2(exponent(random)));
    const float m = static_cast<float>(static_cast<double>(largest) * std::exp2(below(random))) *
                    (i % 2 == 0 ? 1.0f : -1.0f);
    const float scale = scale_of(0, bits_of(largest));
    ASSERT_LE(scale, largest * 0x1p-14f);
    const double step =
        (std::abs(static_cast<double>(m)) + static_cast<double>(scale)) * (0.125 + 0x1p-20) + 0x1p-129;
    for (const std::uint32_t r : {kDown, kUp, static_cast<std::uint32_t>(random()) & kUp}) {
      const float back = decode(0, encode(0, m, scale, r), scale);
      ASSERT_LT(std::abs(static_cast<double>(back) - static_cast<double>(m)), step) << m << " of " << largest;
    }
  }
}

// A second moment errs by less than v / 8, down to 2^-31 of the block's largest, or by the widest step among
// subnormal numbers, 2^-129. Below it is kept larger than it is; as zero only if it was as good as that.
TEST(UpdateInt8, ErrorOfSecondMoments) {
  auto random = generator(2);
  std::uniform_real_distribution<double> exponent(-150, 127.9), below(-40, 0);
  for (int i = 0; i < 200000; ++i) {
    const float largest = static_cast<float>(std::exp2(exponent(random)));
    const float v = static_cast<float>(static_cast<double>(largest) * std::exp2(below(random)));
    const float scale = scale_of(1, bits_of(largest));
    for (const std::uint32_t r : {kDown, kUp, static_cast<std::uint32_t>(random()) & kUp}) {
      const double back = static_cast<double>(decode(1, encode(1, v, scale, r), scale)),
                   was = static_cast<double>(v);
      if (v < 0x1p-133f) {
        ASSERT_EQ(back, 0);
      } else if (v >= largest * 0x1p-31f) {
        ASSERT_GT(back, 0);
        ASSERT_LE(std::abs(back - was), was / 8 + 0x1p-129) << v << " of " << largest;
      } else {
        ASSERT_GE(back, was * 0.875 - 0x1p-129);
        ASSERT_GT(back, 0);
        ASSERT_LE(back, static_cast<double>(largest) * 0x1p-30 + 0x1p-128);
      }
    }
  }
}

// The code is a monotonous map, and the largest value has one of its own or the last.
TEST(UpdateInt8, CodesAreInOrder) {
  for (const float largest : {3e-20f, 0.9999f, 1.0f, 1.8749f, 1.875f, 1.9999f, 3e38f}) {
    for (const int moment : {0, 1}) {
      const float scale = scale_of(moment, bits_of(largest));
      const int last = moment == 0 ? 127 : 255;
      EXPECT_GE(encode(moment, largest, scale, kDown), last - 2) << largest;
      EXPECT_LE(encode(moment, largest, scale, kUp), last) << largest;
      for (int code = 1; code <= last; ++code) {
        ASSERT_GT(decode(moment, static_cast<std::uint8_t>(code), scale),
                  decode(moment, static_cast<std::uint8_t>(code - 1), scale));
      }
      if (moment == 0) {
        EXPECT_EQ(encode(0, -largest, scale, kUp), encode(0, largest, scale, kUp) | 0x80);
      }
    }
  }
}

// A value that the code can hold stays as it is, whatever is added below its precision: moments at rest do
// not wander.
TEST(UpdateInt8, WhatTheCodeHoldsStays) {
  for (const int moment : {0, 1}) {
    const float scale = scale_of(moment, bits_of(0.7f));
    for (int code = 0; code <= (moment == 0 ? 127 : 255); ++code) {
      const float value = decode(moment, static_cast<std::uint8_t>(code), scale);
      EXPECT_EQ(encode(moment, value, scale, kDown), code);
      EXPECT_EQ(encode(moment, value, scale, kUp), code);
    }
  }
}

// Over all random numbers rounding is exact, but for the sum |m| + a, which is rounded to 2^-24 of it.
TEST(UpdateInt8, RoundingIsOfExpectationExact) {
  for (const int moment : {0, 1}) {
    const float scale = scale_of(moment, bits_of(1.0f));
    for (const float value : {0.77f, 0.1001f, 3.3e-3f, 1.7e-5f}) {
      double sum = 0;
      for (std::uint32_t r = 0; r <= kUp; ++r)
        sum += static_cast<double>(decode(moment, encode(moment, value, scale, r), scale));
      const double mean = sum / (kUp + 1.0);
      EXPECT_NEAR(mean, static_cast<double>(value), 0x1p-23 * static_cast<double>(value + scale)) << moment;
    }
  }
}

// Adam's second moments after their gradients fell to a half: beta2 = 0.999 moves them by less than a
// thousandth a step, at most a hundredth of a step of the code. To nearest they would stay where they are.
// Stochastically their mean is that of fp32: an element's v wanders about it, by a deviation of some
// sqrt(step / 2) = 0.25 of it (a step up or down is taken as often as the drift asks for, 0.001 v / step, and
// forgotten at the rate of 0.001); elements share random bits in pairs at worst. 6 deviations of a mean.
TEST(UpdateInt8, SecondMomentsFollowTheirGradients) {
  constexpr std::size_t kCount = 256 * 16;
  Case c = optimizers()[0];
  c.format.moments = MomentFormat::kInt8;
  c.params = {.lr = 0, .beta1 = 0, .beta2 = 0.999, .weight_decay = 0, .random = {{5, 6}}};
  State s(c, kCount);
  s.set_moment(1, std::vector<float>(kCount, 1.0f), c.params);
  for (std::size_t i = 0; i < kCount; ++i) s.set_grad(i, 0.5);
  double exact = 1;
  const float scale = scale_of(1, bits_of(1.0f));
  float nearest = 1;
  for (c.params.step = 1; c.params.step <= 2000; ++c.params.step) {
    s.update(c.params);
    exact = 0.999 * exact + 0.001 * 0.25;
    nearest = decode(1, encode(1, 0.999f * nearest + 0.001f * 0.25f, scale, 0x80000), scale);
  }
  double sum = 0;
  for (std::size_t i = 0; i < kCount; ++i) sum += s.moment<double>(1, i);
  EXPECT_NEAR(sum / kCount, exact, 6 * 0.25 * std::sqrt(2.0 / kCount) * exact);
  EXPECT_LT(exact, 0.36);
  EXPECT_EQ(nearest, 1);
}

TEST(UpdateInt8, WhatIsNotFiniteSpoilsItsBlockAndNoOther) {
  Case c = optimizers()[0];
  c.format.moments = MomentFormat::kInt8;
  State s(c, 600);
  s.fill(1, c.params);
  s.set_grad(300, std::numeric_limits<double>::infinity());
  s.update(c.params);
  c.params.step += 1;
  s.set_grad(300, 0);
  s.update(c.params);
  for (std::size_t i = 0; i < 600; ++i) {
    EXPECT_EQ(std::isfinite(s.master<double>(i)), i < 256 || i >= 512) << i;
    EXPECT_EQ(std::isnan(s.moment<double>(0, i)), i >= 256 && i < 512) << i;
  }
}

}  // namespace
}  // namespace zg::test
