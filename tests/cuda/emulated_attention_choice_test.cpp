// Which attention is used for which shape, and what is said where one that must be cannot.
#include <gtest/gtest.h>

#include <vector>

#include "device/cuda/attention.hpp"
#include "support/errors.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {
namespace {

using cuda::Attention;
using cuda::CudnnProblem;

constexpr AttentionShape kSmall{.batch = 1, .time = 8, .heads = 2, .kv_heads = 1, .head_size = 8};
constexpr AttentionShape kOdd{.batch = 1, .time = 8, .heads = 2, .kv_heads = 2, .head_size = 7};

// Takes head sizes that are multiples of 8, and notes what it is asked to do.
class FakeCudnn : public cuda::CudnnAttention {
 public:
  struct Log {
    int asked = 0, forward = 0, backward = 0;
    CudnnProblem last;
  };
  explicit FakeCudnn(Log& log) : log_(log) {}
  std::int64_t version() const override { return 91900; }
  bool supports(const CudnnProblem& p, std::string* why) override {
    ++log_.asked;
    if (p.shape.head_size % 8 == 0) return true;
    *why = "heads of no such size";
    return false;
  }
  std::int64_t forward_workspace_bytes(const CudnnProblem&) override { return 1000; }
  std::int64_t backward_workspace_bytes(const CudnnProblem&) override { return 5000; }
  void forward(cuda::StreamHandle, const CudnnProblem& p, const cuda::CudnnForward&) override {
    ++log_.forward;
    log_.last = p;
  }
  void backward(cuda::StreamHandle, const CudnnProblem& p, const cuda::CudnnBackward&) override {
    ++log_.backward;
    log_.last = p;
  }

 private:
  Log& log_;
};

TEST(CudaAttentionChoice, CudnnTakesWhatItCanAndOursTheRest) {
  FakeCudnn::Log log;
  Attention attention(AttentionKernel::kAuto, false, std::make_unique<FakeCudnn>(log), "");
  EXPECT_EQ(attention.scratch_bytes(DType::kBF16, kSmall), 5000) << "the larger of the two";
  EXPECT_EQ(attention.scratch_bytes(DType::kF32, kSmall),
            cuda::attention_scratch_bytes(DType::kF32, kSmall, false));
  EXPECT_EQ(attention.scratch_bytes(DType::kBF16, kOdd),
            cuda::attention_scratch_bytes(DType::kBF16, kOdd, false));
  // Rows with gaps are told as they are; that a shape is taken was decided before.
  std::vector<bf16> qkv(8 * 40), o(8 * 24);
  std::vector<float> lse(16);
  const int asked = log.asked;
  attention.forward<bf16>({}, kSmall, {.qkv = {qkv.data(), 40}, .o = {o.data(), 24}, .lse = lse.data()});
  EXPECT_EQ(log.forward, 1);
  EXPECT_EQ(log.last.ld_qkv, 40);
  EXPECT_EQ(log.last.ld_o, 24);
  attention.backward<bf16>({}, kSmall,
                           {.qkv = {qkv.data(), 40},
                            .o = {o.data(), 24},
                            .lse = lse.data(),
                            .d_o = {o.data(), 24},
                            .dqkv = {qkv.data(), 40}});
  EXPECT_EQ(log.backward, 1);
  EXPECT_EQ(log.last.ld_dqkv, 40);
  EXPECT_FALSE(log.last.deterministic);
  EXPECT_EQ(log.asked, asked) << "planning takes cuDNN a second";
  EXPECT_HAS(attention.describe(), "9.19.0");
}

TEST(CudaAttentionChoice, OursIsOursAlone) {
  Attention attention(AttentionKernel::kOwn, false);
  EXPECT_EQ(attention.scratch_bytes(DType::kBF16, kSmall),
            cuda::attention_scratch_bytes(DType::kBF16, kSmall, false));
  EXPECT_EQ(attention.describe(), "own attention");
}

// What cuDNN is not asked for is ours, with our scratch memory; a scale alone is cuDNN's, too.
TEST(CudaAttentionChoice, WindowsCapsAndDocumentsAreOurs) {
  FakeCudnn::Log log;
  Attention attention(AttentionKernel::kAuto, false, std::make_unique<FakeCudnn>(log), "");
  AttentionShape window = kSmall, cap = kSmall, documents = kSmall, scale = kSmall;
  window.rule.window = 3, cap.rule.softcap = 2, documents.documents = true, scale.rule.scale = 0.5;
  for (const AttentionShape& shape : {window, cap, documents}) {
    EXPECT_EQ(attention.scratch_bytes(DType::kBF16, shape),
              cuda::attention_scratch_bytes(DType::kBF16, shape, false));
  }
  EXPECT_EQ(log.asked, 0);
  EXPECT_EQ(attention.scratch_bytes(DType::kBF16, scale), 5000);
  EXPECT_EQ(attention.scratch_bytes(DType::kBF16, kSmall), 5000);
  Attention must(AttentionKernel::kCudnn, false, std::make_unique<FakeCudnn>(log), "");
  EXPECT_HAS(error_of([&] { (void)must.scratch_bytes(DType::kBF16, window); }).message(), "a window of 3");
  EXPECT_HAS(error_of([&] { (void)must.scratch_bytes(DType::kBF16, cap); }).message(), "capped at 2");
  EXPECT_HAS(error_of([&] { (void)must.scratch_bytes(DType::kBF16, documents); }).message(), "documents");
}

// In a deterministic run nobody looks for cuDNN unless it is named. Whoever asked for "auto" is told why.
TEST(CudaAttentionChoice, DeterministicRunsTakeOurs) {
  const std::string told = Attention(AttentionKernel::kAuto, true).describe();
  EXPECT_HAS(told, "own attention (results are deterministic");
}

TEST(CudaAttentionChoice, WhereCudnnIsMissingTheReasonIsTold) {
  Attention attention(AttentionKernel::kAuto, false, nullptr, "libcudnn.so.9 cannot be loaded");
  EXPECT_EQ(attention.describe(), "own attention (libcudnn.so.9 cannot be loaded)");
  // Here, where there is no GPU, whatever was built.
  std::string why;
  if (cuda::make_cudnn_attention(&why) == nullptr) {
    EXPECT_EQ(Attention(AttentionKernel::kAuto, false).describe(), "own attention (" + why + ")");
  }
}

TEST(CudaAttentionChoice, WhatMustBeCudnnIsOrTheRunEnds) {
  FakeCudnn::Log log;
  Attention attention(AttentionKernel::kCudnn, true, std::make_unique<FakeCudnn>(log), "");
  EXPECT_EQ(attention.scratch_bytes(DType::kF16, kSmall), 5000);
  const Error e = error_of([&] { (void)attention.scratch_bytes(DType::kF16, kOdd); });
  EXPECT_EQ(e.where(), "cuda.attention");
  EXPECT_HAS(e.message(), "heads of no such size");
  EXPECT_HAS(e.hint(), "own");
}

}  // namespace
}  // namespace zg::test
