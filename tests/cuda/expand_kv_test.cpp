// Keys and values of latent attention have the host's bits, in packs and not.
#include "kernels/host/matrix.hpp"
#include "tests/cuda/cuda_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaExpandKv : public testing::Test {};
TYPED_TEST_SUITE(CudaExpandKv, StorageTypes);

template <class T>
void expect_same_bits(Operand<T>& got, Operand<T>& expected, const char* what) {
  got.fetch(what);
  for (std::int64_t r = 0; r < got.rows(); ++r) {
    for (std::int64_t c = 0; c < got.cols(); ++c) {
      ASSERT_EQ(std::memcmp(&got.at(r, c), &expected.at(r, c), sizeof(T)), 0)
          << what << " " << r << ", " << c << ": " << got(r, c) << " and " << expected(r, c);
    }
  }
}

TYPED_TEST(CudaExpandKv, HasTheBitsOfTheHost) {
  using T = TypeParam;
  constexpr std::int64_t kRows = 7;
  auto random = generator(4);
  for (const LatentHeads& n :
       {LatentHeads{3, 5, 2, 7}, LatentHeads{5, 16, 8, 24}, LatentHeads{2, 128, 64, 128},
        LatentHeads{1, 8, 16, 8}, LatentHeads{9, 8, 6, 8}}) {
    for (const Layout layout : CudaKernels::kLayouts) {
      SCOPED_TRACE(testing::Message() << n.heads << " heads of " << n.plain << " + " << n.shared << ", "
                                      << n.value << ", " << layout);
      Operand<T> joint(kRows, n.joint_columns(), layout), shared(kRows, n.shared, layout);
      Operand<T> kv(kRows, n.kv_columns(), layout), expected_kv(kRows, n.kv_columns(), layout);
      joint.fill_normal(random), shared.fill_normal(random);
      host::expand_kv<T>(kRows, {n, joint.host_view(), shared.host_view(), expected_kv.host_view()});
      joint.send(), shared.send(), kv.send();
      cuda::expand_kv<T>(launch(), kRows, {n, joint.read(), shared.read(), kv.view()});
      expect_same_bits(kv, expected_kv, "kv");

      Operand<T> dkv(kRows, n.kv_columns(), layout), d_joint(kRows, n.joint_columns(), layout),
          d_shared(kRows, n.shared, layout);
      Operand<T> expected_joint(kRows, n.joint_columns(), layout), expected_shared(kRows, n.shared, layout);
      dkv.fill_normal(random);
      host::expand_kv_backward<T>(
          kRows, {n, dkv.host_view(), expected_joint.host_view(), expected_shared.host_view()});
      dkv.send(), d_joint.send(), d_shared.send();
      cuda::expand_kv_backward<T>(launch(), kRows, {n, dkv.read(), d_joint.view(), d_shared.view()});
      expect_same_bits(d_joint, expected_joint, "d_joint");
      expect_same_bits(d_shared, expected_shared, "d_shared");
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace zg::test
