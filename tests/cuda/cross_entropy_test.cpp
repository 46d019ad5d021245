// Softmax cross entropy against its definition in double.
#include "tests/cuda/harness.hpp"
#include "tests/kernels/cross_entropy_rows.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaCrossEntropy : public testing::Test {};
TYPED_TEST_SUITE(CudaCrossEntropy, StorageTypes);

template <class T>
struct Rows : CrossEntropyRows<T> {
  Rows(std::int64_t n, std::int64_t v, std::int64_t gap) : CrossEntropyRows<T>(n, v, gap, gap) {}
  Rows(std::int64_t n, std::int64_t v, std::int64_t gap, std::int64_t gradient_gap)
      : CrossEntropyRows<T>(n, v, gap, gradient_gap) {}

  // processors: multiprocessors, if not 0; of each the kernel makes some blocks.
  void run(bool gradient = true, int processors = 0) {
    std::vector<double> sum{kLossBefore}, scratch(cuda::kSumPartials, NAN);
    OnDevice<Acc<T>> d_logits(this->logits);
    OnDevice<T> d_dlogits(this->dlogits);
    OnDevice<std::int32_t> d_targets(this->targets);
    OnDevice<double> d_loss(sum), d_scratch(scratch);
    kernels::CrossEntropy<T> args{.logits = d_logits,
                                  .targets = d_targets.data(),
                                  .loss_sum = d_loss.data(),
                                  .dlogits = {},
                                  .scratch = d_scratch.data(),
                                  .scale = this->scale,
                                  .softcap = this->softcap};
    if (gradient) args.dlogits = d_dlogits;
    cuda::Launch on = launch();
    if (processors > 0) on.multiprocessors = processors;
    cuda::cross_entropy<T>(on, {this->rows, this->cols}, args);
    d_dlogits.fetch(), d_loss.fetch();
    this->loss = sum[0];
  }
  // Differences from the largest logit so far, and of largest ones, are exponents: each is rounded by a unit
  // of itself, and in float so is its product with log2(e), and that number by a quarter of a unit. Those of
  // a term add up to 200 at most, in the sum and in the gradient. An exponential has 4 units besides. A
  // thread adds 4 of them for each tile, and takes its sum to a new largest logit by a product with one; what
  // threads have is added in double.
  void expect_definition() {
    const std::int64_t tile = this->cols <= 8192 ? 1024 : 4096, tiles = (this->cols + tile - 1) / tile;
    // tanh has 2 units, which are 4 roundings of at most the cap in the exponent.
    CrossEntropyRows<T>::expect_definition((4 + 5) * static_cast<double>(tiles) + 2 * 2.25 * 200 + 16 +
                                           16 * this->softcap);
  }
};

// A loss alone takes 48 KiB of dynamic shared memory, for which a launch must opt in as for more. On a GPU
// that shows only where no launch with more has come before it, so this is the first test.
TYPED_TEST(CudaCrossEntropy, TheLossAloneOfLongRowsIsLaunchedFirst) {
  Rows<TypeParam> t(3, 50257, 47);
  t.run(false);
  const double alone = t.loss;
  t.run();
  EXPECT_EQ(t.loss, alone);
  t.expect_definition();
}

template <class T>
void expect_definition(double scale) {
  for (const std::int64_t cols : {1, 3, 43, 257, 5000}) {
    for (const std::int64_t gap : {0, 4, 5}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
      Rows<T> t(7, cols, gap);
      t.scale = scale;
      t.logits.set(1, 0, 200);  // exp would overflow without the maximum
      // So many that some threads see nothing else.
      for (std::int64_t c = 0; c + 1 < cols; ++c) {
        if (c / 700 % 2 == 0 && c != t.targets[3]) {
          t.logits.set(3, c, -std::numeric_limits<double>::infinity());
        }
      }
      t.run();
      t.expect_definition();
    }
  }
}

TYPED_TEST(CudaCrossEntropy, MatchesItsDefinition) {
  expect_definition<TypeParam>(1);
}
TYPED_TEST(CudaCrossEntropy, ScalesTheGradientAndNotTheLoss) {
  expect_definition<TypeParam>(0.37);
  expect_definition<TypeParam>(32768);
}

