#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

template <class T>
class CrossEntropy : public testing::Test {};
TYPED_TEST_SUITE(CrossEntropy, StorageTypes);

template <class T>
struct Case {
  using A = Acc<T>;
  std::int64_t rows, cols;
  Matrix<A> logits;
  Matrix<T> dlogits;
  std::vector<std::int32_t> targets;
  double loss = 0.25, scale = 1;

  Case(std::int64_t n, std::int64_t v, std::int64_t gap)
      : rows(n), cols(v), logits(n, v, gap), dlogits(n, v, gap), targets(static_cast<std::size_t>(n)) {
    auto random = generator(static_cast<std::uint64_t>(n * 100000 + v));
    logits.fill_normal(random, 3, 4);
    dlogits.fill(std::numeric_limits<double>::quiet_NaN());
    for (auto& t : targets) t = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(v));
    if (n > 2) targets[2] = -1;
  }
  void run() {
    host::cross_entropy<T>(
        {rows, cols},
        {.logits = logits, .targets = targets.data(), .loss_sum = &loss, .dlogits = dlogits, .scale = scale});
  }
};

template <class T>
void expect_definition(double scale) {
  for_each_target([&] {
    for (const std::int64_t cols : {1, 3, 43, 257, 5000}) {
      for (const std::int64_t gap : {0, 5}) {
        Case<T> t(7, cols, gap);
        t.scale = scale;
        t.logits.set(1, 0, 200);  // exp would overflow without the maximum
        t.logits.set(3, cols - 1, -std::numeric_limits<double>::infinity());
        if (cols == 1) t.logits.set(3, 0, 1);
        if (t.targets[3] == cols - 1) t.targets[3] = 0;
        t.run();
        t.logits.expect_gaps_intact("logits"), t.dlogits.expect_gaps_intact("dlogits");
        double loss = 0.25, size = 1;
        for (std::int64_t r = 0; r < t.rows; ++r) {
          const std::int64_t target = t.targets[static_cast<std::size_t>(r)];
          double max = t.logits.get(r, 0), sum = 0;
          for (std::int64_t c = 0; c < cols; ++c) max = std::max(max, t.logits.get(r, c));
          for (std::int64_t c = 0; c < cols; ++c) sum += std::exp(t.logits.get(r, c) - max);
          for (std::int64_t c = 0; c < cols; ++c) {
            const double p = std::exp(t.logits.get(r, c) - max) / sum;
            const double expected = target < 0 ? 0 : scale * (p - (c == target ? 1 : 0));
            // l - max is rounded once and is the exponent: up to 200 units; the sum adds at most 1024 terms
            // in A before it goes to double; exp and the products a handful.
            ASSERT_NEAR(t.dlogits.get(r, c), expected, bound<T>(expected, 1024 + 200 + 8, scale * p))
                << r << ", " << c;
          }
          if (target < 0) continue;
          loss += std::log(sum) - (t.logits.get(r, target) - max);
          size += std::log(sum) + max - t.logits.get(r, target);
        }
        // The relative error of the sum is the absolute error of its logarithm.
        EXPECT_NEAR(t.loss, loss, (1024 + 200 + 8) * unit_roundoff<Acc<T>>() * 7 + 1e-14 * size);
      }
    }
  });
}

TYPED_TEST(CrossEntropy, MatchesItsDefinition) {
  expect_definition<TypeParam>(1);
}

TYPED_TEST(CrossEntropy, ScalesTheGradientAndNotTheLoss) {
  expect_definition<TypeParam>(0.37);
  expect_definition<TypeParam>(32768);
}

