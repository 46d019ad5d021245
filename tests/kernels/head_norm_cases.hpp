// RMSNorm of each head by itself, and with 1 + w, against its definition in double, for the kernels of the
// host and of CUDA. K has the differences between the two, as in norm_cases.hpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/operand.hpp"

namespace zg::test {

inline constexpr double kHeadEps = 1e-5;

struct HeadNormShape {
  std::int64_t rows, heads, size;
  NormWeight weight = NormWeight::kPlain;
  std::int64_t more = 0;  // columns behind the heads
  std::int64_t cols() const { return heads * size + more; }
};
inline std::ostream& operator<<(std::ostream& out, const HeadNormShape& s) {
  return out << s.rows << " rows, " << s.heads << " heads of " << s.size
             << (s.weight == NormWeight::kPlusOne ? ", 1 + w" : ", w");
}

// Makes the reference of x, dy (row, column) and w (column) as functions, and eps.
struct HeadNormReference {
  HeadNormShape shape;
  std::vector<double> rstd;            // [rows, heads]
  std::vector<double> y, dx, dx_size;  // [rows, heads * size]; the terms of dx by their sizes
  std::vector<double> dw, dw_size;     // [size]

  template <class X, class DY, class W>
  HeadNormReference(const HeadNormShape& s, const X& x, const DY& dy, const W& w, double eps) : shape(s) {
    const auto n = static_cast<std::size_t>(s.size);
    dw.resize(n), dw_size.resize(n);
    const double plus = s.weight == NormWeight::kPlusOne ? 1 : 0;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        const std::int64_t first = h * s.size;
        double squares = 0, mean = 0, mean_size = 0;
        for (std::int64_t c = 0; c < s.size; ++c)
          squares += x(r, first + c) * x(r, first + c) / static_cast<double>(s.size);
        const double one = rstd.emplace_back(1 / std::sqrt(squares + eps));
        for (std::int64_t c = 0; c < s.size; ++c) {
          const double term = dy(r, first + c) * (w(c) + plus) * x(r, first + c) * one;
          mean += term / static_cast<double>(s.size);
          mean_size += std::abs(term) / static_cast<double>(s.size);
        }
        for (std::int64_t c = 0; c < s.size; ++c) {
          const double hat = x(r, first + c) * one, g = dy(r, first + c) * (w(c) + plus);
          y.push_back(hat * (w(c) + plus));
          dx.push_back(one * (g - hat * mean));
          dx_size.push_back(one *
                            (std::abs(g) + std::abs(dy(r, first + c)) * plus + std::abs(hat) * mean_size));
          dw[static_cast<std::size_t>(c)] += dy(r, first + c) * hat;
          dw_size[static_cast<std::size_t>(c)] += std::abs(dy(r, first + c) * hat);
        }
      }
    }
  }
  std::size_t at(std::int64_t r, std::int64_t c) const {
    return static_cast<std::size_t>(r * shape.heads * shape.size + c);
  }
};

template <class K>
struct HeadNormCase {
  using T = typename K::T;
  using A = typename K::A;
  HeadNormShape shape;
  Operand<T> x, y, dy, dx, w;
  Operand<A> stats, dw, scratch;

  explicit HeadNormCase(const HeadNormShape& s, Layout layout = {})
      : shape(s),
        x(s.rows, s.cols(), layout),
        y(s.rows, s.cols(), apart(layout, 1)),
        dy(s.rows, s.cols(), apart(layout, 2)),
        dx(s.rows, s.cols(), apart(layout, 3)),
        w(1, s.size, {0, layout.offset}),
        stats(s.rows, s.heads, {layout.gap, 0}),
        dw(1, s.size),
        scratch(K::kRowGroups, s.size, {layout.gap, 0}) {
    auto random = generator(static_cast<std::uint64_t>(s.rows * 1000 + s.cols()));
    x.fill_normal(random, 0.5, 2), dy.fill_normal(random), dw.fill_normal(random);
    w.fill_normal(random, s.weight == NormWeight::kPlusOne ? 0 : 1, 0.3);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      for (std::int64_t c = s.heads * s.size; c < s.cols(); ++c) y.set(r, c, 7), dx.set(r, c, 7);
    }
  }
  HeadNormReference reference() const {
    return {shape, [&](auto r, auto c) { return x(r, c); }, [&](auto r, auto c) { return dy(r, c); },
            [&](auto c) { return w(0, c); }, kHeadEps};
  }
  // Columns behind the heads stay as they are.
  void expect_rest_intact(const Operand<T>& of) const {
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t c = shape.heads * shape.size; c < shape.cols(); ++c) ASSERT_EQ(of(r, c), 7);
    }
  }
  void forward() {
    x.send(), y.send(), w.send(), stats.send();
    K::head_rmsnorm(shape.rows, kernels::HeadRmsNorm<T>{shape.heads, shape.size, x.read(), w.data(), kHeadEps,
                                                        y.view(), stats.view(), shape.weight});
    x.fetch("x"), y.fetch("y"), stats.fetch("stats");
  }
  void backward(Operand<T>& into) {
    x.send(), dy.send(), dx.send(), w.send(), stats.send(), dw.send(), scratch.send();
    K::head_rmsnorm_backward(
        shape.rows,
        kernels::HeadRmsNormBackward<T>{shape.heads, shape.size, dy.read(), x.read(), w.data(), stats.view(),
                                        into.view(), dw.data(), scratch.view(), shape.weight});
    x.fetch("x"), dy.fetch("dy"), dx.fetch("dx"), dw.fetch("dw"), scratch.fetch("scratch");
  }
  double loss() const {
    double sum = 0;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t c = 0; c < shape.heads * shape.size; ++c) sum += y(r, c) * dy(r, c);
    }
    return sum;
  }
};

