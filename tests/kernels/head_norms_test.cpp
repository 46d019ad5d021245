// RMSNorm of each head by itself, and with 1 + w.
#include "tests/kernels/head_norm_reference.hpp"

namespace zg::test {
namespace {

constexpr double kEps = 1e-5;

template <class T>
struct HeadNormCase {
  using A = Acc<T>;
  HeadNormShape shape;
  Matrix<T> x, y, dy, dx, w;
  Matrix<A> stats, dw, scratch;

  HeadNormCase(const HeadNormShape& s, std::int64_t gap)
      : shape(s),
        x(s.rows, s.cols(), gap),
        y(s.rows, s.cols(), gap + 1),
        dy(s.rows, s.cols(), gap),
        dx(s.rows, s.cols(), gap + 2),
        w(1, s.size),
        stats(s.rows, s.heads, gap),
        dw(1, s.size),
        scratch(host::kRowGroups, s.size, gap) {
    auto random = generator(static_cast<std::uint64_t>(s.rows * 1000 + s.cols()));
    x.fill_normal(random, 0.5, 2), dy.fill_normal(random), dw.fill_normal(random);
    w.fill_normal(random, s.weight == NormWeight::kPlusOne ? 0 : 1, 0.3);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    scratch.fill(nan), stats.fill(nan);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t c = 0; c < s.cols(); ++c) {
        const double left = c < s.heads * s.size ? nan : 7;  // columns behind the heads stay as they are
        y.set(r, c, left), dx.set(r, c, left);
      }
    }
  }
  HeadNormReference reference() const {
    return {shape, [&](auto r, auto c) { return x.get(r, c); }, [&](auto r, auto c) { return dy.get(r, c); },
            [&](auto c) { return w.get(0, c); }, kEps};
  }
  void forward() {
    host::head_rmsnorm<T>(shape.rows, {.heads = shape.heads,
                                       .head_size = shape.size,
                                       .x = x,
                                       .w = w.data(),
                                       .eps = kEps,
                                       .y = y,
                                       .stats = stats,
                                       .weight = shape.weight});
  }
  void backward(Matrix<T>& into) {
    host::head_rmsnorm_backward<T>(shape.rows, {.heads = shape.heads,
                                                .head_size = shape.size,
                                                .dy = dy,
                                                .x = x,
                                                .w = w.data(),
                                                .stats = stats,
                                                .dx = into,
                                                .dw = dw.data(),
                                                .scratch = scratch,
                                                .weight = shape.weight});
  }
  double loss() const {
    double sum = 0;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t c = 0; c < shape.heads * shape.size; ++c) sum += y.get(r, c) * dy.get(r, c);
    }
    return sum;
  }
  void expect_rest_intact() {
    x.expect_gaps_intact("x"), y.expect_gaps_intact("y"), dy.expect_gaps_intact("dy"),
        dx.expect_gaps_intact("dx"), stats.expect_gaps_intact("stats"), scratch.expect_gaps_intact("scratch");
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t c = shape.heads * shape.size; c < shape.cols(); ++c) {
        EXPECT_EQ(y.get(r, c), 7);
        EXPECT_EQ(dx.get(r, c), 7);
      }
    }
  }
};

