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

TEST_F(HostOpsDeathTest, RoutersThatCannotChoose) {
  std::int32_t ids[16] = {};
  const View logits(f_, DType::kF32, 2, 4), weights(f_ + 8, DType::kF32, 2, 2),
      chosen(ids, DType::kI32, 2, 2);
  const auto route = [&](const RouterRule& rule) {
    host_ops().route(stream_, {.logits = logits, .rule = rule, .chosen = chosen, .weights = weights});
  };
  route({.per_token = 2});
  EXPECT_DEATH(route({.per_token = 5}), "5 experts a token");
  EXPECT_DEATH(route({.per_token = 1}), "chosen is i32 \\[2, 2\\], expected i32 \\[2, 1\\]");
  EXPECT_DEATH(route({.per_token = 2, .groups = 3}), "3 groups of 4 experts");
  EXPECT_DEATH(route({.per_token = 2, .groups = 2, .kept_groups = 3}), "3 of 2 groups");
  EXPECT_DEATH(route({.per_token = 2, .groups = 4, .kept_groups = 2}), "the two largest of 1 experts");
  EXPECT_DEATH(route({.per_token = 2, .groups = 4, .kept_groups = 1, .group_score = GroupScore::kLargest}),
               "2 experts a token, of 1 groups of 1");
  EXPECT_DEATH(route({.per_token = 2, .scale = 0}), "a scale of 0");
  const View sums(f_ + 16, DType::kF32, 1, 9), parts(f_ + 16, DType::kF32, 3, 9), x(f_, DType::kF32, 2, 4);
  EXPECT_DEATH(host_ops().router_sums(
                   stream_, {.logits = logits, .chosen = chosen, .rule = {.per_token = 2}, .sums = sums}),
               "scratch");
  EXPECT_DEATH(host_ops().router_sums(
                   stream_, {.logits = logits, .chosen = chosen, .rule = {.per_token = 2}, .sums = parts}),
               "3 parts of 2 tokens");
  EXPECT_DEATH(host_ops().sort_slots(stream_, {.chosen = chosen,
                                               .starts = View(ids, DType::kI32, 1, 2),
                                               .order = View(ids, DType::kI32, 1, 4)}),
               "2 of 1 experts a token");
  EXPECT_DEATH(host_ops().gather_rows(
                   stream_, {.x = x, .order = View(ids, DType::kI32, 1, 3), .per_token = 2, .y = x}),
               "order is i32 \\[1, 3\\], expected i32 \\[1, 2\\]");
  EXPECT_DEATH(host_ops().expert_gate(
                   stream_, {.gate_up = x, .order = chosen.row_range(0, 1), .weights = weights, .y = x}),
               "y is f32 \\[2, 4\\], expected f32 \\[2, 2\\]");
}

}  // namespace
}  // namespace zg::test