// A power of two changes no rounding, so all that changes is the exponent.
TYPED_TEST(CrossEntropy, APowerOfTwoScalesExactly) {
  using T = TypeParam;
  Case<T> plain(7, 257, 0), scaled(7, 257, 0);
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

// The gradient is scaled before it is rounded: in fp16 a probability of 2^-30 is nothing, 2^15 times it is
// 2^-15. And a scale too large for fp16 shows as an infinity.
TEST(CrossEntropyFp16, TheScaleKeepsWhatUnderflows) {
  for_each_target([] {
    for (const double scale : {1.0, 0x1p15, 0x1p17}) {
      Case<fp16> t(1, 43, 0);
      t.scale = scale;
      t.logits.fill(-30 * std::log(2.0));
      t.logits.set(0, 7, 0);
      t.targets[0] = 9;
      t.run();
      // The sum of all 43 is 1 but for 43 * 2^-30; the logit's rounding of 2^-20 is the exponent's, and the
      // probability's then.
      const double p = scale * 0x1p-30;
      EXPECT_NEAR(t.dlogits.get(0, 3), scale == 1 ? 0.0 : p, scale == 1 ? 0.0 : p * 0x1p-10);
      if (scale == 0x1p17) {
        EXPECT_EQ(t.dlogits.get(0, 7), std::numeric_limits<double>::infinity());
        EXPECT_EQ(t.dlogits.get(0, 9), -std::numeric_limits<double>::infinity());
      } else {
        EXPECT_EQ(t.dlogits.get(0, 7), scale);
        EXPECT_EQ(t.dlogits.get(0, 9), -scale);
      }
    }
  });
}

TYPED_TEST(CrossEntropy, LossOnlyIsTheSameLoss) {
  using T = TypeParam;
  Case<T> with(5, 257, 1), without(5, 257, 1);
  with.run();
  host::cross_entropy<T>({5, 257}, {.logits = without.logits,
                                    .targets = without.targets.data(),
                                    .loss_sum = &without.loss,
                                    .dlogits = {}});
  EXPECT_EQ(with.loss, without.loss);
}

TEST(CrossEntropySlopes, Logits) {
  for_each_target([] {
    Case<double> t(4, 43, 2);
    t.run();
    for (std::int64_t r = 0; r < t.rows; ++r) {
      for (std::int64_t c = 0; c < t.cols; ++c) {
        Matrix<double> gradient = t.dlogits;
        const double expected = slope(t.logits.at(r, c), [&] {
          t.loss = 0;
          t.run();
          return t.loss;
        });
        ASSERT_NEAR(gradient.get(r, c), expected, kSlopeBound);
        t.dlogits = gradient;
      }
    }
  });
}

TYPED_TEST(CrossEntropy, GradientMayOverwriteLogits) {
  using T = TypeParam;
  using A = Acc<T>;
  Case<T> t(5, 257, 0);
  Matrix<A> shared = t.logits;
  t.run();
  double loss = 0;
  // Rows of T that start where the rows of logits do.
  T* start = reinterpret_cast<T*>(shared.data());
  const std::int64_t ld = 257 * static_cast<std::int64_t>(sizeof(A) / sizeof(T));
  host::cross_entropy<T>(
      {5, 257}, {.logits = shared, .targets = t.targets.data(), .loss_sum = &loss, .dlogits = {start, ld}});
  for (std::int64_t r = 0; r < 5; ++r) {
    ASSERT_EQ(std::memcmp(start + r * ld, &t.dlogits.at(r, 0), 257 * sizeof(T)), 0) << r;
  }
}

TYPED_TEST(CrossEntropy, NanIsNotHidden) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t where : {0, 17, 42}) {
      Case<T> t(1, 43, 0);
      t.targets[0] = 5;
      t.logits.set(0, where, std::numeric_limits<double>::quiet_NaN());
      t.run();
      EXPECT_TRUE(std::isnan(t.loss));
      EXPECT_TRUE(std::isnan(t.dlogits.get(0, 5)));
    }
  });
}

TYPED_TEST(CrossEntropy, SameBitsForAnyNumberOfThreads) {
  using T = TypeParam;
  Case<T> first(601, 43, 0);
  first.run();
  for_each_thread_count([&](int) {
    Case<T> t(601, 43, 0);
    t.run();
    EXPECT_EQ(t.loss, first.loss);
    EXPECT_TRUE(t.dlogits.same_bits(first.dlogits));
  });
}

TEST(CrossEntropyDeathTest, TargetOutsideTheVocabulary) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Case<float> t(1, 43, 0);
  t.targets[0] = 43;
  EXPECT_DEATH(t.run(), "43 against 43");
}

}  // namespace
}  // namespace zg::test