template <class Body>
void for_each_shape(const Body& body) {
  for_each_target([&] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      for (const HeadNormShape s : {HeadNormShape{1, 1, 1}, HeadNormShape{7, 3, 5}, HeadNormShape{71, 5, 12},
                                    HeadNormShape{9, 2, 129}, HeadNormShape{40, 1, 257}}) {
        for (const std::int64_t more : {0, 9}) {
          const HeadNormShape shape{s.rows, s.heads, s.size, weight, more};
          SCOPED_TRACE(testing::Message() << shape);
          body(shape);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

template <class T>
class HeadNorms : public testing::Test {};
TYPED_TEST_SUITE(HeadNorms, StorageTypes);

TYPED_TEST(HeadNorms, MatchTheirDefinition) {
  using T = TypeParam;
  for_each_shape([](const HeadNormShape& s) {
    HeadNormCase<T> t(s, 3);
    const HeadNormReference expected = t.reference();
    const std::vector<double> before = [&] {
      std::vector<double> values;
      for (std::int64_t c = 0; c < s.size; ++c) values.push_back(t.dw.get(0, c));
      return values;
    }();
    t.forward(), t.backward(t.dx);
    t.expect_rest_intact();
    // A sum over a head takes size roundings of positive terms, the means of the backward as many; the root
    // halves an error, and a few roundings follow.
    const double roundings = static_cast<double>(s.size + 10);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const double rstd = expected.rstd[static_cast<std::size_t>(r * s.heads + h)];
        ASSERT_NEAR(t.stats.get(r, h), rstd, roundings * unit_roundoff<Acc<T>>() * rstd) << r << ", " << h;
      }
      for (std::int64_t c = 0; c < s.heads * s.size; ++c) {
        const std::size_t i = expected.at(r, c);
        // 1 + w is rounded by a unit of 1, which counts as much as the normalised element does.
        const double rstd = expected.rstd[static_cast<std::size_t>(r * s.heads + c / s.size)];
        const double plus = s.weight == NormWeight::kPlusOne ? std::abs(t.x.get(r, c)) * rstd : 0;
        ASSERT_NEAR(t.y.get(r, c), expected.y[i],
                    bound<T>(expected.y[i], roundings, std::abs(expected.y[i]) + plus));
        ASSERT_NEAR(t.dx.get(r, c), expected.dx[i],
                    bound<T>(expected.dx[i], 3 * roundings, expected.dx_size[i]))
            << r << ", " << c;
      }
    }
    for (std::int64_t c = 0; c < s.size; ++c) {
      const auto i = static_cast<std::size_t>(c);
      const double terms = expected.dw_size[i] + std::abs(before[i]);
      ASSERT_NEAR(t.dw.get(0, c), before[i] + expected.dw[i],
                  static_cast<double>(s.rows * s.heads + host::kRowGroups + s.size + 10) *
                      unit_roundoff<Acc<T>>() * terms)
          << c;
    }
  });
}

// One head of all columns is the norm of rows, whose backward adds to dx.
TYPED_TEST(HeadNorms, OneHeadIsTheNormOfRows) {
  using T = TypeParam;
  using A = Acc<T>;
  for_each_target([] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      HeadNormCase<T> t({33, 1, 43, weight}, 2);
      Matrix<T> y = t.y, dx = t.dx;
      Matrix<A> stats = t.stats, dw = t.dw, scratch = t.scratch;
      dx.fill(0);
      t.forward(), t.backward(t.dx);
      host::rmsnorm<T>({33, 43}, {t.x, t.w.data(), kEps, y, stats, weight});
      host::rmsnorm_backward<T>({33, 43}, {t.dy, t.x, t.w.data(), stats, dx, dw.data(), scratch, weight});
      EXPECT_TRUE(y.same_bits(t.y) && stats.same_bits(t.stats) && dw.same_bits(t.dw));
      for (std::int64_t i = 0; i < 33 * 43; ++i) ASSERT_EQ(dx.get(i / 43, i % 43), t.dx.get(i / 43, i % 43));
    }
  });
}

TYPED_TEST(HeadNorms, TheGradientMayOverwriteThatOfTheOutput) {
  using T = TypeParam;
  for_each_shape([](const HeadNormShape& s) {
    if (s.more > 0) return;
    HeadNormCase<T> apart(s, 0), in_place(s, 0);
    apart.forward(), apart.backward(apart.dx);
    in_place.forward(), in_place.backward(in_place.dy);
    EXPECT_TRUE(in_place.dw.same_bits(apart.dw));
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t c = 0; c < s.cols(); ++c) ASSERT_EQ(in_place.dy.get(r, c), apart.dx.get(r, c));
    }
  });
}

TEST(HeadNormSlopes, OfInputsAndWeights) {
  for_each_target([] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      HeadNormCase<double> t({3, 4, 7, weight, 2}, 1);
      t.dw.fill(0);
      t.forward(), t.backward(t.dx);
      HeadNormCase<double> moved = t;
      const auto loss = [&] {
        moved.forward();
        return moved.loss();
      };
      for (std::int64_t r = 0; r < 3; ++r) {
        for (std::int64_t c = 0; c < 28; ++c)
          ASSERT_NEAR(t.dx.get(r, c), slope(moved.x.at(r, c), loss), kSlopeBound) << r << ", " << c;
      }
      for (std::int64_t c = 0; c < 7; ++c)
        ASSERT_NEAR(t.dw.get(0, c), slope(moved.w.at(0, c), loss), kSlopeBound) << c;
    }
  });
}

TYPED_TEST(HeadNorms, SameBitsForAnyNumberOfThreads) {
  using T = TypeParam;
  const HeadNormShape shape{131, 3, 43, NormWeight::kPlusOne};
  HeadNormCase<T> first(shape, 0);
  first.forward(), first.backward(first.dx);
  for_each_thread_count([&](int) {
    HeadNormCase<T> t(shape, 0);
    t.forward(), t.backward(t.dx);
    EXPECT_TRUE(t.y.same_bits(first.y) && t.dx.same_bits(first.dx) && t.dw.same_bits(first.dw));
  });
}

TYPED_TEST(HeadNorms, NanReachesItsHeadOnly) {
  using T = TypeParam;
  HeadNormCase<T> t({3, 2, 5}, 0);
  t.x.set(1, 6, std::numeric_limits<double>::quiet_NaN());
  t.forward(), t.backward(t.dx);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t c = 0; c < 10; ++c) {
      EXPECT_EQ(std::isnan(t.y.get(r, c)), r == 1 && c >= 5);
      EXPECT_EQ(std::isnan(t.dx.get(r, c)), r == 1 && c >= 5);
    }
  }
}

}  // namespace
}  // namespace zg::test
