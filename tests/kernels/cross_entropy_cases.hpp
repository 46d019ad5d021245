// Softmax cross entropy against its definition in double, for the kernels of the host and of CUDA. K has
// the differences between the two: the shapes that take its branches, and how often its sums are rounded.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/on_device.hpp"

namespace zg::test {

inline constexpr double kLossBefore = 0.25;  // a kernel adds to it

// Rows of logits with their targets, of which number 2 is ignored, where there are so many.
template <class K>
struct CrossEntropyRows {
  using T = typename K::T;
  using A = typename K::A;
  std::int64_t rows, cols;
  Matrix<A> logits;
  Matrix<T> dlogits;
  std::vector<std::int32_t> targets;
  double loss = kLossBefore, scale = 1, softcap = 0;

  CrossEntropyRows(Extent extent, std::int64_t gap) : CrossEntropyRows(extent, gap, gap) {}
  CrossEntropyRows(Extent extent, std::int64_t gap, std::int64_t gradient_gap)
      : rows(extent.rows),
        cols(extent.cols),
        logits(rows, cols, gap),
        dlogits(rows, cols, gradient_gap),
        targets(static_cast<std::size_t>(rows)) {
    auto random = generator(static_cast<std::uint64_t>(rows * 100000 + cols));
    logits.fill_normal(random, 3, 4);
    dlogits.fill(std::numeric_limits<double>::quiet_NaN());
    for (auto& t : targets) t = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(cols));
    if (rows > 2) targets[2] = -1;
  }

  void run(bool gradient = true) {
    run_by([](Extent extent, const kernels::CrossEntropy<T>& args) { K::cross_entropy(extent, args); },
           gradient);
  }
  template <class Kernel>
  void run_by(const Kernel& kernel, bool gradient = true) {
    std::vector<double> sum{kLossBefore}, scratch(K::kSumPartials, NAN);
    OnDevice<A> d_logits(logits);
    OnDevice<T> d_dlogits(dlogits);
    OnDevice<std::int32_t> d_targets(targets);
    OnDevice<double> d_loss(sum), d_scratch(scratch);
    kernels::CrossEntropy<T> args{.logits = d_logits,
                                  .targets = d_targets.data(),
                                  .loss_sum = d_loss.data(),
                                  .dlogits = {},
                                  .scratch = d_scratch.data(),
                                  .scale = scale,
                                  .softcap = softcap};
    if (gradient) args.dlogits = d_dlogits;
    kernel(Extent{rows, cols}, args);
    d_logits.fetch(), d_dlogits.fetch(), d_loss.fetch();
    loss = sum[0];
  }
  // The same in parts of the columns, which end there.
  void run_in_parts(const std::vector<std::int64_t>& ends) {
    const auto parts = static_cast<std::int64_t>(ends.size());
    std::vector<A> numbers(static_cast<std::size_t>(3 * parts * rows), std::numeric_limits<A>::quiet_NaN());
    std::vector<double> sums(ends.size(), kLossBefore), scratch(K::kSumPartials, NAN);
    OnDevice<A> d_logits(logits), d_numbers(numbers);
    OnDevice<T> d_dlogits(dlogits);
    OnDevice<std::int32_t> d_targets(targets);
    OnDevice<double> d_sums(sums), d_scratch(scratch);
    for (const bool numbers_first : {true, false}) {
      std::int64_t first = 0;
      for (std::size_t p = 0; p < ends.size(); first = ends[p++]) {
        const Extent extent{rows, ends[p] - first};
        const Strided<const A> from(d_logits.data() + first, logits.ld());
        if (numbers_first) {
          A* const to = d_numbers.data() + 3 * static_cast<std::int64_t>(p) * rows;
          K::softmax_part(extent, kernels::SoftmaxPart<T>{from, d_targets.data(), first, to, softcap});
        } else {
          K::cross_entropy_part(extent, kernels::CrossEntropyPart<T>{
                                            .local = {.logits = from,
                                                      .targets = d_targets.data(),
                                                      .loss_sum = d_sums.data() + p,
                                                      .dlogits = {d_dlogits.data() + first, dlogits.ld()},
                                                      .scratch = d_scratch.data(),
                                                      .scale = scale,
                                                      .softcap = softcap},
                                            .first = first,
                                            .numbers = d_numbers.data(),
                                            .parts = parts});
        }
      }
    }
    d_dlogits.fetch(), d_sums.fetch();
    loss = sums[0];
    for (const double sum : sums) EXPECT_EQ(sum, loss) << "every part has the same loss";
  }

