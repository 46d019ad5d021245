// What rounding may get wrong: for the casts of the host and of CUDA.
#pragma once
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/support.hpp"

namespace zg::test {

// All 65536 upper halves of a float with lower halves at, beside and between the ties of bf16.
inline std::vector<float> bf16_rounding_cases() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  return values;
}

// finish(in) is the norm of a gradient that is rounded to a type in which too_large is infinite: what was
// written counts. `count`: elements of `in`.
template <class Finish>
void expect_norm_not_finite(std::size_t count, float too_large, const Finish& finish) {
  for (const std::size_t where : {std::size_t{0}, std::size_t{17}, count - 1}) {
    std::vector<float> in(count, 0.5f);
    const auto norm = [&](float value) {
      in[where] = value;
      return finish(in);
    };
    EXPECT_TRUE(std::isinf(norm(std::numeric_limits<float>::infinity())));
    EXPECT_TRUE(std::isnan(norm(std::numeric_limits<float>::quiet_NaN())));
    EXPECT_TRUE(std::isinf(norm(too_large)));
    EXPECT_TRUE(std::isinf(norm(-too_large)));
    EXPECT_TRUE(std::isfinite(norm(std::nextafter(too_large, 0.0f))));
  }
}

}  // namespace zg::test
