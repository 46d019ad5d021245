// Softmax cross entropy of the host.
#include "tests/kernels/cross_entropy_cases.hpp"
#include "tests/kernels/host_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
struct HostCrossEntropy : Host<T> {
  // A logit less the largest is rounded once and is the exponent: up to 200 units. The sum adds at most 1024
  // terms in A before it goes to double. exp and the products cost a handful. tanh has 4 units in the last
  // place, which are 8 roundings of at most the cap in the exponent, and the derivative 1 - tanh^2 errs by as
  // many of 1.
  static double roundings(std::int64_t, double cap) { return 1024 + (cap == 0 ? 200 + 8 : 16 * cap + 32); }
  static double roundings_of_parts(std::int64_t, double cap) { return 1024 + 200 + 16 * cap + 32; }
  static std::vector<std::int64_t> capped_columns() { return {1, 43, 257, 5000}; }
  static std::vector<std::pair<Extent, double>> extents_and_caps_of_parts() {
    return {{{7, 257}, 0}, {{7, 257}, 30}};
  }
  static std::vector<Extent> order_rows() { return {{601, 43}}; }
  static std::vector<std::int64_t> overwritten_columns() { return {257}; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, CrossEntropy, ForStorageTypes<HostCrossEntropy>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, CrossEntropyFp16, testing::Types<HostCrossEntropy<fp16>>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, CrossEntropySlopes, testing::Types<HostCrossEntropy<double>>);

// The one part of all tokens, where gradients are as wide as logits.
template <class T>
void expect_part_overwrites_logits() {
  for (const double cap : {0.0, 5.0}) {
    CrossEntropyRows<HostCrossEntropy<T>> t({5, 257}, 0);
    t.softcap = cap;
    Matrix<T> shared = t.logits;
    t.run();
    double loss = 0;
    std::vector<T> numbers(15);
    host::softmax_part<T>({5, 257}, {shared, t.targets.data(), 0, numbers.data(), cap});
    host::cross_entropy_part<T>({5, 257}, {.local = {.logits = shared,
                                                     .targets = t.targets.data(),
                                                     .loss_sum = &loss,
                                                     .dlogits = shared,
                                                     .softcap = cap},
                                           .numbers = numbers.data()});
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < 257; ++c)
        ASSERT_NEAR(shared.get(r, c), t.dlogits.get(r, c), 1e3 * unit_roundoff<T>()) << r << ", " << c;
    }
  }
}
TEST(HostCrossEntropy, GradientOfOnePartMayOverwriteLogits) {
  expect_part_overwrites_logits<float>(), expect_part_overwrites_logits<double>();
}

TEST(CrossEntropyDeathTest, TargetOutsideTheVocabulary) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  CrossEntropyRows<HostCrossEntropy<float>> t({1, 43}, 0);
  t.targets[0] = 43;
  EXPECT_DEATH(t.run(), "43 against 43");
}

}  // namespace
}  // namespace zg::test
