// RMSNorm of heads, of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/head_norm_cases.hpp"

namespace zg::test {
namespace {

template <class T>
struct CudaHeadNorms : Cuda<T> {
  static constexpr std::int64_t kPack = Cuda<T>::kPack;
  // What a thread adds, and two sums over 32 lanes.
  static double row_roundings(std::int64_t size) { return 64 + static_cast<double>(size) / 512 + 8 + 10; }
  static constexpr bool kHeadsAddAsRows = false;  // the backward has teams of another size
  static std::vector<HeadNormShape> head_shapes() {
    constexpr NormWeight kWeight = NormWeight::kPlain;
    return {{1, 1, 1, kWeight, 2 * kPack},   {7, 3, 5, kWeight, 2 * kPack}, {5, 4, 64, kWeight, 2 * kPack},
            {3, 2, 129, kWeight, 2 * kPack}, {2, 1, 2050 * kPack},          {2, 2, 4100 * kPack + 1}};
  }
  static std::vector<HeadNormShape> order_heads() { return {{5, 3, 43, NormWeight::kPlusOne}, {3, 2, 64}}; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, HeadNorms, ForStorageTypes<CudaHeadNorms>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, HeadNormSlopes, testing::Types<CudaHeadNorms<double>>);

}  // namespace
}  // namespace zg::test
