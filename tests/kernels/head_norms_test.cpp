// RMSNorm of heads, of the host.
#include "tests/kernels/head_norm_cases.hpp"
#include "tests/kernels/host_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
struct HostHeadNorms : Host<T> {
  static double row_roundings(std::int64_t size) { return static_cast<double>(size); }
  static constexpr bool kHeadsAddAsRows = true;
  static std::vector<HeadNormShape> head_shapes() {
    std::vector<HeadNormShape> all;
    for (const std::int64_t more : {0, 9}) {
      for (const HeadNormShape& s : {HeadNormShape{1, 1, 1}, HeadNormShape{7, 3, 5}, HeadNormShape{71, 5, 12},
                                     HeadNormShape{9, 2, 129}, HeadNormShape{40, 1, 257}})
        all.push_back({s.rows, s.heads, s.size, s.weight, more});
    }
    return all;
  }
  static std::vector<HeadNormShape> order_heads() { return {{131, 3, 43, NormWeight::kPlusOne}}; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, HeadNorms, ForStorageTypes<HostHeadNorms>);
INSTANTIATE_TYPED_TEST_SUITE_P(Host, HeadNormSlopes, testing::Types<HostHeadNorms<double>>);

}  // namespace
}  // namespace zg::test
