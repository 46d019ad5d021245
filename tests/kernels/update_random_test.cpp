// The random bits of stochastic rounding, and what rounding by them does.
#include "kernels/host/update_random.hpp"

#include "tests/kernels/update_support.hpp"

namespace zg::test {
namespace {

// A moment alone, at rest: SGD with momentum 1 and no gradient keeps m as it is, rounded anew in each step.
Case at_rest(MomentFormat moments) {
  Case c = optimizers()[3];
  c.format.master = MasterFormat::kSplit, c.format.moments = moments;
  c.grad = c.weight = DType::kBF16;
  c.params = {.lr = 0, .momentum = 1, .step = 2, .random = {{7, 11}}};
  return c;
}

TEST(UpdateRandom, IsTheBytesOfPhiloxBlocks) {
  const RandomKey key{{3, 5}};
  constexpr std::int64_t kStep = (std::int64_t{9} << 32) + 4, kBlock = (std::int64_t{1} << 40) + 3;
  std::vector<std::uint32_t> words(64);
  for (std::uint32_t j = 0; j < 16; ++j) {
    const std::uint64_t counter = static_cast<std::uint64_t>(kBlock) * 16 + j;
    const Philox4 four = philox4x32_10(
        {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 4, 9}, {3, 5});
    words[2 * j] = four[0], words[2 * j + 1] = four[1], words[32 + 2 * j] = four[2],
              words[33 + 2 * j] = four[3];
  }
  const auto byte = [&](std::size_t at) { return words[at % 256 / 4] >> (at % 4 * 8) & 0xffu; };
  for (std::int64_t e = 0; e < 256; ++e) {
    for (const int moment : {0, 1}) {
      const std::size_t at =
          static_cast<std::size_t>(4 * (e / 2 % 64) + 2 * (e % 2) + e / 128 + 128 * moment);
      const std::uint32_t expected = byte(at) | byte(at + 1) << 8 | byte(at + 2) << 16 | byte(at + 3) << 24;
      ASSERT_EQ(host::update_random(key, kStep, 256 * kBlock + e, moment), expected) << e << ", " << moment;
    }
  }
}

// Every lane of the kernels' Philox, through what it rounds: the lowest bits of fp32 momenta meet random bits
// of every element, moment 0 here; the tests of update() cover moment 1.
TEST(UpdateRandom, LanesOfTheKernelsAreThoseOfPhilox) {
  Case c = at_rest(MomentFormat::kBf16);
  c.grad = DType::kF32;
  constexpr std::size_t kCount = 256 * 5;
  for (const std::int64_t step : {std::int64_t{2}, (std::int64_t{1} << 32) + 77}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{256}, (std::int64_t{1} << 36) - 512}) {
      c.params.step = step, c.params.first_element = first;
      State begin(c, kCount);
      // m = g: 1 and 0x8000 of the 65536 parts of a bf16 step.
      for (std::size_t i = 0; i < kCount; ++i) begin.set_grad(i, 1 + 0x1p-8);
      for_each_target([&] {
        State s = begin;
        s.update(c.params);
        for (std::size_t i = 0; i < kCount; ++i) {
          const std::uint32_t random =
              host::update_random(c.params.random, step, first + static_cast<std::int64_t>(i), 0);
          ASSERT_EQ(s.moment<float>(0, i), (random & 0x8000u) != 0 ? 1 + 0x1p-7f : 1) << "element " << i;
        }
      });
    }
  }
}

// x = 1 + share * 2^-7 becomes 1 or 1 + 2^-7, up with probability `share`. Of n independent roundings the
// number of those up has deviation sqrt(n share (1 - share)). Elements share bits, in pairs of each moment at
// worst as good as equal, which doubles the variance at most: 6 deviations of that are passed with a
// probability below 2e-9.
TEST(UpdateRandom, RoundingToBf16IsOfExpectationExact) {
  Case c = at_rest(MomentFormat::kBf16);
  c.grad = DType::kF32;
  constexpr std::size_t kCount = 1 << 16;
  for (const double share : {0.5, 0.25, 0.9, 0.01, 0.001}) {
    double up = 0, steps = 0;
    for (c.params.step = 2; c.params.step < 18; ++c.params.step, ++steps) {
      State s(c, kCount);
      for (std::size_t i = 0; i < kCount; ++i) s.set_grad(i, 1 + share * 0x1p-7);
      s.update(c.params);
      for (std::size_t i = 0; i < kCount; ++i) {
        const double m = s.moment<double>(0, i);
        ASSERT_TRUE(m == 1 || m == 1 + 0x1p-7) << m;
        up += m > 1;
      }
    }
    // fp32 holds `share` of a bf16 step to 2^-16.
    const double n = kCount * steps, deviation = std::sqrt(2 * n * share * (1 - share));
    EXPECT_NEAR(up, n * share, 6 * deviation + n * 0x1p-17) << share;
  }
}

TEST(UpdateRandom, WhatBf16HoldsStays) {
  const Case c = at_rest(MomentFormat::kBf16);
  State s(c, 4096);
  std::vector<float> values(4096);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<float>(bf16(std::ldexp(static_cast<float>(i) - 2000, static_cast<int>(i % 200) - 120)));
  }
  s.set_moment(0, values, c.params);
  UpdateParams p = c.params;
  for (p.step = 2; p.step < 20; ++p.step) s.update(p);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(s.moment<float>(0, i), values[i]);
}

// Never further than to the next bf16 on either side.
TEST(UpdateRandom, RoundingIsToANeighbour) {
  auto random = generator(5);
  for (int i = 0; i < 100000; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(random());
    const float x = std::bit_cast<float>(bits);
    const bf16 r = host::round_stochastically(x, static_cast<std::uint32_t>(random()));
    if (x != x) {
      ASSERT_EQ(r.bits, 0x7fc0);
    } else {
      ASSERT_TRUE(r.bits == bits >> 16 || r.bits == (bits >> 16) + 1) << std::hex << bits;
      if ((bits & 0xffffu) == 0) {
        ASSERT_EQ(r.bits, bits >> 16);
      }
    }
  }
}

// Moments and elements do not round alike: of two of them, up together as often as chance has it. With p =
// 1/2 each, n pairs and agreement as the count, the deviation is sqrt(n) / 2.
TEST(UpdateRandom, MomentsAndElementsRoundIndependently) {
  constexpr std::int64_t kCount = 1 << 16;
  const RandomKey key{{1, 2}};
  const auto up = [&](std::int64_t e, int moment) {
    return host::update_random(key, 3, e, moment) >> 15 & 1u;
  };
  int moments = 0, next = 0, half = 0, steps = 0;
  for (std::int64_t e = 0; e < kCount; ++e) {
    moments += up(e, 0) == up(e, 1);
    next += up(e, 0) == up(e + 1, 0);
    half += up(e, 0) == up(e ^ 128, 0);
    steps += up(e, 0) == (host::update_random(key, 4, e, 0) >> 15 & 1u);
  }
  const double deviation = std::sqrt(static_cast<double>(kCount)) / 2;
  // Half a block away the pair is counted twice: twice the variance.
  for (const int count : {moments, next, half, steps}) EXPECT_NEAR(count, kCount / 2, 6 * 1.5 * deviation);
}

}  // namespace
}  // namespace zg::test
