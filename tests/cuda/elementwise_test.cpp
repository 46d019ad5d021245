// Activations, sums and multiples of elements of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/activation_cases.hpp"

namespace zg::test {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Elementwise, ForStorageTypes<CudaElementwise>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, ActivationSlopes, testing::Types<CudaElementwise<double>>);

}  // namespace
}  // namespace zg::test
