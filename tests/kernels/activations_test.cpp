// Activations, sums and multiples of elements of the host.
#include "tests/kernels/activation_cases.hpp"
#include "tests/kernels/host_kernels.hpp"

namespace zg::test {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Host, Elementwise, ForStorageTypes<HostElementwise>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, ActivationSlopes, testing::Types<HostElementwise<double>>);

}  // namespace
}  // namespace zg::test