template <class K>
void expect_definition(const HeadNormShape& s, Layout layout) {
  using T = typename K::T;
  SCOPED_TRACE(testing::Message() << s << ", " << layout);
  HeadNormCase<K> t(s, layout);
  const HeadNormReference expected = t.reference();
  const Matrix<double> before = t.dw.values();
  t.forward(), t.backward(t.dx);
  t.expect_rest_intact(t.y), t.expect_rest_intact(t.dx);
  // A sum over a head is of positive terms, as are the means of the backward; the root halves an error, and a
  // few roundings follow.
  const double roundings = K::row_roundings(s.size) + 8;
  for (std::int64_t r = 0; r < s.rows; ++r) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const double rstd = expected.rstd[static_cast<std::size_t>(r * s.heads + h)];
      ASSERT_NEAR(t.stats(r, h), rstd, roundings * unit_roundoff<Acc<T>>() * rstd) << r << ", " << h;
    }
    for (std::int64_t c = 0; c < s.heads * s.size; ++c) {
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
    const double terms = expected.dw_size[i] + std::abs(before.get(0, c));
    ASSERT_NEAR(t.dw(0, c), before.get(0, c) + expected.dw[i],
                (static_cast<double>(s.rows * s.heads + 25) + roundings) * unit_roundoff<Acc<T>>() * terms)
        << c;
  }
}

template <class K>
class HeadNorms : public testing::Test {};
TYPED_TEST_SUITE_P(HeadNorms);

TYPED_TEST_P(HeadNorms, MatchTheirDefinition) {
  TypeParam::for_each_variant([] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      for (HeadNormShape s : TypeParam::head_shapes()) {
        s.weight = weight;
        for (const Layout layout : TypeParam::kLayouts) {
          if (s.size > 1000 && (layout.gap > 0 || weight == NormWeight::kPlusOne) && layout.offset == 0)
            continue;
          expect_definition<TypeParam>(s, layout);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

// More heads of rows than groups of them, so that a group's teams share its sums.
TYPED_TEST_P(HeadNorms, ManyHeads) {
  expect_definition<TypeParam>({TypeParam::kRowGroups + 41, 3, 16, NormWeight::kPlusOne}, {});
}

// The gradient may overwrite the output's.
TYPED_TEST_P(HeadNorms, SameBitsInAnyOrderAndInPlace) {
  for (const HeadNormShape& s : TypeParam::order_heads()) {
    HeadNormCase<TypeParam> first(s);
    first.forward(), first.backward(first.dx);
    TypeParam::for_each_order([&] {
      for (const Layout layout : TypeParam::kLayouts) {
        HeadNormCase<TypeParam> t(s, layout);
        t.forward(), t.backward(t.dy);
        EXPECT_TRUE(t.y.same_bits(first.y) && t.dy.same_bits(first.dx) && t.dw.same_bits(first.dw));
      }
    });
  }
}

TYPED_TEST_P(HeadNorms, TheGradientMayOverwriteThatOfTheOutput) {
  TypeParam::for_each_variant([] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      for (HeadNormShape s : TypeParam::head_shapes()) {
        if (s.size > 1000) continue;
        s.weight = weight, s.more = 0;
        HeadNormCase<TypeParam> apart(s), in_place(s);
        apart.forward(), apart.backward(apart.dx);
        in_place.forward(), in_place.backward(in_place.dy);
        EXPECT_TRUE(in_place.dw.same_bits(apart.dw) && in_place.dy.same_bits(apart.dx)) << s;
      }
    }
  });
}

// One head of all columns is the norm of rows, whose backward adds to dx.
TYPED_TEST_P(HeadNorms, OneHeadIsTheNormOfRows) {
  using T = typename TypeParam::T;
  TypeParam::for_each_variant([] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      for (const Extent extent : {Extent{33, 43}, Extent{9, 136}}) {
        const HeadNormShape shape{extent.rows, 1, extent.cols, weight};
        HeadNormCase<TypeParam> heads(shape), rows(shape);
        const HeadNormReference sizes = heads.reference();
        heads.forward(), heads.backward(heads.dx);
        rows.dx.fill(0);
        rows.x.send(), rows.w.send(), rows.y.send(), rows.stats.send();
        rows.dy.send(), rows.dx.send(), rows.dw.send(), rows.scratch.send();
        TypeParam::rmsnorm(extent, kernels::RmsNorm<T>{rows.x.read(), rows.w.data(), kHeadEps, rows.y.view(),
                                                       rows.stats.view(), weight});
        TypeParam::rmsnorm_backward(
            extent,
            kernels::RmsNormBackward<T>{rows.dy.read(), rows.x.read(), rows.w.data(), rows.stats.view(),
                                        rows.dx.view(), rows.dw.data(), rows.scratch.view(), weight});
        rows.y.fetch("y"), rows.stats.fetch("stats"), rows.dx.fetch("dx"), rows.dw.fetch("dw");
        EXPECT_TRUE(rows.y.same_bits(heads.y) && rows.stats.same_bits(heads.stats));
        // Where the sums are made in another order each of the two has roundings of its own.
        const double orders = TypeParam::kHeadsAddAsRows ? 0 : 2;
        for (std::int64_t r = 0; r < extent.rows; ++r) {
          for (std::int64_t c = 0; c < extent.cols; ++c) {
            const double found = heads.dx(r, c), size = sizes.dx_size[sizes.at(r, c)];
            ASSERT_NEAR(rows.dx(r, c), found,
                        orders * bound<T>(found, TypeParam::row_roundings(extent.cols), size))
                << r << ", " << c;
          }
        }
        for (std::int64_t c = 0; c < extent.cols; ++c) {
          const double size = sizes.dw_size[static_cast<std::size_t>(c)] + std::abs(heads.dw(0, c));
          ASSERT_NEAR(rows.dw(0, c), heads.dw(0, c),
                      orders * static_cast<double>(extent.rows + 25) * unit_roundoff<Acc<T>>() * size)
              << c;
        }
      }
    }
  });
}

