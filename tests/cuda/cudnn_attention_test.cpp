// Attention by cuDNN on a GPU against fp64, and in turn with our own kernels; elsewhere: that it says why
// not.
#include "device/cuda/cudnn_attention.hpp"

#include "support/errors.hpp"
#include "tests/cuda/harness.hpp"
#include "tests/kernels/attention_reference.hpp"

namespace zg::test {
namespace {

template <class T>
class CudnnAttention : public testing::Test {};
using Halves = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(CudnnAttention, Halves);

// cuDNN's forward feeds our backward, and ours feeds cuDNN's: o and lse mean the same to both.
template <class T>
void compare(cuda::CudnnAttention& cudnn, const AttentionShape& s, bool deterministic,
             std::uint64_t test_case) {
  SCOPED_TRACE(testing::Message() << "B " << s.batch << " T " << s.time << " heads " << s.heads << "/"
                                  << s.kv_heads << " of " << s.head_size << ", deterministic "
                                  << deterministic);
  constexpr std::int64_t kGap = 8;
  const std::int64_t rows = s.batch * s.time, width = s.heads * s.head_size;
  auto random = generator(test_case);
  Matrix<T> qkv(rows, width + 2 * s.kv_heads * s.head_size, kGap), o(rows, width, kGap),
      d_o(rows, width, kGap);
  Matrix<T> dqkv(rows, qkv.cols(), kGap);
  std::vector<float> lse(static_cast<std::size_t>(s.batch * s.heads * s.time));
  qkv.fill_normal(random), d_o.fill_normal(random);
  const cuda::CudnnProblem problem{.shape = s,
                                   .dtype = dtype_of<T>,
                                   .ld_qkv = qkv.ld(),
                                   .ld_o = o.ld(),
                                   .ld_do = d_o.ld(),
                                   .ld_dqkv = dqkv.ld(),
                                   .deterministic = deterministic};
  std::string why;
  ASSERT_TRUE(cudnn.supports(problem, &why)) << why;
  const AttentionReference want(s, qkv, d_o);
  const auto bytes =
      std::max({cudnn.forward_workspace_bytes(problem), cudnn.backward_workspace_bytes(problem),
                cuda::attention_scratch_bytes(DType::kBF16, s, true)});
  std::vector<unsigned char> workspace(static_cast<std::size_t>(bytes) + 1);
  OnDevice<T> on_qkv(qkv), on_o(o), on_do(d_o), on_dqkv(dqkv);
  OnDevice<float> on_lse(lse);
  OnDevice<unsigned char> on_workspace(workspace);
  for (const bool cudnn_first : {true, false}) {
    SCOPED_TRACE(cudnn_first ? "cuDNN's forward, our backward" : "our forward, cuDNN's backward");
    o.fill(NAN), dqkv.fill(NAN), std::fill(lse.begin(), lse.end(), NAN);
    on_o.refill(), on_dqkv.refill(), on_lse.refill();
    if (cudnn_first) {
      cudnn.forward(
          launch().stream, problem,
          {.qkv = on_qkv.data(), .o = on_o.data(), .lse = on_lse.data(), .workspace = on_workspace.data()});
      cuda::attention_backward<T>(launch(), s,
                                  {.qkv = {on_qkv.data(), qkv.ld()},
                                   .o = {on_o.data(), o.ld()},
                                   .lse = on_lse.data(),
                                   .d_o = {on_do.data(), d_o.ld()},
                                   .dqkv = {on_dqkv.data(), dqkv.ld()},
                                   .scratch = on_workspace.data()});
    } else {
      cuda::attention<T>(
          launch(), s, {.qkv = {on_qkv.data(), qkv.ld()}, .o = {on_o.data(), o.ld()}, .lse = on_lse.data()});
      cudnn.backward(launch().stream, problem,
                     {.qkv = on_qkv.data(),
                      .o = on_o.data(),
                      .lse = on_lse.data(),
                      .d_o = on_do.data(),
                      .dqkv = on_dqkv.data(),
                      .workspace = on_workspace.data()});
    }
    on_o.fetch(), on_dqkv.fetch(), on_lse.fetch();
    expect_near(o, want.o, want.o_size, want.o_bound<T>(), "o");
    expect_near(dqkv, want.dqkv, want.dqkv_size, want.dqkv_bound<T>(), "dqkv");
    for (std::size_t i = 0; i < lse.size(); ++i)
      ASSERT_NEAR(static_cast<double>(lse[i]), want.lse[i], arithmetic_error<T>() * want.worst)
          << "lse " << i;
    o.expect_gaps_intact("o"), dqkv.expect_gaps_intact("dqkv");
  }
}

TYPED_TEST(CudnnAttention, IsTheFullSoftmax) {
  std::string why;
  const auto cudnn = cuda::make_cudnn_attention(&why);
  if (cudnn == nullptr) {
    EXPECT_FALSE(why.empty());
    std::cout << "without cuDNN: " << why << "\n";
    if (is_gpu()) GTEST_SKIP() << why;
    return;
  }
  if (!is_gpu()) GTEST_SKIP() << "cuDNN is here, and takes no memory of the emulation";
  std::uint64_t test_case = 0;
  for (const bool deterministic : {true, false}) {
    compare<TypeParam>(*cudnn, {.batch = 2, .time = 256, .heads = 4, .kv_heads = 2, .head_size = 64},
                       deterministic, ++test_case);
    compare<TypeParam>(*cudnn, {.batch = 1, .time = 197, .heads = 2, .kv_heads = 2, .head_size = 128},
                       deterministic, ++test_case);
  }
  const AttentionShape odd{.batch = 1, .time = 8, .heads = 1, .kv_heads = 1, .head_size = 43};
  EXPECT_FALSE(cudnn->supports({.shape = odd, .ld_qkv = 129, .ld_o = 43, .ld_do = 43, .ld_dqkv = 129}, &why));
  EXPECT_HAS(why, "multiple of 8");
}

// Ours are graphs that the frontend knows how to build: their shapes, strides, mask and types are complete
// and agree, and the version of the library has what they need.
TEST(CudnnProblems, TheFrontendObjectsToNoneOfOurs) {
  const AttentionShape shapes[] = {
      {.batch = 32, .time = 1024, .heads = 12, .kv_heads = 12, .head_size = 64},  // GPT-2 124M
      {.batch = 8, .time = 1024, .heads = 25, .kv_heads = 25, .head_size = 64},   // GPT-2 1.5B
      {.batch = 2, .time = 2048, .heads = 32, .kv_heads = 32, .head_size = 128},  // Llama 7B
      {.batch = 1, .time = 197, .heads = 32, .kv_heads = 8, .head_size = 128},
  };
  for (const AttentionShape& s : shapes) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const bool deterministic : {true, false}) {
        const std::int64_t o = s.heads * s.head_size, qkv = o + 2 * s.kv_heads * s.head_size;
        const cuda::CudnnProblem problem{.shape = s,
                                         .dtype = dtype,
                                         .ld_qkv = qkv + 8,
                                         .ld_o = o + 16,
                                         .ld_do = o,
                                         .ld_dqkv = qkv,
                                         .deterministic = deterministic};
        try {
          for (const int capability : {80, 89, 90, 100})
            EXPECT_EQ(cuda::cudnn_objection(problem, capability), "")
                << s.heads << " heads of " << s.head_size << " on sm_" << capability;
        } catch (const Error& without_library) {
          GTEST_SKIP() << without_library.what();
        }
      }
    }
  }
  const AttentionShape odd{.batch = 1, .time = 8, .heads = 1, .kv_heads = 1, .head_size = 44};
  const cuda::CudnnProblem unfit{.shape = odd, .ld_qkv = 136, .ld_o = 48, .ld_do = 48, .ld_dqkv = 136};
  EXPECT_HAS(cuda::cudnn_objection(unfit, 90), "multiple of 8");
}

}  // namespace
}  // namespace zg::test
