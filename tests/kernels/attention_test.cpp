// Attention against plain double references, and against finite differences.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/host/matrix.hpp"
#include "tests/kernels/attention_reference.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kGap = 5;  // columns between rows that nobody may touch

// Everything of one call. The inputs are the same for the same shape.
template <class T>
struct Problem {
  explicit Problem(const AttentionShape& s)
      : shape(s),
        qkv(s.batch * s.time, s.qkv_columns(), kGap),
        o(s.batch * s.time, s.result_columns(), kGap),
        d_o(o.rows(), o.cols(), kGap),
        dqkv(qkv.rows(), qkv.cols(), kGap),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.time)) {
    auto random = generator();
    qkv.fill_normal(random, 0, 1.5), d_o.fill_normal(random);
    o.fill(NAN), dqkv.fill(NAN);
  }
  void forward() {
    host::attention<T>(shape, {.qkv = {qkv.data(), qkv.ld()}, .o = {o.data(), o.ld()}, .lse = lse.data()});
  }
  void backward() {
    host::attention_backward<T>(shape, {.qkv = {qkv.data(), qkv.ld()},
                                        .o = {o.data(), o.ld()},
                                        .lse = lse.data(),
                                        .d_o = {d_o.data(), d_o.ld()},
                                        .dqkv = {dqkv.data(), dqkv.ld()}});
  }
  AttentionShape shape;
  Matrix<T> qkv, o, d_o, dqkv;
  std::vector<Acc<T>> lse;
};

template <class T>
void compare_with_reference(const AttentionShape& shape) {
  SCOPED_TRACE("B=" + std::to_string(shape.batch) + " T=" + std::to_string(shape.time) +
               " H=" + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) +
               " d=" + std::to_string(shape.head_size) + "/" + std::to_string(shape.values()));
  Problem<T> x(shape);
  x.forward();
  x.backward();
  const AttentionReference want(shape, x.qkv, x.d_o);
  // Probabilities are not rounded to T here, as they are on tensor cores.
  const double arithmetic = unit_roundoff<Acc<T>>(), relative = arithmetic * (want.worst + want.terms);
  expect_near(x.o, want.o, want.o_size, relative, "o");
  for (std::size_t i = 0; i < x.lse.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(x.lse[i]), want.lse[i], arithmetic * want.worst) << "lse " << i;
  }
  // The gradient of a score uses the stored o, which was rounded to T.
  expect_near(x.dqkv, want.dqkv, want.dqkv_size, relative + unit_roundoff<T>(), "dqkv");
  x.o.expect_gaps_intact("o"), x.dqkv.expect_gaps_intact("dqkv");
}

const AttentionShape kShapes[] = {
    {.batch = 2, .time = 1, .heads = 3, .kv_heads = 3, .head_size = 22},
    {.batch = 2, .time = 7, .heads = 2, .kv_heads = 1, .head_size = 43},
    {.batch = 1, .time = 64, .heads = 2, .kv_heads = 2, .head_size = 64},
    {.batch = 2, .time = 65, .heads = 6, .kv_heads = 2, .head_size = 22},
    {.batch = 1, .time = 200, .heads = 4, .kv_heads = 2, .head_size = 64},
    {.batch = 1, .time = 200, .heads = 3, .kv_heads = 1, .head_size = 43},
    {.batch = 1, .time = 333, .heads = 2, .kv_heads = 2, .head_size = 1},
    {.batch = 1, .time = 300, .heads = 1, .kv_heads = 1, .head_size = 128},
    // Values of another size than queries and keys.
    {.batch = 2, .time = 7, .heads = 4, .kv_heads = 2, .head_size = 43, .value_size = 22},
    {.batch = 2, .time = 65, .heads = 2, .kv_heads = 1, .head_size = 22, .value_size = 70},
    {.batch = 1, .time = 200, .heads = 2, .kv_heads = 2, .head_size = 192, .value_size = 128},
};

TEST(Attention, Float32IsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<float>(shape);
}
TEST(Attention, Bf16IsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<bf16>(shape);
}
TEST(Attention, Fp16IsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<fp16>(shape);
}
TEST(Attention, DoubleIsTheFullSoftmax) {
  for (const AttentionShape& shape : kShapes) compare_with_reference<double>(shape);
}

TEST(Attention, EveryInstructionSetIsTheFullSoftmax) {
  for_each_target([] {
    for (const AttentionShape& shape : kShapes) {
      if (shape.time > 65) continue;
      compare_with_reference<float>(shape);
      compare_with_reference<bf16>(shape);
      compare_with_reference<fp16>(shape);
    }
  });
}

