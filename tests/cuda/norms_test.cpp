// LayerNorm, RMSNorm and column sums of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/norm_cases.hpp"

namespace zg::test {
namespace {

using cuda::kRowGroups;

template <class T>
struct CudaNorms : Cuda<T> {
  static constexpr std::int64_t kPack = Cuda<T>::kPack;
  // The longest chain of additions in a sum over a row: a thread adds up to 64 elements of a row that is
  // held, and its 512th part of a longer one, in packs of 8 at most; two sums over 32 lanes follow.
  static double row_roundings(std::int64_t cols) { return 64 + static_cast<double>(cols) / 512 + 8 + 10; }
  // 46 rows of a group in 8 slices, 256 groups in 8: chains of 6 + 8 + 32 + 8 and the last.
  static constexpr double kRoundingsOfManyRows = 55;
  // Rows of one warp, of teams of 2 to 16, with more packs to a thread, and longer than what is held; with
  // and without a rest behind the last pack.
  static std::vector<Extent> forward_shapes() {
    std::vector<Extent> all;
    for (const std::int64_t cols :
         {std::int64_t{1}, std::int64_t{3}, std::int64_t{43}, kPack, 96 * kPack, 130 * kPack + 1, 257 * kPack,
          520 * kPack, 1030 * kPack, 1500 * kPack + 1, 2050 * kPack, 4100 * kPack + 1}) {
      all.push_back({cols > 1000 ? 2 : 5, cols});
    }
    return all;
  }
  static std::vector<Extent> backward_shapes() { return forward_shapes(); }
  // Narrow rows, which a group's teams share, and wide ones, one after the other.
  static std::vector<Extent> many_rows() { return {{kRowGroups + 301, 3}, {kRowGroups + 41, 520 * kPack}}; }
  static std::vector<Extent> order_shapes() { return {{3, 43}, {3, 1500}}; }
  static std::vector<Extent> bias_shapes() {
    std::vector<Extent> all{{300, 1}, {300, 43}};
    for (const std::int64_t cols : {1, 43, 264, 515})
      all.insert(all.end(), {{0, cols}, {1, cols}, {37, cols}});
    return all;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Norms, ForStorageTypes<CudaNorms>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, NormSlopes, testing::Types<CudaNorms<double>>);

// More rows to a group than it has teams, and rows that are not held.
TEST(CudaNormsOfFloats, BackwardOfMoreRowsThanTeams) {
  NormCase<CudaNorms<float>> narrow({17 * kRowGroups + 1, 2}, {}, true);
  expect_backward(narrow);
  NormCase<CudaNorms<float>> longer({kRowGroups + 2, 2050 * 4 + 1}, {}, true);
  expect_backward(longer);
}

}  // namespace
}  // namespace zg::test
