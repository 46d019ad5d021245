// Activations, sums and multiples of elements of the host.
#include "tests/kernels/activation_cases.hpp"
#include "tests/kernels/host_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
struct HostElementwise : Host<T> {
  static std::vector<std::int64_t> columns() { return {std::begin(kWidths), std::end(kWidths)}; }
  static constexpr double kLargestExponent = 88;
  // Highway states 1 ulp for exp; its argument is rounded four times and stands in the exponent, so it errs
  // by 4 units of itself; a handful of roundings follow. (For arguments beyond 88 the result is below 1e-36.)
  static double sigmoid_roundings(double argument) {
    return 16 + 8 * std::min(std::abs(argument), kLargestExponent);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Elementwise, ForStorageTypes<HostElementwise>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, ActivationSlopes, testing::Types<HostElementwise<double>>);

}  // namespace
}  // namespace zg::test