// The tolerance of the tests above must be able to fail: it is far below the effect of one forgotten key.
TEST(Attention, SeesEveryVisibleKeyAndNoOther) {
  const AttentionShape shape{.batch = 1, .time = 130, .heads = 1, .kv_heads = 1, .head_size = 16};
  Problem<float> x(shape);
  x.forward();
  for (const std::int64_t changed : {0, 1, 63, 64, 65, 127, 128, 129}) {
    Problem<float> y(shape);
    for (std::int64_t c = 0; c < 16; ++c) y.qkv.at(changed, 32 + c) += 1000.0f;  // its value
    y.forward();
    for (std::int64_t i = 0; i < shape.time; ++i) {
      const bool same = std::memcmp(&x.o.at(i, 0), &y.o.at(i, 0), 16 * sizeof(float)) == 0;
      EXPECT_EQ(same, i < changed) << "query " << i << ", key " << changed;
    }
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const AttentionShape shape{.batch = 1, .time = 100, .heads = 1, .kv_heads = 1, .head_size = 64};
  Problem<float> x(shape);
  for (std::int64_t r = 0; r < x.qkv.rows(); ++r) {
    for (std::int64_t c = 0; c < x.qkv.cols(); ++c) x.qkv.at(r, c) *= 30.0f;  // scores of some thousands
  }
  x.forward();
  x.backward();
  for (std::int64_t r = 0; r < x.o.rows(); ++r) {
    for (std::int64_t c = 0; c < x.o.cols(); ++c) ASSERT_TRUE(std::isfinite(x.o.get(r, c)));
    for (std::int64_t c = 0; c < x.dqkv.cols(); ++c) ASSERT_TRUE(std::isfinite(x.dqkv.get(r, c)));
  }
}

TEST(Attention, ANaNReachesWhatDependsOnIt) {
  const AttentionShape shape{.batch = 1, .time = 90, .heads = 1, .kv_heads = 1, .head_size = 32};
  for (const std::int64_t column : {0, 32, 64}) {  // q, k, v
    Problem<float> x(shape);
    x.qkv.at(70, column) = std::nanf("");
    x.forward();
    EXPECT_TRUE(
        std::isfinite(x.o.get(63, 0)));  // in a tile before: in one tile, 0 * NaN may reach earlier queries
    EXPECT_TRUE(std::isnan(x.o.get(70, 0))) << "column " << column;
    x.backward();
    EXPECT_TRUE(std::isnan(x.dqkv.get(70, 0))) << "column " << column;
  }
}

void expect_derivative(const AttentionShape& shape) {
  Problem<double> x(shape), y(shape);
  x.forward();
  x.backward();
  const auto value = [&] {
    y.forward();
    double sum = 0;
    for (std::int64_t r = 0; r < y.o.rows(); ++r) {
      for (std::int64_t c = 0; c < y.o.cols(); ++c) sum += y.o.get(r, c) * y.d_o.get(r, c);
    }
    return sum;
  };
  for (std::int64_t r = 0; r < y.qkv.rows(); ++r) {
    for (std::int64_t c = 0; c < y.qkv.cols(); ++c)
      // Rounding a sum of order 10 costs 1e-9, and the step some 1e-10 times a third derivative.
      ASSERT_NEAR(x.dqkv.get(r, c), slope(y.qkv.at(r, c), value), 1e-7) << r << ", " << c;
  }
}

TEST(Attention, BackwardIsTheDerivative) {
  AttentionShape shape{.batch = 2, .time = 5, .heads = 4, .kv_heads = 2, .head_size = 3};
  expect_derivative(shape);
  shape.value_size = 2;
  expect_derivative(shape);
}

template <class T>
void expect_same_bits() {
  const AttentionShape shape{.batch = 2, .time = 600, .heads = 4, .kv_heads = 2, .head_size = 22};
  Problem<T> x(shape);
  x.forward();
  x.backward();
  for_each_thread_count([&](int) {
    Problem<T> y(shape);
    y.forward();
    y.backward();
    EXPECT_TRUE(x.o.same_bits(y.o));
    EXPECT_EQ(x.lse, y.lse);
    EXPECT_TRUE(x.dqkv.same_bits(y.dqkv));
  });
}

TEST(Attention, BitsDoNotDependOnThreads) {
  expect_same_bits<bf16>();
  expect_same_bits<fp16>();
}

}  // namespace
}  // namespace zg::test
