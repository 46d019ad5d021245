// LayerNorm, RMSNorm and column sums against fp64 formulae, for the kernels of the host and of CUDA. K has
// the differences between the two: the shapes that take its branches, and how often its sums are rounded.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/operand.hpp"

namespace zg::test {

template <class K>
struct NormCase {
  using T = typename K::T;
  using A = typename K::A;
  std::int64_t rows, cols;
  bool centered;
  Operand<T> x, y, dy, dx, w, b;
  Operand<A> stats, dw, db, scratch;
  std::vector<double> mean, rstd;  // of each row, as defined

  // odd: the operand, of x, y, dy, dx, w and b, that is not aligned though the layout is.
  NormCase(Extent extent, Layout layout, bool with_mean, double mean_of_x = 0.5, int odd = -1)
      : rows(extent.rows),
        cols(extent.cols),
        centered(with_mean),
        x(rows, cols, odd == 0 ? kUnaligned : layout),
        y(rows, cols, odd == 1 ? kUnaligned : apart(layout, 1)),
        dy(rows, cols, odd == 2 ? kUnaligned : apart(layout, 2)),
        dx(rows, cols, odd == 3 ? kUnaligned : apart(layout, 3)),
        w(1, cols, {0, odd == 4 ? 1 : layout.offset}),
        b(1, cols, {0, odd == 5 ? 1 : layout.offset}),
        stats(rows, with_mean ? 2 : 1, {layout.gap, 0}),
        dw(1, cols),
        db(1, cols),
        scratch(K::kRowGroups, with_mean ? 2 * cols : cols, {layout.gap, 0}) {
    auto random = generator(static_cast<std::uint64_t>(rows * 100'000 + cols));
    x.fill_normal(random, mean_of_x, 2), dy.fill_normal(random), dx.fill_normal(random);
    w.fill_normal(random, 1, 0.2), b.fill_normal(random), dw.fill_normal(random), db.fill_normal(random);
    define();
  }
  void define() {
    mean.assign(static_cast<std::size_t>(rows), 0), rstd = mean;
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = 0, squares = 0;
      for (std::int64_t c = 0; c < cols && centered; ++c) sum += x(r, c);
      const double m = sum / static_cast<double>(cols);
      for (std::int64_t c = 0; c < cols; ++c) squares += (x(r, c) - m) * (x(r, c) - m);
      mean[static_cast<std::size_t>(r)] = m;
      rstd[static_cast<std::size_t>(r)] = 1 / std::sqrt(squares / static_cast<double>(cols) + 1e-5);
    }
  }
  void forward() {
    x.send(), w.send(), b.send(), y.send(), stats.send();
    const Extent extent{rows, cols};
    if (centered) {
      K::layernorm(extent, kernels::LayerNorm<T>{x.read(), w.data(), b.data(), 1e-5, y.view(), stats.view()});
    } else {
      K::rmsnorm(extent, kernels::RmsNorm<T>{x.read(), w.data(), 1e-5, y.view(), stats.view()});
    }
    x.fetch("x"), y.fetch("y"), stats.fetch("stats");
  }
  // Runs the backward with the stats as defined, rounded.
  void backward() {
    for (std::int64_t r = 0; r < rows; ++r) {
      if (centered) stats.set(r, 0, mean[static_cast<std::size_t>(r)]);
      stats.set(r, centered ? 1 : 0, rstd[static_cast<std::size_t>(r)]);
    }
    x.send(), dy.send(), dx.send(), w.send(), stats.send(), dw.send(), db.send(), scratch.send();
    const Extent extent{rows, cols};
    if (centered) {
      K::layernorm_backward(
          extent, kernels::LayerNormBackward<T>{dy.read(), x.read(), w.data(), stats.view(), dx.view(),
                                                dw.data(), db.data(), scratch.view()});
    } else {
      K::rmsnorm_backward(extent, kernels::RmsNormBackward<T>{dy.read(), x.read(), w.data(), stats.view(),
                                                              dx.view(), dw.data(), scratch.view()});
    }
    dy.fetch("dy"), dx.fetch("dx"), dw.fetch("dw"), db.fetch("db"), scratch.fetch("scratch");
  }
  double loss() const {
    double sum = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) sum += y(r, c) * dy(r, c);
    }
    return sum;
  }
};

