// Routers and experts' rows of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/expert_cases.hpp"
#include "tests/kernels/router_backward_cases.hpp"

namespace zg::test {
namespace {

template <class T>
struct CudaRouter : Cuda<T> {
  template <class A>
  using Of = CudaRouter<A>;
};
using RoutedTypes = testing::Types<CudaRouter<float>, CudaRouter<double>>;  // those of logits
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Routing, RoutedTypes);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, SlotSorting, testing::Types<CudaKernels>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, RouterSlopes, testing::Types<CudaRouter<double>>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, RouterGradients, ForStorageTypes<CudaRouter>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, ExpertRows, ForStorageTypes<CudaElementwise>);

}  // namespace
}  // namespace zg::test
