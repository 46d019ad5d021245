// RMSNorm of each head by itself, and with 1 + w, against the definition in double.
#include "tests/cuda/operand.hpp"
#include "tests/kernels/head_norm_reference.hpp"

namespace zg::test {
namespace {

using cuda::kRowGroups;
constexpr double kEps = 1e-5;

template <class T>
struct HeadNormCase {
  using A = Acc<T>;
  HeadNormShape shape;
  Operand<T> x, y, dy, dx, w;
  Operand<A> stats, dw, scratch;

  HeadNormCase(const HeadNormShape& s, Layout layout)
      : shape(s),
        x(s.rows, s.cols(), layout),
        y(s.rows, s.cols(), layout),
        dy(s.rows, s.cols(), layout),
        dx(s.rows, s.cols(), layout),
        w(1, s.size, {0, layout.offset}),
        stats(s.rows, s.heads, {layout.gap, 0}),
        dw(1, s.size),
        scratch(kRowGroups, s.size, {layout.gap, 0}) {
    auto random = generator(static_cast<std::uint64_t>(s.rows * 1000 + s.cols()));
    x.fill_normal(random, 0.5, 2), dy.fill_normal(random), dw.fill_normal(random);
    w.fill_normal(random, s.weight == NormWeight::kPlusOne ? 0 : 1, 0.3);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t c = s.heads * s.size; c < s.cols(); ++c) y.set(r, c, 7), dx.set(r, c, 7);
    }
  }
  HeadNormReference reference() const {
    return {shape, [&](auto r, auto c) { return x(r, c); }, [&](auto r, auto c) { return dy(r, c); },
            [&](auto c) { return w(0, c); }, kEps};
  }
  void send() { x.send(), y.send(), dy.send(), dx.send(), w.send(), stats.send(), dw.send(), scratch.send(); }
  void forward() {
    cuda::head_rmsnorm<T>(
        launch(), shape.rows,
        {shape.heads, shape.size, x.read(), w.data(), kEps, y.view(), stats.view(), shape.weight});
    x.fetch("x"), y.fetch("y"), stats.fetch("stats");
  }
  void backward(Operand<T>& into) {
    cuda::head_rmsnorm_backward<T>(launch(), shape.rows,
                                   {shape.heads, shape.size, dy.read(), x.read(), w.data(), stats.view(),
                                    into.view(), dw.data(), scratch.view(), shape.weight});
    dy.fetch("dy"), dx.fetch("dx"), dw.fetch("dw"), scratch.fetch("scratch");
  }
  // Roundings of a sum over a head's elements: what a thread adds, and two sums over 32 lanes.
  double roundings() const { return 64 + static_cast<double>(shape.size) / 512 + 8 + 10; }
};

template <class T>
void expect_definition(const HeadNormShape& s, Layout layout) {
  SCOPED_TRACE(testing::Message() << s << ", " << layout);
  HeadNormCase<T> t(s, layout);
  const HeadNormReference expected = t.reference();
  std::vector<double> before;
  for (std::int64_t c = 0; c < s.size; ++c) before.push_back(t.dw(0, c));
  t.send(), t.forward(), t.backward(t.dx);
  const double roundings = t.roundings() + 8;
  for (std::int64_t r = 0; r < s.rows; ++r) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const double rstd = expected.rstd[static_cast<std::size_t>(r * s.heads + h)];
      ASSERT_NEAR(t.stats(r, h), rstd, roundings * unit_roundoff<Acc<T>>() * rstd) << r << ", " << h;
    }
    for (std::int64_t c = 0; c < s.cols(); ++c) {
      if (c >= s.heads * s.size) {
        ASSERT_EQ(t.y(r, c), 7);
        ASSERT_EQ(t.dx(r, c), 7);
        continue;
      }
      const std::size_t i = expected.at(r, c);
      // 1 + w is rounded by a unit of 1, which counts as much as the normalised element does.
      const double rstd = expected.rstd[static_cast<std::size_t>(r * s.heads + c / s.size)];
      const double plus = s.weight == NormWeight::kPlusOne ? std::abs(t.x(r, c)) * rstd : 0;
      ASSERT_NEAR(t.y(r, c), expected.y[i],
                  bound<T>(expected.y[i], roundings, std::abs(expected.y[i]) + plus));
      ASSERT_NEAR(t.dx(r, c), expected.dx[i], bound<T>(expected.dx[i], 3 * roundings, expected.dx_size[i]))
          << r << ", " << c;
    }
  }
  for (std::int64_t c = 0; c < s.size; ++c) {
    const auto i = static_cast<std::size_t>(c);
    const double terms = expected.dw_size[i] + std::abs(before[i]);
    ASSERT_NEAR(t.dw(0, c), before[i] + expected.dw[i],
                (static_cast<double>(s.rows * s.heads + 25) + roundings) * unit_roundoff<Acc<T>>() * terms)
        << c;
  }
}