  // A logit as it counts.
  double logit(std::int64_t r, std::int64_t c) const {
    const double l = logits.get(r, c);
    return softcap == 0 ? l : softcap * std::tanh(l / softcap);
  }
  double cap_slope(std::int64_t r, std::int64_t c) const {
    return softcap == 0 ? 1 : 1 - std::pow(std::tanh(logits.get(r, c) / softcap), 2);
  }
  void expect_definition() { expect_definition(K::roundings(cols, softcap)); }
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
        // The cap's slope 1 - tanh^2 errs by units of 1, up to 16 roundings, also where p is small: at the
        // target.
        const double of_slope = softcap != 0 && c == target ? 16 * unit_roundoff<A>() * scale * (1 - p) : 0;
        ASSERT_NEAR(dlogits.get(r, c), expected, bound<T>(expected, roundings, scale * p) + of_slope)
            << r << ", " << c;
      }
      if (target < 0) continue;
      sum_of_losses += std::log(sum) - (logit(r, target) - max);
      size += std::log(sum) + max - logit(r, target);
    }
    // The relative error of the sum is the absolute error of its logarithm.
    EXPECT_NEAR(loss, sum_of_losses,
                roundings * unit_roundoff<A>() * static_cast<double>(rows) + 1e-14 * size);
  }
  // Whatever the distances between rows.
  void expect_same_bits(const CrossEntropyRows& other) const {
    EXPECT_EQ(loss, other.loss);
    for (std::int64_t r = 0; r < rows; ++r) {
      ASSERT_EQ(
          std::memcmp(&dlogits.at(r, 0), &other.dlogits.at(r, 0), static_cast<std::size_t>(cols) * sizeof(T)),
          0)
          << r;
    }
  }
};

template <class K>
class CrossEntropy : public testing::Test {
 protected:
  using Rows = CrossEntropyRows<K>;
  static void expect_definition(double scale) {
    K::for_each_variant([&] {
      for (const std::int64_t cols : {1, 3, 43, 257, 5000}) {
        for (const std::int64_t gap : {0, 4, 5}) {
          SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
          Rows t({7, cols}, gap);
          t.scale = scale;
          t.logits.set(1, 0, 200);  // exp would overflow without the maximum
          if (t.targets[4] != cols - 1) t.logits.set(4, cols - 1, -std::numeric_limits<double>::infinity());
          // So many that some threads see nothing else.
          for (std::int64_t c = 0; c + 1 < cols; ++c) {
            if (c / 700 % 2 == 0 && c != t.targets[3])
              t.logits.set(3, c, -std::numeric_limits<double>::infinity());
          }
          t.run();
          t.expect_definition();
        }
      }
    });
  }
};
TYPED_TEST_SUITE_P(CrossEntropy);

// A loss alone takes 48 KiB of dynamic shared memory on CUDA, and its launch must opt in as for more. That
// shows on a GPU only where no launch with more has come before it, so this is the first test.
TYPED_TEST_P(CrossEntropy, TheLossAloneOfLongRowsIsLaunchedFirst) {
  CrossEntropyRows<TypeParam> t({3, 50257}, 47);
  t.run(false);
  const double alone = t.loss;
  t.run();
  EXPECT_EQ(t.loss, alone);
  t.expect_definition();
}