template <class K>
void expect_forward(NormCase<K>& t) {
  using T = typename K::T;
  t.forward();
  const double u = unit_roundoff<Acc<T>>(), n_sum = K::row_roundings(t.cols);
  for (std::int64_t r = 0; r < t.rows; ++r) {
    const double mean = t.mean[static_cast<std::size_t>(r)], rstd = t.rstd[static_cast<std::size_t>(r)];
    double size = 0;
    for (std::int64_t c = 0; c < t.cols; ++c) size += std::abs(t.x(r, c)) / static_cast<double>(t.cols);
    // The sum of x errs by n_sum roundings of the sum of |x|, and the quotient is rounded. Around a mean that
    // is off by d the squares have the mean var + d^2; they take n_sum + 4 roundings, all terms positive. The
    // root halves a relative error; it, the quotient and eps, which is rounded, take four more.
    const double d = t.centered ? (n_sum + 1) * u * size : 0;
    const double relative = ((n_sum + 4) * u + d * d * rstd * rstd) / 2 + 4 * u;
    if (t.centered) {
      ASSERT_NEAR(t.stats(r, 0), mean, d + u * std::abs(mean)) << "mean of row " << r;
    }
    ASSERT_NEAR(t.stats(r, t.centered ? 1 : 0), rstd, relative * rstd) << "rstd of row " << r;
    for (std::int64_t c = 0; c < t.cols; ++c) {
      const double scaled = (t.x(r, c) - mean) * rstd * t.w(0, c), bias = t.centered ? t.b(0, c) : 0;
      // Two products are rounded and, around a mean, the difference and the sum.
      const double around = t.centered ? u : 0;
      const double error =
          (std::abs(t.w(0, c)) * rstd * d + std::abs(scaled) * (relative + 2 * u + around)) * (1 + 0x1p-10) +
          around * std::abs(scaled + bias);
      ASSERT_NEAR(t.y(r, c), scaled + bias, bound<T>(scaled + bias, 1, error / u)) << r << ", " << c;
    }
  }
}

template <class K>
void expect_backward(NormCase<K>& t) {
  using T = typename K::T;
  const Matrix<double> dx = t.dx.values();
  Matrix<double> dw = t.dw.values(), db = t.db.values(), dw_size(1, t.cols), db_size(1, t.cols);
  for (std::int64_t c = 0; c < t.cols; ++c) {
    dw_size.at(0, c) = std::abs(dw.at(0, c)), db_size.at(0, c) = std::abs(db.at(0, c));
  }
  t.backward();
  if (testing::Test::HasFatalFailure()) return;
  const double u = unit_roundoff<Acc<T>>(), n_sum = K::row_roundings(t.cols);
  for (std::int64_t r = 0; r < t.rows; ++r) {
    const double mean = t.centered ? t.stats(r, 0) : 0, rstd = t.stats(r, t.centered ? 1 : 0);
    const auto normal = [&](std::int64_t c) { return (t.x(r, c) - mean) * rstd; };
    const auto g = [&](std::int64_t c) { return t.dy(r, c) * t.w(0, c); };
    double mean_g = 0, mean_gn = 0, size_g = 0, size_gn = 0;
    for (std::int64_t c = 0; c < t.cols; ++c) {
      const double part = 1 / static_cast<double>(t.cols);
      mean_g += t.centered ? g(c) * part : 0, size_g += t.centered ? std::abs(g(c)) * part : 0;
      mean_gn += g(c) * normal(c) * part, size_gn += std::abs(g(c) * normal(c)) * part;
    }
    for (std::int64_t c = 0; c < t.cols; ++c) {
      const double e = t.dy(r, c), x = normal(c), before = dx.get(r, c);
      const double expected = before + rstd * (g(c) - mean_g - x * mean_gn);
      // Roundings: g 1; mean(g) its terms', n_sum and 1; n 2; mean(g n) its terms' 4, n_sum and 1, times n
      // and rounded; two differences, of which g and mean(g) take part in both, and the product with rstd.
      const double terms = (n_sum + 5) * (size_g + std::abs(x) * size_gn) + 4 * std::abs(g(c)) +
                           3 * std::abs(mean_g) + 5 * std::abs(x * mean_gn);
      ASSERT_NEAR(t.dx(r, c), expected,
                  bound<T>(expected, 1, rstd * terms + std::abs(before) + std::abs(expected)))
          << "dx " << r << ", " << c;
      dw.at(0, c) += e * x, db.at(0, c) += e;
      dw_size.at(0, c) += std::abs(e * x), db_size.at(0, c) += std::abs(e);
    }
  }
  // A term of dw takes 3 roundings. Sums in any order take at most one for each row, and one for what was
  // there; where T is double, the terms here take as many.
  const double sum = static_cast<double>(t.rows + 1 + 3 + 4) * u;
  for (std::int64_t c = 0; c < t.cols; ++c) {
    ASSERT_NEAR(t.dw(0, c), dw.at(0, c), sum * dw_size.at(0, c)) << "dw " << c;
    if (t.centered) {
      ASSERT_NEAR(t.db(0, c), db.at(0, c), sum * db_size.at(0, c)) << "db " << c;
    }
  }
}