// Rows that fit shared memory and such that do not, in quads and not; an infinite logit counts as the cap.
TYPED_TEST(CudaCrossEntropy, CappedLogitsMatchTheirDefinition) {
  for (const std::int64_t cols : {1, 43, 257, 9000, 50257}) {
    for (const std::int64_t gap : {0, 5}) {
      for (const double cap : {2.0, 30.0}) {
        if (cols > 5000 && cap < 3) continue;
        SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap << ", cap " << cap);
        Rows<TypeParam> t(4, cols, gap);
        t.scale = 0.37, t.softcap = cap;
        t.logits.set(1, 0, 200), t.logits.set(3, cols - 1, -std::numeric_limits<double>::infinity());
        t.run();
        t.expect_definition();
      }
    }
  }
}

// In parts of equal and of unequal width, one of which has nothing but -infinity in a row; more rows than
// there are sums of losses. With a cap, too.
TYPED_TEST(CudaCrossEntropy, PartsTogetherMatchItsDefinition) {
  using T = TypeParam;
  using A = Acc<T>;
  for (const std::int64_t n : {7, 1100}) {
    for (const std::vector<std::int64_t>& ends :
         {std::vector<std::int64_t>{43}, {22, 43}, {11, 22, 33, 43}}) {
      SCOPED_TRACE(testing::Message() << n << " rows, " << ends.size() << " parts");
      CrossEntropyRows<T> t(n, 43, 5, 5);
      t.scale = 0.37, t.softcap = n == 7 ? 30 : 0;
      t.logits.set(1, 0, 200);
      for (std::int64_t c = 0; c < ends[0] && ends.size() > 1; ++c)
        t.logits.set(3, c, -std::numeric_limits<double>::infinity());
      t.targets[3] = 42, t.targets[4] = 0;
      const auto parts = static_cast<std::int64_t>(ends.size());
      std::vector<A> numbers(static_cast<std::size_t>(3 * parts * n), std::numeric_limits<A>::quiet_NaN());
      std::vector<double> sum{kLossBefore}, scratch(cuda::kSumPartials, NAN);
      OnDevice<A> d_logits(t.logits), d_numbers(numbers);
      OnDevice<T> d_dlogits(t.dlogits);
      OnDevice<std::int32_t> d_targets(t.targets);
      OnDevice<double> d_loss(sum), d_scratch(scratch);
      const Strided<const A> logits = Strided<A>(d_logits);
      const Strided<T> dlogits = d_dlogits;
      for (const bool numbers_first : {true, false}) {
        std::int64_t first = 0;
        for (std::size_t p = 0; p < ends.size(); first = ends[p++]) {
          const Extent extent{n, ends[p] - first};
          const Strided<const A> from(logits.data + first, logits.ld);
          if (numbers_first) {
            cuda::softmax_part<T>(launch(), extent,
                                  {from, d_targets.data(), first,
                                   d_numbers.data() + 3 * static_cast<std::int64_t>(p) * n, t.softcap});
          } else {
            cuda::cross_entropy_part<T>(launch(), extent,
                                        {.local = {.logits = from,
                                                   .targets = d_targets.data(),
                                                   .loss_sum = d_loss.data(),
                                                   .dlogits = {dlogits.data + first, dlogits.ld},
                                                   .scratch = d_scratch.data(),
                                                   .scale = t.scale,
                                                   .softcap = t.softcap},
                                         .first = first,
                                         .numbers = d_numbers.data(),
                                         .parts = parts});
          }
        }
      }
      d_dlogits.fetch(), d_loss.fetch();
      t.loss = kLossBefore + (sum[0] - kLossBefore) / static_cast<double>(parts);  // every part has added it
      t.expect_definition(43 + 200 + 16 + 16 * t.softcap);
    }
  }
}

// Rows for large blocks: some fit shared memory, some do not; at aligned addresses, and at others.
TYPED_TEST(CudaCrossEntropy, LargeVocabularies) {
  using T = TypeParam;
  for (const std::int64_t cols : {8193, 50257, 70001}) {
    for (const std::int64_t gap : {cols == 50257 ? 47 : 3, 2}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
      Rows<T> t(2, cols, gap);
      t.targets[1] = static_cast<std::int32_t>(cols - 1);
      t.run();
      t.expect_definition();
    }
  }
}

