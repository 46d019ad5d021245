// Elementwise kernels against fp64 formulae.
#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaElementwise : public testing::Test {};
TYPED_TEST_SUITE(CudaElementwise, StorageTypes);

TYPED_TEST(CudaElementwise, AddsRows) {
  using T = TypeParam;
  auto random = generator(1);
  for (const std::int64_t cols : {1, 8, 43, 256, 257}) {
    for (const std::int64_t gap : {0, 3, 8}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
      Matrix<T> a(5, cols, gap), b(5, cols, gap), out(5, cols, gap);
      a.fill_normal(random), b.fill_normal(random), out.fill(NAN);
      OnDevice<T> da(a), db(b), d_out(out);
      cuda::add<T>(launch(), {5, cols}, da, db, d_out);
      d_out.fetch();
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const double sum = a.get(r, c) + b.get(r, c);
          ASSERT_NEAR(out.get(r, c), sum, bound<T>(sum, 1, std::abs(sum)));
        }
      }
      out.expect_gaps_intact("out");
    }
  }
}

}  // namespace
}  // namespace zg::test
