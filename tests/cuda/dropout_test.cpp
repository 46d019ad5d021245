// Dropout leaves out the same, and gives the same bits, as on the host.
#include "tests/cuda/cuda_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaDropout : public testing::Test {};
TYPED_TEST_SUITE(CudaDropout, StorageTypes);

template <class T>
void expect_bits_of_the_host(Extent extent, Layout layout, const Dropout& d, bool in_place) {
  SCOPED_TRACE(testing::Message() << extent.rows << " x " << extent.cols << ", " << layout << ", rate "
                                  << d.rate << ", first row " << d.first_row
                                  << (in_place ? ", in place" : ""));
  Operand<T> x(extent.rows, extent.cols, layout), y(extent.rows, extent.cols, layout),
      expected(extent.rows, extent.cols, layout);
  auto random = generator(1);
  x.fill_normal(random);
  host::dropout<T>(extent, x.host_view(), d, expected.host_view());
  x.send(), y.send();
  Operand<T>& out = in_place ? x : y;
  cuda::dropout<T>(launch(), extent, x.read(), d, out.view());
  out.fetch("y");
  for (std::int64_t r = 0; r < extent.rows; ++r) {
    for (std::int64_t c = 0; c < extent.cols; ++c) {
      ASSERT_EQ(std::memcmp(&out.at(r, c), &expected.at(r, c), sizeof(T)), 0)
          << r << ", " << c << ": " << out(r, c) << " and " << expected(r, c);
    }
  }
}

TYPED_TEST(CudaDropout, HasTheBitsOfTheHost) {
  // Columns that end rows in the middle of a block of Philox, of a pack, and of neither.
  for (const std::int64_t cols : {1, 2, 4, 12, 43, 64, 1026, 4104}) {
    for (const Layout layout : CudaKernels::kLayouts) {
      const Dropout d{
          .rate = 0.1, .key = {{0xdeadbeefu, 17}}, .step = 3, .positions = {4, 7, 30}, .first_row = 2};
      for (const bool in_place : {false, true}) {
        expect_bits_of_the_host<TypeParam>({5, cols}, layout, d, in_place);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(CudaDropout, HasTheBitsOfTheHostForAllParameters) {
  for (const std::int64_t first : {1, 2, 3, 4, 43, 1024}) {
    const Dropout d{.rate = 0.3, .key = {{7, 1}}, .positions = {3, 3, 3}, .first_column = first};
    expect_bits_of_the_host<TypeParam>({3, 72}, {}, d, false);
    expect_bits_of_the_host<TypeParam>({3, 43}, {8, 0}, d, true);
    if (testing::Test::HasFatalFailure()) return;
  }
  for (const double rate : {0.0, 0.1, 1.0 / 3, 0.5, 0.999, 1 - 0x1p-53}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{5}, (std::int64_t{1} << 32) - 8}) {
      for (const std::int64_t step : {std::int64_t{0}, std::int64_t{0xfedc'ba98}}) {
        const Dropout d{.rate = rate,
                        .key = {{7, 0x80000001u}},
                        .step = step,
                        .positions = {2, 1 << 23, 1 << 24},
                        .first_row = 1,
                        .first_sequence = first};
        expect_bits_of_the_host<TypeParam>({3, 72}, {}, d, false);
        expect_bits_of_the_host<TypeParam>({3, 72}, {8, 0}, d, false);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(CudaDropout, WhatIsLeftOutIsZero) {
  using T = TypeParam;
  Operand<T> x(1, 64), y(1, 64);
  x.fill(NAN).send(), y.fill(1).send();
  const Dropout d{.rate = 0.5};
  cuda::dropout<T>(launch(), {1, 64}, x.read(), d, y.view());
  y.fetch("y");
  std::int64_t zeros = 0;
  for (std::int64_t c = 0; c < 64; ++c) {
    EXPECT_TRUE(y(0, c) == 0 || std::isnan(y(0, c)));
    zeros += y(0, c) == 0 ? 1 : 0;
  }
  EXPECT_GT(zeros, 0);
  EXPECT_LT(zeros, 64);
}

}  // namespace
}  // namespace zg::test