// A block loads its next row while it writes one: whatever rows there are before and behind it, and whether
// they are ignored, a row is what it is alone. Rows that fit shared memory, and such that do not.
TYPED_TEST(CudaCrossEntropy, RowsOfABlockDoNotMix) {
  using T = TypeParam;
  for (const std::int64_t cols : {300, 9000, 50257}) {
    const std::int64_t rows = cols == 300 ? 40 : 11;
    Rows<T> t(rows, cols, 3);
    for (const std::int64_t r : {0, 2, 5, 6, 10}) t.targets[static_cast<std::size_t>(r)] = -1;
    t.targets[7] = 0, t.targets[8] = static_cast<std::int32_t>(cols - 1);
    double sum = kLossBefore;
    std::vector<Rows<T>> single;
    for (std::int64_t r = 0; r < rows; ++r) {
      Rows<T>& one = single.emplace_back(1, cols, 3);
      for (std::int64_t c = 0; c < cols; ++c) one.logits.at(0, c) = t.logits.at(r, c);
      one.targets[0] = t.targets[static_cast<std::size_t>(r)];
      one.run();
      sum += one.loss - kLossBefore;
    }
    for_each_order([&] {
      t.dlogits.fill(std::numeric_limits<double>::quiet_NaN());
      t.run();
      EXPECT_NEAR(t.loss, sum, 1e-13 * sum);
      for (std::int64_t r = 0; r < rows; ++r) {
        ASSERT_EQ(std::memcmp(&t.dlogits.at(r, 0), &single[static_cast<std::size_t>(r)].dlogits.at(0, 0),
                              static_cast<std::size_t>(cols) * sizeof(T)),
                  0)
            << "row " << r << " of " << cols << " columns";
      }
      const double with_gradient = t.loss;
      t.run(false);
      EXPECT_EQ(t.loss, with_gradient);
    });
    t.dlogits.expect_gaps_intact("dlogits");
  }
}

// The sum of losses has the same order however many blocks there are.
TEST(CudaCrossEntropyFloat, TheNumberOfBlocksDoesNotMatter) {
  Rows<float> t(1100, 70, 2);
  t.run();
  const double loss = t.loss;
  for (const int processors : {1, 2, 7, 400}) {
    t.dlogits.fill(std::numeric_limits<double>::quiet_NaN());
    t.run(true, processors);
    EXPECT_EQ(t.loss, loss) << processors;
    t.expect_definition();
  }
}

TYPED_TEST(CudaCrossEntropy, SameBitsInAnyOrderOfThreads) {
  using T = TypeParam;
  for (const std::int64_t cols : {257, 9000}) {
    Rows<T> first(9, cols, 0);
    first.run();
    for_each_order([&] {
      Rows<T> t(9, cols, 0);
      t.run();
      EXPECT_EQ(t.loss, first.loss);
      EXPECT_TRUE(t.dlogits.same_bits(first.dlogits));
    });
    // Nor does the way in which memory is accessed matter: rows in quads of both, of one, of none.
    for (const auto& [gap, gradient_gap] : {std::pair(1, 1), std::pair(3, 0), std::pair(0, 3)}) {
      Rows<T> t(9, cols, cols % 4 == 0 ? gap : 3 + gap, cols % 4 == 0 ? gradient_gap : 3 + gradient_gap);
      for (std::int64_t r = 0; r < 9; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) t.logits.at(r, c) = first.logits.at(r, c);
      }
      t.targets = first.targets;
      t.run();
      EXPECT_EQ(t.loss, first.loss);
      for (std::int64_t r = 0; r < 9; ++r) {
        ASSERT_EQ(std::memcmp(&t.dlogits.at(r, 0), &first.dlogits.at(r, 0),
                              static_cast<std::size_t>(cols) * sizeof(T)),
                  0);
      }
    }
  }
}

