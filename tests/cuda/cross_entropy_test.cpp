// Softmax cross entropy of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/cross_entropy_cases.hpp"

namespace zg::test {
namespace {

template <class T>
struct CudaCrossEntropyOf : Cuda<T> {
  // Differences from the largest logit so far, and of largest ones, are exponents: each is rounded by a unit
  // of itself, and in float so is its product with log2(e), and that number by a quarter of a unit. Those of
  // a term add up to 200 at most, in the sum and in the gradient. An exponential has 4 units besides. A
  // thread adds 4 of them for each tile, and takes its sum to a new largest logit by a product with one; what
  // threads have is added in double. tanh has 2 units, which are 4 roundings of at most the cap in the
  // exponent.
  static double roundings(std::int64_t cols, double cap) {
    const std::int64_t tile = cols <= 8192 ? 1024 : 4096, tiles = (cols + tile - 1) / tile;
    return (4 + 5) * static_cast<double>(tiles) + 2 * 2.25 * 200 + 16 + 16 * cap;
  }
  static double roundings_of_parts(std::int64_t cols, double cap) {
    return static_cast<double>(cols) + 200 + 16 + 16 * cap;
  }
  // Rows that fit shared memory and such that do not, in quads and not.
  static std::vector<std::int64_t> capped_columns() { return {1, 43, 257, 9000, 50257}; }
  // Fewer and more rows than there are sums of losses.
  static std::vector<std::pair<Extent, double>> extents_and_caps_of_parts() {
    return {{{7, 43}, 30}, {{1100, 43}, 0}};
  }
  static std::vector<Extent> order_rows() { return {{9, 257}, {9, 9000}}; }
  // In shared memory alone, and partly read again.
  static std::vector<std::int64_t> overwritten_columns() { return {257, 5000, 120001}; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, CrossEntropy, ForStorageTypes<CudaCrossEntropyOf>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, CrossEntropyFp16, testing::Types<CudaCrossEntropyOf<fp16>>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, CrossEntropySlopes, testing::Types<CudaCrossEntropyOf<double>>);

template <class T>
using Rows = CrossEntropyRows<CudaCrossEntropyOf<T>>;

template <class T>
class CudaCrossEntropy : public testing::Test {};
TYPED_TEST_SUITE(CudaCrossEntropy, StorageTypes);

// Rows for large blocks: some fit shared memory, some do not; at aligned addresses, and at others.
TYPED_TEST(CudaCrossEntropy, LargeVocabularies) {
  using T = TypeParam;
  for (const std::int64_t cols : {8193, 50257, 70001}) {
    for (const std::int64_t gap : {cols == 50257 ? 47 : 3, 2}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
      Rows<T> t({2, cols}, gap);
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
    Rows<T> t({rows, cols}, 3);
    for (const std::int64_t r : {0, 2, 5, 6, 10}) t.targets[static_cast<std::size_t>(r)] = -1;
    t.targets[7] = 0, t.targets[8] = static_cast<std::int32_t>(cols - 1);
    double sum = kLossBefore;
    std::vector<Rows<T>> single;
    for (std::int64_t r = 0; r < rows; ++r) {
      Rows<T>& one = single.emplace_back(Extent{1, cols}, 3);
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
  Rows<float> t({1100, 70}, 2);
  t.run();
  const double loss = t.loss;
  for (const int processors : {1, 2, 7, 400}) {
    t.dlogits.fill(std::numeric_limits<double>::quiet_NaN());
    t.run_by([&](Extent extent, const kernels::CrossEntropy<float>& args) {
      cuda::Launch on = launch();
      on.multiprocessors = processors;
      cuda::cross_entropy<float>(on, extent, args);
    });
    EXPECT_EQ(t.loss, loss) << processors;
    t.expect_definition();
  }
}

// More rows than groups of them.
TEST(CudaCrossEntropyFloat, ManyRows) {
  Rows<float> t({cuda::kSumPartials + 70, 5}, 0);
  t.run();
  t.expect_definition();
}

}  // namespace
}  // namespace zg::test
