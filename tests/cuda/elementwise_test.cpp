// Activations, sums and multiples of elements of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/activation_cases.hpp"

namespace zg::test {
namespace {

template <class T>
struct CudaElementwise : Cuda<T> {
  // Less than a pack, packs with and without a rest, more than one block.
  static std::vector<std::int64_t> columns() { return {1, 7, 8, 43, 256, 257, 4104}; }
  static constexpr double kLargestExponent = 87;
  // CUDA states 2 + 1.173 |x| units in the last place for __expf, which are twice as many roundings; the
  // argument is rounded up to five times and stands in the exponent; __fdividef has two units; a handful of
  // roundings follow. (For arguments beyond 87 the result is below 1e-37.)
  static double sigmoid_roundings(double argument) {
    return 20 + 8 * std::min(std::abs(argument), kLargestExponent);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Elementwise, ForStorageTypes<CudaElementwise>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, ActivationSlopes, testing::Types<CudaElementwise<double>>);

}  // namespace
}  // namespace zg::test