TYPED_TEST_P(HeadNorms, NanReachesItsHeadOnly) {
  HeadNormCase<TypeParam> t({3, 2, 5});
  t.x.set(1, 6, std::numeric_limits<double>::quiet_NaN());
  t.forward(), t.backward(t.dx);
  for (std::int64_t r = 0; r < 3; ++r) {
    for (std::int64_t c = 0; c < 10; ++c) {
      EXPECT_EQ(std::isnan(t.y(r, c)), r == 1 && c >= 5);
      EXPECT_EQ(std::isnan(t.dx(r, c)), r == 1 && c >= 5);
    }
  }
}

TYPED_TEST_P(HeadNorms, NoRowsChangeNothing) {
  HeadNormCase<TypeParam> t({1, 2, 8}), before({1, 2, 8});
  t.shape.rows = 0;
  t.forward(), t.backward(t.dx);
  EXPECT_TRUE(t.dw.same_bits(before.dw) && t.dx.same_bits(before.dx));
}

REGISTER_TYPED_TEST_SUITE_P(HeadNorms, MatchTheirDefinition, ManyHeads, SameBitsInAnyOrderAndInPlace,
                            TheGradientMayOverwriteThatOfTheOutput, OneHeadIsTheNormOfRows,
                            NanReachesItsHeadOnly, NoRowsChangeNothing);

// K's kernels in double.
template <class K>
class HeadNormSlopes : public testing::Test {};
TYPED_TEST_SUITE_P(HeadNormSlopes);
TYPED_TEST_P(HeadNormSlopes, OfInputsAndWeights) {
  TypeParam::for_each_variant([] {
    for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
      HeadNormCase<TypeParam> t({3, 4, 7, weight, 2}, {5, 0}), moved(t.shape, {5, 0});
      t.dw.fill(0);
      t.forward(), t.backward(t.dx);
      const auto loss = [&] {
        moved.forward();
        return moved.loss();
      };
      for (std::int64_t r = 0; r < 3; ++r) {
        for (std::int64_t c = 0; c < 28; ++c)
          ASSERT_NEAR(t.dx(r, c), slope(moved.x.at(r, c), loss), kSlopeBound) << r << ", " << c;
      }
      for (std::int64_t c = 0; c < 7; ++c)
        ASSERT_NEAR(t.dw(0, c), slope(moved.w.at(0, c), loss), kSlopeBound) << c;
    }
  });
}
REGISTER_TYPED_TEST_SUITE_P(HeadNormSlopes, OfInputsAndWeights);

}  // namespace zg::test