template <class T>
class CudaHeadNorms : public testing::Test {};
TYPED_TEST_SUITE(CudaHeadNorms, StorageTypes);

TYPED_TEST(CudaHeadNorms, MatchTheirDefinition) {
  using T = TypeParam;
  constexpr std::int64_t kCount = 16 / static_cast<std::int64_t>(sizeof(T));
  for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
    for (const HeadNormShape s :
         {HeadNormShape{1, 1, 1}, HeadNormShape{7, 3, 5}, HeadNormShape{5, 4, 64}, HeadNormShape{3, 2, 129},
          HeadNormShape{2, 1, 2050 * kCount}, HeadNormShape{2, 2, 4100 * kCount + 1}}) {
      for (const Layout layout : kLayouts) {
        if (s.size > 1000 && (layout.gap > 0 || weight == NormWeight::kPlusOne) && layout.offset == 0)
          continue;
        expect_definition<T>({s.rows, s.heads, s.size, weight, s.rows % 2 == 0 ? 0 : 2 * kCount}, layout);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// More heads of rows than groups of them, so that a group's teams share its sums.
TYPED_TEST(CudaHeadNorms, ManyHeads) {
  expect_definition<TypeParam>({kRowGroups + 41, 3, 16, NormWeight::kPlusOne}, {});
}

TYPED_TEST(CudaHeadNorms, SameBitsInAnyOrderAndInPlace) {
  using T = TypeParam;
  for (const HeadNormShape s : {HeadNormShape{5, 3, 43, NormWeight::kPlusOne}, HeadNormShape{3, 2, 64}}) {
    HeadNormCase<T> first(s, {});
    first.send(), first.forward(), first.backward(first.dx);
    for_each_order([&] {
      for (const Layout layout : kLayouts) {
        HeadNormCase<T> t(s, layout);
        t.send(), t.forward(), t.backward(t.dy);
        EXPECT_TRUE(t.y.same_bits(first.y) && t.dy.same_bits(first.dx) && t.dw.same_bits(first.dw));
      }
    });
  }
}

// One head of all columns is the norm of rows, with w and with 1 + w. The backward has teams of another size,
// so that its sums are made in another order.
TYPED_TEST(CudaHeadNorms, OneHeadIsTheNormOfRows) {
  using T = TypeParam;
  for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
    HeadNormCase<T> heads({9, 1, 136, weight}, {}), rows({9, 1, 136, weight}, {});
    const HeadNormReference sizes = heads.reference();
    heads.send(), heads.forward(), heads.backward(heads.dx);
    rows.dx.fill(0);
    rows.send();
    cuda::rmsnorm<T>(launch(), {9, 136},
                     {rows.x.read(), rows.w.data(), kEps, rows.y.view(), rows.stats.view(), weight});
    cuda::rmsnorm_backward<T>(launch(), {9, 136},
                              {rows.dy.read(), rows.x.read(), rows.w.data(), rows.stats.view(),
                               rows.dx.view(), rows.dw.data(), rows.scratch.view(), weight});
    rows.y.fetch("y"), rows.stats.fetch("stats"), rows.dx.fetch("dx"), rows.dw.fetch("dw");
    EXPECT_TRUE(rows.y.same_bits(heads.y) && rows.stats.same_bits(heads.stats));
    for (std::int64_t r = 0; r < 9; ++r) {
      for (std::int64_t c = 0; c < 136; ++c) {
        // Each of the two is rounded to T.
        const double found = heads.dx(r, c),
                     bound_of_one = bound<T>(found, heads.roundings(), sizes.dx_size[sizes.at(r, c)]);
        ASSERT_NEAR(rows.dx(r, c), found, 2 * bound_of_one) << r << ", " << c;
      }
    }
    for (std::int64_t c = 0; c < 136; ++c) {
      const double size = sizes.dw_size[static_cast<std::size_t>(c)] + std::abs(heads.dw(0, c));
      ASSERT_NEAR(rows.dw(0, c), heads.dw(0, c), 2 * (9 + 25) * unit_roundoff<Acc<T>>() * size) << c;
    }
  }
}

TYPED_TEST(CudaHeadNorms, NoRowsChangeNothing) {
  HeadNormCase<TypeParam> t({1, 2, 8}, {}), before({1, 2, 8}, {});
  t.shape.rows = 0;
  t.send(), t.forward(), t.backward(t.dx);
  EXPECT_TRUE(t.dw.same_bits(before.dw) && t.dx.same_bits(before.dx));
}

}  // namespace
}  // namespace zg::test
