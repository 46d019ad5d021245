// Routers and experts' rows of the host.
#include "tests/kernels/expert_cases.hpp"
#include "tests/kernels/host_kernels.hpp"
#include "tests/kernels/router_backward_cases.hpp"

namespace zg::test {
namespace {

template <class T>
struct HostRouter : Host<T> {
  template <class A>
  using Of = HostRouter<A>;
};
using RoutedTypes = testing::Types<HostRouter<float>, HostRouter<double>>;  // those of logits
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Routing, RoutedTypes);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, SlotSorting, testing::Types<HostKernels>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, RouterSlopes, testing::Types<HostRouter<double>>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, RouterGradients, ForStorageTypes<HostRouter>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, ExpertRows, ForStorageTypes<HostElementwise>);

}  // namespace
}  // namespace zg::test