TYPED_TEST_P(CrossEntropy, MatchesItsDefinition) {
  this->expect_definition(1);
}
TYPED_TEST_P(CrossEntropy, ScalesTheGradientAndNotTheLoss) {
  this->expect_definition(0.37);
  this->expect_definition(32768);
}

// A logit of 200, or an infinite one, counts as the cap.
TYPED_TEST_P(CrossEntropy, CappedLogitsMatchTheirDefinition) {
  TypeParam::for_each_variant([] {
    for (const std::int64_t cols : TypeParam::capped_columns()) {
      for (const std::int64_t gap : {0, 5}) {
        for (const double cap : {2.0, 30.0}) {
          if (cols > 5000 && cap < 3) continue;
          SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap << ", cap " << cap);
          CrossEntropyRows<TypeParam> t({cols > 5000 ? 4 : 7, cols}, gap);
          t.scale = 0.37, t.softcap = cap;
          t.logits.set(1, 0, 200), t.logits.set(3, cols - 1, -std::numeric_limits<double>::infinity());
          t.run();
          t.expect_definition();
        }
      }
    }
  });
}

// The parts have equal or unequal widths, and one has nothing but -infinity in a row. A cap is tested, too.
TYPED_TEST_P(CrossEntropy, PartsTogetherMatchItsDefinition) {
  TypeParam::for_each_variant([] {
    for (const auto& [extent, cap] : TypeParam::extents_and_caps_of_parts()) {
      const std::int64_t n = extent.cols, half = (n + 1) / 2, quarter = (n + 3) / 4;
      for (const std::vector<std::int64_t>& ends :
           {std::vector<std::int64_t>{n}, {half, n}, {quarter, 2 * quarter, 3 * quarter, n}}) {
        SCOPED_TRACE(testing::Message() << extent.rows << " rows, " << ends.size() << " parts, cap " << cap);
        CrossEntropyRows<TypeParam> t(extent, 5);
        t.scale = 0.37, t.softcap = cap;
        t.logits.set(1, 0, 200);
        for (std::int64_t c = 0; c < ends[0] && ends.size() > 1; ++c)
          t.logits.set(3, c, -std::numeric_limits<double>::infinity());
        t.targets[3] = static_cast<std::int32_t>(n - 1), t.targets[4] = 0;
        t.run_in_parts(ends);
        t.expect_definition(TypeParam::roundings_of_parts(n, cap));
      }
    }
  });
}

TYPED_TEST_P(CrossEntropy, SameBitsInAnyOrder) {
  for (const Extent extent : TypeParam::order_rows()) {
    CrossEntropyRows<TypeParam> first(extent, 0);
    first.run();
    TypeParam::for_each_order([&] {
      CrossEntropyRows<TypeParam> t(extent, 0);
      t.run();
      t.expect_same_bits(first);
    });
    // Nor does the way in which memory is accessed matter: rows in quads of both, of one, of none.
    const std::int64_t whole = (4 - extent.cols % 4) % 4;
    for (const auto& [gap, gradient_gap] : {std::pair(1, 1), std::pair(3, 0), std::pair(0, 3)}) {
      CrossEntropyRows<TypeParam> t(extent, whole + gap, whole + gradient_gap);
      t.run();
      t.expect_same_bits(first);
    }
  }
}

// A power of two changes no rounding, so all that changes is the exponent.
TYPED_TEST_P(CrossEntropy, APowerOfTwoScalesExactly) {
  CrossEntropyRows<TypeParam> plain({7, 257}, 0), scaled({7, 257}, 0);
  plain.logits.fill(1), scaled.logits.fill(1);  // every gradient is far from what underflows
  plain.logits.set(3, 9, 3), scaled.logits.set(3, 9, 3);
  scaled.scale = 1024;
  plain.run(), scaled.run();
  EXPECT_EQ(scaled.loss, plain.loss);
  for (std::int64_t r = 0; r < 7; ++r) {
    for (std::int64_t c = 0; c < 257; ++c) {
      ASSERT_EQ(scaled.dlogits.get(r, c), 1024 * plain.dlogits.get(r, c)) << r << ", " << c;
    }
  }
}