template <class K>
void expect_same_bits(const NormCase<K>& t, const NormCase<K>& first) {
  EXPECT_TRUE(t.y.same_bits(first.y) && t.dx.same_bits(first.dx));
  EXPECT_TRUE(t.dw.same_bits(first.dw) && t.db.same_bits(first.db));
}

template <class K>
class Norms : public testing::Test {
 protected:
  template <class Body>
  static void for_each_case(const std::vector<Extent>& shapes, const Body& body) {
    K::for_each_variant([&] {
      for (const Extent extent : shapes) {
        for (const Layout layout : K::kLayouts) {
          if (extent.cols > 1000 && layout.offset == 0 && layout.gap > 0) continue;
          for (const bool centered : {true, false}) {
            SCOPED_TRACE(testing::Message() << extent.rows << " x " << extent.cols << ", " << layout
                                            << (centered ? ", LayerNorm" : ", RMSNorm"));
            NormCase<K> t(extent, layout, centered);
            body(t);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    });
  }
};
TYPED_TEST_SUITE_P(Norms);

TYPED_TEST_P(Norms, ForwardMatchesItsDefinition) {
  this->for_each_case(TypeParam::forward_shapes(), [](NormCase<TypeParam>& t) { expect_forward(t); });
}

// E[x^2] - E[x]^2 would lose all of the variance here in fp32, which is 2^-20 of the squares.
TYPED_TEST_P(Norms, VarianceFarFromZero) {
  TypeParam::for_each_variant([] {
    for (const std::int64_t cols : {768, 16'384}) {
      NormCase<TypeParam> t({2, cols}, {}, true, 2048);
      expect_forward(t);
    }
  });
}

TYPED_TEST_P(Norms, BackwardMatchesItsDefinition) {
  this->for_each_case(TypeParam::backward_shapes(), [](NormCase<TypeParam>& t) { expect_backward(t); });
}

// Groups of several rows.
TYPED_TEST_P(Norms, BackwardOfManyRows) {
  for (const bool centered : {true, false}) {
    for (const Extent extent : TypeParam::many_rows()) {
      NormCase<TypeParam> t(extent, {}, centered);
      expect_backward(t);
    }
  }
}

TYPED_TEST_P(Norms, SameBitsForEveryOrderAndLayout) {
  for (const Extent extent : TypeParam::order_shapes()) {
    for (const bool centered : {true, false}) {
      NormCase<TypeParam> first(extent, {}, centered);
      first.forward(), first.backward();
      TypeParam::for_each_order([&] {
        for (const Layout layout : TypeParam::kLayouts) {
          NormCase<TypeParam> t(extent, layout, centered);
          t.forward(), t.backward();
          expect_same_bits(t, first);
        }
      });
    }
  }
}

TYPED_TEST_P(Norms, EachOperandsAlignmentIsLookedAt) {
  for (const bool centered : {true, false}) {
    NormCase<TypeParam> first({3, 48}, {}, centered);
    first.forward(), first.backward();
    for (const int odd : {0, 1, 2, 3, 4, 5}) {
      SCOPED_TRACE(testing::Message() << "operand " << odd);
      NormCase<TypeParam> t({3, 48}, {}, centered, 0.5, odd);
      t.forward(), t.backward();
      expect_same_bits(t, first);
    }
  }
}

TYPED_TEST_P(Norms, NanReachesItsRowOnly) {
  TypeParam::for_each_variant([] {
    for (const bool centered : {true, false}) {
      NormCase<TypeParam> t({3, 43}, {}, centered);
      t.x.set(1, 7, std::numeric_limits<double>::quiet_NaN());
      t.define(), t.forward(), t.backward();
      for (std::int64_t c = 0; c < 43; ++c) {
        EXPECT_TRUE(std::isnan(t.y(1, c)) && std::isnan(t.dx(1, c)) && std::isnan(t.dw(0, c)));
        EXPECT_TRUE(std::isfinite(t.y(0, c)) && std::isfinite(t.y(2, c)));
        EXPECT_TRUE(std::isfinite(t.dx(0, c)) && std::isfinite(t.dx(2, c)));
      }
    }
  });
}

TYPED_TEST_P(Norms, NoRowsChangeNothing) {
  for (const bool centered : {true, false}) {
    NormCase<TypeParam> t({1, 43}, {}, centered), before({1, 43}, {}, centered);
    t.rows = 0;
    t.forward(), t.backward();
    EXPECT_TRUE(t.dw.same_bits(before.dw) && t.db.same_bits(before.db) && t.dx.same_bits(before.dx));
  }
}

// Adds a bias's gradient to db, after so many roundings at most.
template <class K>
void expect_column_sums(Extent extent, Layout layout, double roundings, Operand<typename K::A>& db) {
  using A = typename K::A;
  SCOPED_TRACE(testing::Message() << extent.rows << " x " << extent.cols << ", " << layout);
  auto random = generator(static_cast<std::uint64_t>(extent.rows * 10000 + extent.cols));
  Operand<typename K::T> dy(extent.rows, extent.cols, layout);
  Operand<A> scratch(K::kRowGroups, extent.cols, {layout.gap, 0});
  dy.fill_normal(random).send(), db.fill_normal(random).send(), scratch.send();
  Matrix<double> sum = db.values();
  K::bias_backward(extent, dy.read(), db.data(), scratch.view());
  dy.fetch("dy"), db.fetch("db"), scratch.fetch("scratch");
  for (std::int64_t c = 0; c < extent.cols; ++c) {
    double size = std::abs(sum.at(0, c));
    for (std::int64_t r = 0; r < extent.rows; ++r) sum.at(0, c) += dy(r, c), size += std::abs(dy(r, c));
    ASSERT_NEAR(db(0, c), sum.at(0, c), roundings * unit_roundoff<A>() * size) << c;
  }
}

TYPED_TEST_P(Norms, BiasBackwardSumsColumns) {
  TypeParam::for_each_variant([] {
    for (const Extent extent : TypeParam::bias_shapes()) {
      for (const Layout layout : TypeParam::kLayouts) {
        if (extent.cols > 1000 && layout.offset == 0) continue;
        Operand<typename TypeParam::A> db(1, extent.cols);
        expect_column_sums<TypeParam>(extent, layout, static_cast<double>(extent.rows + 1), db);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

TYPED_TEST_P(Norms, BiasBackwardOfManyRows) {
  const Extent extent{45 * TypeParam::kRowGroups + 3, 8};
  Operand<typename TypeParam::A> first(1, extent.cols), db(1, extent.cols);
  expect_column_sums<TypeParam>(extent, {}, TypeParam::kRoundingsOfManyRows, first);
  for (const Layout layout : TypeParam::kLayouts) {
    expect_column_sums<TypeParam>(extent, layout, TypeParam::kRoundingsOfManyRows, db);
    EXPECT_TRUE(db.same_bits(first)) << layout;
  }
}

REGISTER_TYPED_TEST_SUITE_P(Norms, ForwardMatchesItsDefinition, VarianceFarFromZero,
                            BackwardMatchesItsDefinition, BackwardOfManyRows, SameBitsForEveryOrderAndLayout,
                            EachOperandsAlignmentIsLookedAt, NanReachesItsRowOnly, NoRowsChangeNothing,
                            BiasBackwardSumsColumns, BiasBackwardOfManyRows);

// K's kernels in double.
template <class K>
class NormSlopes : public testing::Test {
 protected:
  static void expect_slopes(bool centered) {
    K::for_each_variant([&] {
      for (const std::int64_t cols : {3, 43}) {
        NormCase<K> t({5, cols}, {5, 0}, centered), moved({5, cols}, {5, 0}, centered);
        t.backward();
        const auto loss = [&] {
          moved.forward();
          return moved.loss();
        };
        for (std::int64_t c = 0; c < cols; ++c) {
          for (std::int64_t r = 0; r < t.rows; ++r) {
            ASSERT_NEAR(t.dx(r, c) - moved.dx(r, c), slope(moved.x.at(r, c), loss), kSlopeBound)
                << r << ", " << c;
          }
          ASSERT_NEAR(t.dw(0, c) - moved.dw(0, c), slope(moved.w.at(0, c), loss), kSlopeBound) << c;
          if (centered) {
            ASSERT_NEAR(t.db(0, c) - moved.db(0, c), slope(moved.b.at(0, c), loss), kSlopeBound) << c;
          }
        }
      }
    });
  }
};
TYPED_TEST_SUITE_P(NormSlopes);
TYPED_TEST_P(NormSlopes, LayerNorm) {
  this->expect_slopes(true);
}
TYPED_TEST_P(NormSlopes, RmsNorm) {
  this->expect_slopes(false);
}
REGISTER_TYPED_TEST_SUITE_P(NormSlopes, LayerNorm, RmsNorm);

}  // namespace zg::test
