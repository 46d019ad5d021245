// Weights to encode in FP8.
#pragma once
#include <cmath>
#include <vector>

#include "tests/kernels/support.hpp"
#include "ziggurat/kernels/fp8_weights.hpp"

namespace zg::test {

// Blocks of usual weights, and blocks of all kinds of others: zeros, subnormal numbers, the largest ones,
// halves between two codes, infinities and NaNs.
inline std::vector<float> weights_to_encode(std::int64_t n) {
  auto random = generator(11);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float usual = normal(random);
    switch (i / static_cast<std::size_t>(kFp8Weights.block_cols) % 9) {
      case 1:
        x[i] = i % 2 == 0 ? 0.0f : -0.0f;
        break;
      case 2:
        x[i] = usual * 1e-37f;
        break;
      case 3:
        x[i] = usual * 1e-34f;
        break;
      case 4:
        x[i] = usual * 1e38f * 30.0f;
        break;
      case 5:  // multiples of half of a subnormal code's step, and of a normal one's
        x[i] = i % 128 == 0 ? 448.0f : static_cast<float>(i % 64) * (i % 2 == 0 ? 0x1p-11f : 0.5f);
        break;
      case 6:
        x[i] = i % 16 == 3 ? NAN : usual;
        break;
      case 7:
        x[i] = i % 128 == 77 ? -INFINITY : usual;
        break;
      default:
        x[i] = usual;
    }
  }
  return x;
}

}  // namespace zg::test
