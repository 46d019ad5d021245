#include "tests/kernels/cross_entropy_rows.hpp"

namespace zg::test {
namespace {

template <class T>
class CrossEntropy : public testing::Test {};
TYPED_TEST_SUITE(CrossEntropy, StorageTypes);

template <class T>
struct Case : CrossEntropyRows<T> {
  Case(std::int64_t n, std::int64_t v, std::int64_t gap) : CrossEntropyRows<T>(n, v, gap, gap) {}
  void run() {
    host::cross_entropy<T>({this->rows, this->cols}, {.logits = this->logits,
                                                      .targets = this->targets.data(),
                                                      .loss_sum = &this->loss,
                                                      .dlogits = this->dlogits,
                                                      .scale = this->scale,
                                                      .softcap = this->softcap});
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
        // A logit less the largest is rounded once and is the exponent: up to 200 units. The sum adds at most
        // 1024 terms in A before it goes to double. exp and the products cost a handful.
        t.expect_definition(1024 + 200 + 8);
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

// tanh has 4 units in the last place, which are 8 roundings of at most the cap in the exponent, and the
// derivative 1 - tanh^2 errs by as many of 1. A logit of 200, or an infinite one, counts as the cap.
TYPED_TEST(CrossEntropy, CappedLogitsMatchTheirDefinition) {
  for_each_target([] {
    for (const std::int64_t cols : {1, 43, 257, 5000}) {
      for (const double cap : {2.0, 30.0}) {
        Case<TypeParam> t(7, cols, 5);
        t.scale = 0.37, t.softcap = cap;
        t.logits.set(1, 0, 200), t.logits.set(4, cols - 1, -std::numeric_limits<double>::infinity());
        t.run();
        t.expect_definition(1024 + 16 * cap + 32);
      }
    }
  });
}

// In parts of equal and of unequal width, one of which has nothing but -infinity in a row. With a cap, too.
TYPED_TEST(CrossEntropy, PartsTogetherMatchItsDefinition) {
  using T = TypeParam;
  using A = Acc<T>;
  for_each_target([&] {
    for (const std::vector<std::int64_t>& ends :
         {std::vector<std::int64_t>{257}, {129, 257}, {65, 130, 195, 257}}) {
      for (const double cap : {0.0, 30.0}) {
        Case<T> t(7, 257, 5);
        t.scale = 0.37, t.softcap = cap;
        t.logits.set(1, 0, 200);
        for (std::int64_t c = 0; c < ends[0] && ends.size() > 1; ++c)
          t.logits.set(3, c, -std::numeric_limits<double>::infinity());
        t.targets[3] = 256, t.targets[4] = 0;
        const auto parts = static_cast<std::int64_t>(ends.size());
        std::vector<A> numbers(static_cast<std::size_t>(3 * parts * t.rows),
                               std::numeric_limits<A>::quiet_NaN());
        const Strided<const A> logits = t.logits;
        const Strided<T> dlogits = t.dlogits;
        double losses = 0;
        for (const bool numbers_first : {true, false}) {
          std::int64_t first = 0;
          for (std::size_t p = 0; p < ends.size(); first = ends[p++]) {
            const Extent extent{t.rows, ends[p] - first};
            const Strided<const A> from(logits.data + first, logits.ld);
            if (numbers_first) {
              host::softmax_part<T>(extent,
                                    {from, t.targets.data(), first,
                                     numbers.data() + 3 * static_cast<std::int64_t>(p) * t.rows, cap});
              continue;
            }
            t.loss = kLossBefore;
            host::cross_entropy_part<T>(extent, {.local = {.logits = from,
                                                           .targets = t.targets.data(),
                                                           .loss_sum = &t.loss,
                                                           .dlogits = {dlogits.data + first, dlogits.ld},
                                                           .scale = t.scale,
                                                           .softcap = cap},
                                                 .first = first,
                                                 .numbers = numbers.data(),
                                                 .parts = parts});
            EXPECT_EQ(t.loss, p > 0 ? losses : t.loss) << "every part has the same loss";
            losses = t.loss;
          }
        }
        t.expect_definition(1024 + 200 + 16 * cap + 32);
      }
    }
  });
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
    for (const double cap : {0.0, 5.0}) {
      Case<double> t(4, 43, 2);
      t.softcap = cap;
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
    }
  });
}

TYPED_TEST(CrossEntropy, GradientMayOverwriteLogits) {
  using T = TypeParam;
  using A = Acc<T>;
  for (const double cap : {0.0, 5.0}) {
    Case<T> t(5, 257, 0);
    t.softcap = cap;
    Matrix<A> shared = t.logits, of_parts = t.logits;
    t.run();
    double loss = 0;
    // Rows of T that start where the rows of logits do.
    T* start = reinterpret_cast<T*>(shared.data());
    const std::int64_t ld = 257 * static_cast<std::int64_t>(sizeof(A) / sizeof(T));
    host::cross_entropy<T>({5, 257}, {.logits = shared,
                                      .targets = t.targets.data(),
                                      .loss_sum = &loss,
                                      .dlogits = {start, ld},
                                      .softcap = cap});
    for (std::int64_t r = 0; r < 5; ++r) {
      ASSERT_EQ(std::memcmp(start + r * ld, &t.dlogits.at(r, 0), 257 * sizeof(T)), 0) << r;
    }
    // The one part of all tokens, where gradients are as wide as logits.
    if constexpr (std::is_same_v<T, A>) {
      std::vector<A> numbers(15);
      host::softmax_part<T>({5, 257}, {of_parts, t.targets.data(), 0, numbers.data(), cap});
      host::cross_entropy_part<T>({5, 257}, {.local = {.logits = of_parts,
                                                       .targets = t.targets.data(),
                                                       .loss_sum = &loss,
                                                       .dlogits = of_parts,
                                                       .softcap = cap},
                                             .numbers = numbers.data()});
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < 257; ++c)
          ASSERT_NEAR(of_parts.get(r, c), t.dlogits.get(r, c), 1e3 * unit_roundoff<A>()) << r << ", " << c;
      }
    }
  }
}

// A row that is sure of its target has no loss and no gradient, with a cap, too.
TYPED_TEST(CrossEntropy, ASureRowHasNoLoss) {
  using T = TypeParam;
  for_each_target([] {
    Case<T> t(1, 43, 0);
    t.softcap = 300;
    t.logits.fill(-250), t.logits.set(0, 7, 251.3);
    t.targets[0] = 7;
    t.run();
    EXPECT_EQ(t.loss, kLossBefore);
    EXPECT_EQ(t.dlogits.get(0, 7), 0);
  });
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
