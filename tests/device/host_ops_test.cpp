// What the host's op set does beside its results (tests/suites/ops_test.cpp): order, and refusals.
#include <gtest/gtest.h>

#include <vector>

#include "ziggurat/device/ops.hpp"

namespace zg::test {
namespace {

TEST(HostOpsOrder, OpsOfAStreamRunInOrder) {
  std::vector<float> x(1000, 1.0f);
  const View v(x.data(), DType::kF32, 1, 1000);
  HostStream stream("order", HostStream::Mode::kThread);
  for (int i = 0; i < 10; ++i) host_ops().add(stream, v, v, v);
  stream.synchronize();
  for (const float value : x) ASSERT_EQ(value, 1024.0f);
}

class HostOpsDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  float f_[64] = {};
  double d_[64] = {};
  HostStream stream_{"death", HostStream::Mode::kInline};
};

TEST_F(HostOpsDeathTest, WrongOperandsAreNamed) {
  const View x(f_, DType::kF32, 4, 4), narrow(f_, DType::kF32, 4, 3), wide(d_, DType::kF64, 4, 4);
  EXPECT_DEATH(host_ops().gelu(stream_, x, narrow), "y is f32 \\[4, 3\\], expected f32 \\[4, 4\\]");
  EXPECT_DEATH(host_ops().add(stream_, x, wide, x), "b is f64 \\[4, 4\\], expected f32");
  EXPECT_DEATH(host_ops().add(stream_, x, View(nullptr, DType::kF32, 4, 4), x), "b is null");
  EXPECT_DEATH(host_ops().zero(stream_, View(f_, DType::kF32, 4, 4, 3)), "4 elements, 3 apart");
  EXPECT_DEATH(host_ops().gelu(stream_, View(f_, DType::kU16, 1, 4), View(f_, DType::kU16, 1, 4)),
               "no kernel for u16");
  EXPECT_DEATH(host_ops().gemm(stream_, x, x, x, {.accumulate = true, .bias = View(f_, DType::kF32, 1, 4)}),
               "bias");
  const View close(f_, DType::kF32, 1, 4, 2), row(f_, DType::kF32, 1, 4), other(f_ + 16, DType::kF32, 1, 4);
  EXPECT_DEATH(host_ops().gemm(stream_, row, x, row, {.addend = close}), "v.ld");
  EXPECT_DEATH(host_ops().gemm(stream_, row, x, other, {.bias_gradient = other, .scratch = x}), "weight");
  EXPECT_DEATH(
      host_ops().gemm(stream_, x, x, x, {.a = Trans::kYes, .bias_gradient = other, .scratch = narrow}),
      "scratch");
  EXPECT_DEATH(host_ops().update(stream_, x, x, {.master = x, .moment = {x, wide}, .scale = {}}, {}, {}),
               "a moment is f64, expected f32");
}

}  // namespace
}  // namespace zg::test
