// LayerNorm, RMSNorm and column sums of the host.
#include "tests/kernels/host_kernels.hpp"
#include "tests/kernels/norm_cases.hpp"

namespace zg::test {
namespace {

std::vector<Extent> extents(std::initializer_list<std::int64_t> rows, const auto& columns) {
  std::vector<Extent> all;
  for (const std::int64_t r : rows) {
    for (const std::int64_t c : columns) all.push_back({r, c});
  }
  return all;
}

template <class T>
struct HostNorms : Host<T> {
  static double row_roundings(std::int64_t cols) { return static_cast<double>(cols); }
  // The rows of a group, the groups, and what was there.
  static constexpr double kRoundingsOfManyRows = 46 + host::kRowGroups + 1;
  static std::vector<Extent> forward_shapes() { return extents({1, 7}, kWidths); }
  static std::vector<Extent> backward_shapes() { return extents({1, 7, 71}, kWidths); }
  static std::vector<Extent> many_rows() { return {{3 * host::kRowGroups + 5, 43}}; }
  static std::vector<Extent> order_shapes() { return {{131, 257}}; }
  static std::vector<Extent> bias_shapes() {
    return extents({0, 1, 31, 33, 101}, std::vector<std::int64_t>{1, 43, 257, 2500});
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Norms, ForStorageTypes<HostNorms>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, NormSlopes, testing::Types<HostNorms<double>>);

}  // namespace
}  // namespace zg::test