TYPED_TEST_P(CrossEntropy, LossOnlyIsTheSameLoss) {
  CrossEntropyRows<TypeParam> with({5, 257}, 1), without({5, 257}, 1);
  const auto untouched = without.dlogits;
  with.run(), without.run(false);
  EXPECT_EQ(with.loss, without.loss);
  EXPECT_TRUE(without.dlogits.same_bits(untouched));
}

TYPED_TEST_P(CrossEntropy, IgnoredRowsAlone) {
  CrossEntropyRows<TypeParam> t({3, 43}, 0);
  t.targets = {-1, -100, std::numeric_limits<std::int32_t>::min()};
  t.logits.fill(std::numeric_limits<double>::quiet_NaN());
  t.run();
  EXPECT_EQ(t.loss, kLossBefore);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t c = 0; c < 43; ++c) ASSERT_EQ(t.dlogits.get(r, c), 0);
  }
}

// Rows of T that start where the rows of logits do.
TYPED_TEST_P(CrossEntropy, GradientMayOverwriteLogits) {
  using T = typename TypeParam::T;
  using A = typename TypeParam::A;
  for (const std::int64_t cols : TypeParam::overwritten_columns()) {
    for (const double cap : {0.0, 5.0}) {
      if (cols > 257 && cap > 0) continue;
      for (const std::int64_t gap : {0, 3}) {
        SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap << ", cap " << cap);
        CrossEntropyRows<TypeParam> t({cols > 100000 ? 1 : 5, cols}, gap);
        t.softcap = cap;
        t.run();
        TypeParam::for_each_order([&] {
          Matrix<A> shared = t.logits;
          const std::int64_t ld = shared.ld() * static_cast<std::int64_t>(sizeof(A) / sizeof(T));
          std::vector<double> loss{kLossBefore}, scratch(TypeParam::kSumPartials, NAN);
          OnDevice<A> d_shared(shared);
          OnDevice<std::int32_t> d_targets(t.targets);
          OnDevice<double> d_loss(loss), d_scratch(scratch);
          TypeParam::cross_entropy(
              Extent{t.rows, cols},
              kernels::CrossEntropy<T>{.logits = d_shared,
                                       .targets = d_targets.data(),
                                       .loss_sum = d_loss.data(),
                                       .dlogits = {reinterpret_cast<T*>(d_shared.data()), ld},
                                       .scratch = d_scratch.data(),
                                       .softcap = cap});
          d_shared.fetch(), d_loss.fetch();
          EXPECT_EQ(loss[0], t.loss);
          for (std::int64_t r = 0; r < t.rows; ++r) {
            ASSERT_EQ(std::memcmp(&shared.at(r, 0), &t.dlogits.at(r, 0),
                                  static_cast<std::size_t>(cols) * sizeof(T)),
                      0)
                << r;
          }
        });
      }
    }
  }
}

// A row that is sure of its target has no loss and no gradient, with a cap, too.
TYPED_TEST_P(CrossEntropy, ASureRowHasNoLoss) {
  TypeParam::for_each_variant([] {
    CrossEntropyRows<TypeParam> t({1, 43}, 0);
    t.softcap = 300;
    t.logits.fill(-250), t.logits.set(0, 7, 251.3);
    t.targets[0] = 7;
    t.run();
    EXPECT_EQ(t.loss, kLossBefore);
    EXPECT_EQ(t.dlogits.get(0, 7), 0);
  });
}

