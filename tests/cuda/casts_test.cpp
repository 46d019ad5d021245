// Casts of CUDA.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/cast_cases.hpp"

namespace zg::test {
namespace {

struct CudaCasting : CudaKernels {
  static constexpr bool kExactNans = false;
  template <class In, class Out>
  static void finish_gradient(std::int64_t n, const In* in, Out* out, double* norm_sq, double* scratch) {
    cuda::Launch on = launch();
    if (processors > 0) on.multiprocessors = processors;
    cuda::finish_gradient<In, Out>(on, n, in, out, norm_sq, scratch);
  }
  // On a GPU of another size, too.
  static void for_each_order(const std::function<void()>& body) {
    processors = 7;
    CudaKernels::for_each_order(body);
    processors = 0;
  }
  static inline int processors = 0;  // if not the device's own
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Casts, testing::Types<CudaCasting>);
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, FinishGradient, testing::Types<CudaCasting>);

// More tiles than there are partial sums.
TEST(CudaFinishGradient, ManyElements) {
  const std::int64_t n = cuda::kSumPartials * 4096 + 5 * 4096 + 3;
  std::vector<float> in(static_cast<std::size_t>(n), 1.0f);
  in.back() = 2;
  std::vector<bf16> out;
  EXPECT_EQ(finish<CudaCasting>(in, out), 0.5 + static_cast<double>(n) + 3);
  EXPECT_TRUE(std::all_of(out.begin(), out.end() - 1, [](bf16 v) { return static_cast<float>(v) == 1; }));
  EXPECT_EQ(value_of(out.back()), 2);
}

}  // namespace
}  // namespace zg::test