// More rows than groups of them.
TEST(CudaCrossEntropyFloat, ManyRows) {
  Rows<float> t(cuda::kSumPartials + 70, 5, 0);
  t.run();
  t.expect_definition();
}

// A power of two changes no rounding, so all that changes is the exponent.
TYPED_TEST(CudaCrossEntropy, APowerOfTwoScalesExactly) {
  using T = TypeParam;
  Rows<T> plain(7, 257, 0), scaled(7, 257, 0);
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
TEST(CudaCrossEntropyFp16, TheScaleKeepsWhatUnderflows) {
  for (const double scale : {1.0, 0x1p15, 0x1p17}) {
    Rows<fp16> t(1, 43, 0);
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
}

TYPED_TEST(CudaCrossEntropy, LossOnlyIsTheSameLoss) {
  using T = TypeParam;
  Rows<T> with(5, 257, 1), without(5, 257, 1);
  const Matrix<T> untouched = without.dlogits;
  with.run(), without.run(false);
  EXPECT_EQ(with.loss, without.loss);
  EXPECT_TRUE(without.dlogits.same_bits(untouched));
}

TYPED_TEST(CudaCrossEntropy, IgnoredRowsAlone) {
  using T = TypeParam;
  Rows<T> t(3, 43, 0);
  t.targets = {-1, -100, std::numeric_limits<std::int32_t>::min()};
  t.logits.fill(std::numeric_limits<double>::quiet_NaN());
  t.run();
  EXPECT_EQ(t.loss, kLossBefore);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t c = 0; c < 43; ++c) ASSERT_EQ(t.dlogits.get(r, c), 0);
  }
}

// Rows of T that start where the rows of logits do: in shared memory alone, and partly read again.
TYPED_TEST(CudaCrossEntropy, GradientMayOverwriteLogits) {
  using T = TypeParam;
  using A = Acc<T>;
  for (const std::int64_t cols : {257, 5000, 120001}) {
    for (const std::int64_t gap : {0, 3}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
      Rows<T> t(cols > 100000 ? 1 : 4, cols, gap);
      t.run();
      for_each_order([&] {
        Matrix<A> shared = t.logits;
        std::vector<double> loss{kLossBefore}, scratch(cuda::kSumPartials, NAN);
        OnDevice<A> d_shared(shared);
        OnDevice<std::int32_t> d_targets(t.targets);
        OnDevice<double> d_loss(loss), d_scratch(scratch);
        const std::int64_t ld = t.logits.ld() * static_cast<std::int64_t>(sizeof(A) / sizeof(T));
        cuda::cross_entropy<T>(launch(), {t.rows, cols},
                               {.logits = d_shared,
                                .targets = d_targets.data(),
                                .loss_sum = d_loss.data(),
                                .dlogits = {reinterpret_cast<T*>(d_shared.data()), ld},
                                .scratch = d_scratch.data()});
        d_shared.fetch(), d_loss.fetch();
        EXPECT_EQ(loss[0], t.loss);
        for (std::int64_t r = 0; r < t.rows; ++r) {
          ASSERT_EQ(
              std::memcmp(&shared.at(r, 0), &t.dlogits.at(r, 0), static_cast<std::size_t>(cols) * sizeof(T)),
              0)
              << r;
        }
      });
    }
  }
}

TYPED_TEST(CudaCrossEntropy, NanIsNotHidden) {
  using T = TypeParam;
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {nan, infinity}) {
    for (const std::int64_t where : {0, 17, 42}) {
      Rows<T> t(1, 43, 0);
      t.targets[0] = 5;
      t.logits.set(0, where, bad);
      t.run();
      EXPECT_TRUE(std::isnan(t.loss));
      EXPECT_TRUE(std::isnan(t.dlogits.get(0, 5)));
    }
  }
  // A row without a finite logit.
  Rows<T> t(1, 43, 0);
  t.logits.fill(-infinity);
  t.run();
  EXPECT_TRUE(std::isnan(t.loss));
  for (std::int64_t c = 0; c < 43; ++c) ASSERT_TRUE(std::isnan(t.dlogits.get(0, c)));
}

}  // namespace
}  // namespace zg::test