TYPED_TEST_P(CrossEntropy, NanIsNotHidden) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinity = std::numeric_limits<double>::infinity();
  TypeParam::for_each_variant([&] {
    for (const double bad : {nan, infinity}) {
      for (const std::int64_t where : {0, 17, 42}) {
        CrossEntropyRows<TypeParam> t({1, 43}, 0);
        t.targets[0] = 5;
        t.logits.set(0, where, bad);
        t.run();
        EXPECT_TRUE(std::isnan(t.loss));
        EXPECT_TRUE(std::isnan(t.dlogits.get(0, 5)));
      }
    }
    // A row without a finite logit.
    CrossEntropyRows<TypeParam> t({1, 43}, 0);
    t.logits.fill(-infinity);
    t.run();
    EXPECT_TRUE(std::isnan(t.loss));
    for (std::int64_t c = 0; c < 43; ++c) ASSERT_TRUE(std::isnan(t.dlogits.get(0, c)));
  });
}

REGISTER_TYPED_TEST_SUITE_P(CrossEntropy, TheLossAloneOfLongRowsIsLaunchedFirst, MatchesItsDefinition,
                            ScalesTheGradientAndNotTheLoss, CappedLogitsMatchTheirDefinition,
                            PartsTogetherMatchItsDefinition, SameBitsInAnyOrder, APowerOfTwoScalesExactly,
                            LossOnlyIsTheSameLoss, IgnoredRowsAlone, GradientMayOverwriteLogits,
                            ASureRowHasNoLoss, NanIsNotHidden);

// K's kernels for fp16.
template <class K>
class CrossEntropyFp16 : public testing::Test {};
TYPED_TEST_SUITE_P(CrossEntropyFp16);

// The gradient is scaled before it is rounded: in fp16 a probability of 2^-30 is nothing, 2^15 times it is
// 2^-15. And a scale too large for fp16 shows as an infinity.
TYPED_TEST_P(CrossEntropyFp16, TheScaleKeepsWhatUnderflows) {
  TypeParam::for_each_variant([] {
    for (const double scale : {1.0, 0x1p15, 0x1p17}) {
      CrossEntropyRows<TypeParam> t({1, 43}, 0);
      t.scale = scale;
      t.logits.fill(-30 * std::log(2.0));
      t.logits.set(0, 7, 0);
      t.targets[0] = 9;
      t.run();
      // The sum of all 43 is 1 but for 43 * 2^-30; the logit's rounding of 2^-20 is the exponent's, and the
      // probability's then.
      const double p = scale * 0x1p-30;
      EXPECT_NEAR(t.dlogits.get(0, 3), scale == 1 ? 0.0 : p, scale == 1 ? 0.0 : p * 0x1p-10);
      const double most = scale == 0x1p17 ? std::numeric_limits<double>::infinity() : scale;
      EXPECT_EQ(t.dlogits.get(0, 7), most);
      EXPECT_EQ(t.dlogits.get(0, 9), -most);
    }
  });
}
REGISTER_TYPED_TEST_SUITE_P(CrossEntropyFp16, TheScaleKeepsWhatUnderflows);

// K's kernels in double.
template <class K>
class CrossEntropySlopes : public testing::Test {};
TYPED_TEST_SUITE_P(CrossEntropySlopes);
TYPED_TEST_P(CrossEntropySlopes, Logits) {
  TypeParam::for_each_variant([] {
    for (const double cap : {0.0, 5.0}) {
      CrossEntropyRows<TypeParam> t({4, 43}, 2), moved({4, 43}, 2);
      t.softcap = moved.softcap = cap;
      t.run();
      for (std::int64_t r = 0; r < t.rows; ++r) {
        for (std::int64_t c = 0; c < t.cols; ++c) {
          const double expected = slope(moved.logits.at(r, c), [&] {
            moved.run(false);
            return moved.loss;
          });
          ASSERT_NEAR(t.dlogits.get(r, c), expected, kSlopeBound);
        }
      }
    }
  });
}
REGISTER_TYPED_TEST_SUITE_P(CrossEntropySlopes, Logits);

}  // namespace zg::test
