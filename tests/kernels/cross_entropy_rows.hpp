// Rows of logits with their targets, and what cross entropy makes of them by its definition in double: for
// the kernels of the host and of CUDA.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/support.hpp"

namespace zg::test {

inline constexpr double kLossBefore = 0.25;  // a kernel adds to it

// Target 2 is ignored, where there are so many.
template <class T>
struct CrossEntropyRows {
  using A = Acc<T>;
  std::int64_t rows, cols;
  Matrix<A> logits;
  Matrix<T> dlogits;
  std::vector<std::int32_t> targets;
  double loss = kLossBefore, scale = 1, softcap = 0;

  CrossEntropyRows(std::int64_t n, std::int64_t v, std::int64_t gap, std::int64_t gradient_gap)
      : rows(n),
        cols(v),
        logits(n, v, gap),
        dlogits(n, v, gradient_gap),
        targets(static_cast<std::size_t>(n)) {
    auto random = generator(static_cast<std::uint64_t>(n * 100000 + v));
    logits.fill_normal(random, 3, 4);
    dlogits.fill(std::numeric_limits<double>::quiet_NaN());
    for (auto& t : targets) t = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(v));
    if (n > 2) targets[2] = -1;
  }

  // A logit as it counts.
  double logit(std::int64_t r, std::int64_t c) const {
    const double l = logits.get(r, c);
    return softcap == 0 ? l : softcap * std::tanh(l / softcap);
  }
  double cap_slope(std::int64_t r, std::int64_t c) const {
    return softcap == 0 ? 1 : 1 - std::pow(std::tanh(logits.get(r, c) / softcap), 2);
  }
  // roundings: relative, of a sum of exponentials and of each of them over it.
  void expect_definition(double roundings) {
    logits.expect_gaps_intact("logits"), dlogits.expect_gaps_intact("dlogits");
    double sum_of_losses = kLossBefore, size = 1;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t target = targets[static_cast<std::size_t>(r)];
      double max = logit(r, 0), sum = 0;
      for (std::int64_t c = 0; c < cols; ++c) max = std::max(max, logit(r, c));
      for (std::int64_t c = 0; c < cols; ++c) sum += std::exp(logit(r, c) - max);
      for (std::int64_t c = 0; c < cols; ++c) {
        const double p = std::exp(logit(r, c) - max) / sum;
        const double expected = target < 0 ? 0 : scale * (p - (c == target ? 1 : 0)) * cap_slope(r, c);
        ASSERT_NEAR(dlogits.get(r, c), expected, bound<T>(expected, roundings, scale * p)) << r << ", " << c;
      }
      if (target < 0) continue;
      sum_of_losses += std::log(sum) - (logit(r, target) - max);
      size += std::log(sum) + max - logit(r, target);
    }
    // The relative error of the sum is the absolute error of its logarithm.
    EXPECT_NEAR(loss, sum_of_losses,
                roundings * unit_roundoff<A>() * static_cast<double>(rows) + 1e-14 * size);
  }
};

}  // namespace zg::test
