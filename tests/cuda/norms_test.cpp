// LayerNorm, RMSNorm and column sums against fp64 formulae.
#include "tests/cuda/operand.hpp"

namespace zg::test {
namespace {

using cuda::kRowGroups;

// The longest chain of additions in a sum over a row: a thread adds up to 64 elements of a row that is held,
// and its 512th part of a longer one, in packs of 8 at most; two sums over 32 lanes follow.
double row_roundings(std::int64_t cols) {
  return 64 + static_cast<double>(cols) / 512 + 8 + 10;
}

template <class T>
struct NormCase {
  using A = Acc<T>;
  std::int64_t rows, cols;
  bool centered;
  Operand<T> x, y, dy, dx, w, b;
  Operand<A> stats, dw, db, scratch;
  std::vector<double> mean, rstd;  // of each row, as defined

  // odd: the operand, of x, y, dy, dx, w and b, that is not aligned though the layout is.
  NormCase(std::int64_t n, std::int64_t c, Layout layout, bool with_mean, double mean_of_x = 0.5,
           int odd = -1)
      : rows(n),
        cols(c),
        centered(with_mean),
        x(n, c, odd == 0 ? Layout{15, 1} : layout),
        y(n, c, odd == 1 ? Layout{15, 1} : layout),
        dy(n, c, odd == 2 ? Layout{15, 1} : layout),
        dx(n, c, odd == 3 ? Layout{15, 1} : layout),
        w(1, c, {0, odd == 4 ? 1 : layout.offset}),
        b(1, c, {0, odd == 5 ? 1 : layout.offset}),
        stats(n, with_mean ? 2 : 1, {layout.gap, 0}),
        dw(1, c),
        db(1, c),
        scratch(kRowGroups, with_mean ? 2 * c : c, {layout.gap, 0}) {
    auto random = generator(static_cast<std::uint64_t>(n * 100'000 + c));
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
  void send() {
    x.send(), y.send(), dy.send(), dx.send(), w.send(), b.send();
    stats.send(), dw.send(), db.send(), scratch.send();
  }
  void forward() {
    if (centered) {
      cuda::layernorm<T>(launch(), {rows, cols},
                         {x.read(), w.data(), b.data(), 1e-5, y.view(), stats.view()});
    } else {
      cuda::rmsnorm<T>(launch(), {rows, cols}, {x.read(), w.data(), 1e-5, y.view(), stats.view()});
    }
    x.fetch("x"), y.fetch("y"), stats.fetch("stats");
  }
  // With the stats as defined, rounded.
  void backward() {
    for (std::int64_t r = 0; r < rows; ++r) {
      if (centered) stats.set(r, 0, mean[static_cast<std::size_t>(r)]);
      stats.set(r, centered ? 1 : 0, rstd[static_cast<std::size_t>(r)]);
    }
    send();
    if (centered) {
      cuda::layernorm_backward<T>(
          launch(), {rows, cols},
          {dy.read(), x.read(), w.data(), stats.view(), dx.view(), dw.data(), db.data(), scratch.view()});
    } else {
      cuda::rmsnorm_backward<T>(
          launch(), {rows, cols},
          {dy.read(), x.read(), w.data(), stats.view(), dx.view(), dw.data(), scratch.view()});
    }
    dy.fetch("dy"), dx.fetch("dx"), dw.fetch("dw"), db.fetch("db"), scratch.fetch("scratch");
  }
};

template <class T>
void expect_forward(NormCase<T>& t) {
  t.send(), t.forward();
  const double u = unit_roundoff<Acc<T>>(), n_sum = row_roundings(t.cols);
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
      // The difference, two products and the sum are rounded.
      const double error =
          (std::abs(t.w(0, c)) * rstd * d + std::abs(scaled) * (relative + 3 * u)) * (1 + 0x1p-10) +
          u * std::abs(scaled + bias);
      ASSERT_NEAR(t.y(r, c), scaled + bias, bound<T>(scaled + bias, 1, error / u)) << r << ", " << c;
    }
  }
}

template <class T>
class CudaNorms : public testing::Test {};
TYPED_TEST_SUITE(CudaNorms, StorageTypes);

// Rows of one warp, of teams of 2 to 16, with more packs to a thread, and longer than what is held; with and
// without a rest behind the last pack. In packs of T.
template <class T>
std::vector<std::int64_t> widths() {
  const std::int64_t count = 16 / static_cast<std::int64_t>(sizeof(T));
  return {1,
          3,
          43,
          count,
          96 * count,
          130 * count + 1,
          257 * count,
          520 * count,
          1030 * count,
          1500 * count + 1,
          2050 * count,
          4100 * count + 1};
}

template <class Body>
void for_each_case(const std::vector<std::int64_t>& columns, const Body& body) {
  for (const std::int64_t cols : columns) {
    for (const Layout layout : kLayouts) {
      if (cols > 1000 && layout.offset == 0 && layout.gap > 0) continue;
      for (const bool centered : {true, false}) {
        SCOPED_TRACE(testing::Message()
                     << cols << " columns, " << layout << (centered ? ", LayerNorm" : ", RMSNorm"));
        body(cols, layout, centered);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(CudaNorms, ForwardMatchesItsDefinition) {
  for_each_case(widths<TypeParam>(), [](std::int64_t cols, Layout layout, bool centered) {
    NormCase<TypeParam> t(cols > 1000 ? 2 : 5, cols, layout, centered);
    expect_forward(t);
  });
}

// E[x^2] - E[x]^2 would lose all of the variance here in fp32, which is 2^-20 of the squares.
TYPED_TEST(CudaNorms, VarianceFarFromZero) {
  for (const std::int64_t cols : {768, 16'384}) {
    NormCase<TypeParam> t(2, cols, {}, true, 2048);
    expect_forward(t);
  }
}

template <class T>
void expect_backward(NormCase<T>& t) {
  const auto before_dx = [&] {
    std::vector<double> values;
    for (std::int64_t i = 0; i < t.rows * t.cols; ++i) values.push_back(t.dx(i / t.cols, i % t.cols));
    return values;
  }();
  const std::int64_t n = t.cols;
  std::vector<double> dw(static_cast<std::size_t>(n)), db(dw), dw_size(dw), db_size(dw);
  for (std::int64_t c = 0; c < n; ++c) {
    const auto i = static_cast<std::size_t>(c);
    dw[i] = t.dw(0, c), db[i] = t.db(0, c), dw_size[i] = std::abs(dw[i]), db_size[i] = std::abs(db[i]);
  }
  t.backward();
  if (testing::Test::HasFatalFailure()) return;
  const double u = unit_roundoff<Acc<T>>(), n_sum = row_roundings(n);
  for (std::int64_t r = 0; r < t.rows; ++r) {
    const double mean = t.centered ? t.stats(r, 0) : 0, rstd = t.stats(r, t.centered ? 1 : 0);
    const auto normal = [&](std::int64_t c) { return (t.x(r, c) - mean) * rstd; };
    const auto g = [&](std::int64_t c) { return t.dy(r, c) * t.w(0, c); };
    double mean_g = 0, mean_gn = 0, size_g = 0, size_gn = 0;
    for (std::int64_t c = 0; c < n; ++c) {
      const double part = 1 / static_cast<double>(n);
      mean_g += t.centered ? g(c) * part : 0, size_g += t.centered ? std::abs(g(c)) * part : 0;
      mean_gn += g(c) * normal(c) * part, size_gn += std::abs(g(c) * normal(c)) * part;
    }
    for (std::int64_t c = 0; c < n; ++c) {
      const double e = t.dy(r, c), x = normal(c), before = before_dx[static_cast<std::size_t>(r * n + c)];
      const double expected = before + rstd * (g(c) - mean_g - x * mean_gn);
      // Roundings: g 1; mean(g) its terms', n_sum and 1; n 2; mean(g n) its terms' 4, n_sum and 1, times n
      // and rounded; two differences, the product with rstd and the sum.
      const double terms = (n_sum + 8) * (size_g + std::abs(x) * size_gn) +
                           8 * (std::abs(g(c)) + std::abs(mean_g) + std::abs(x * mean_gn));
      ASSERT_NEAR(t.dx(r, c), expected,
                  bound<T>(expected, 1, rstd * terms + std::abs(before) + std::abs(expected)))
          << "dx " << r << ", " << c;
      const auto i = static_cast<std::size_t>(c);
      dw[i] += e * x, db[i] += e, dw_size[i] += std::abs(e * x), db_size[i] += std::abs(e);
    }
  }
  // A term of dw takes 3 roundings. Sums in any order take at most a rounding for each row, and each of the
  // parts they are made of: 16 teams, 8 slices.
  const double sum = static_cast<double>(t.rows + 16 + 8 + 1 + 3) * u;
  for (std::int64_t c = 0; c < n; ++c) {
    const auto i = static_cast<std::size_t>(c);
    ASSERT_NEAR(t.dw(0, c), dw[i], sum * dw_size[i]) << "dw " << c;
    if (t.centered) {
      ASSERT_NEAR(t.db(0, c), db[i], sum * db_size[i]) << "db " << c;
    }
  }
}

TYPED_TEST(CudaNorms, BackwardMatchesItsDefinition) {
  for_each_case(widths<TypeParam>(), [](std::int64_t cols, Layout layout, bool centered) {
    NormCase<TypeParam> t(cols > 1000 ? 2 : 5, cols, layout, centered);
    expect_backward(t);
  });
}

// Groups of several rows; of narrow rows, which a group's teams share, and of wide ones, one after the other.
TYPED_TEST(CudaNorms, BackwardOfManyRows) {
  constexpr std::int64_t kCount = 16 / static_cast<std::int64_t>(sizeof(TypeParam));
  for (const bool centered : {true, false}) {
    NormCase<TypeParam> narrow(kRowGroups + 301, 3, {}, centered);
    expect_backward(narrow);
    NormCase<TypeParam> wide(kRowGroups + 41, 520 * kCount, {}, centered);
    expect_backward(wide);
  }
}
// More rows to a group than it has teams, and rows that are not held.
TEST(CudaNormsOfFloats, BackwardOfMoreRowsThanTeams) {
  NormCase<float> narrow(17 * kRowGroups + 1, 2, {}, true);
  expect_backward(narrow);
  NormCase<float> longer(kRowGroups + 2, 2050 * 4 + 1, {}, true);
  expect_backward(longer);
}

TYPED_TEST(CudaNorms, SameBitsForEveryOrderAndLayout) {
  for (const std::int64_t cols : {43, 1500}) {
    for (const bool centered : {true, false}) {
      NormCase<TypeParam> first(3, cols, {}, centered);
      first.send(), first.forward(), first.backward();
      for_each_order([&] {
        for (const Layout layout : kLayouts) {
          NormCase<TypeParam> t(3, cols, layout, centered);
          t.send(), t.forward();
          EXPECT_TRUE(t.y.same_bits(first.y));
          t.backward();
          EXPECT_TRUE(t.dx.same_bits(first.dx) && t.dw.same_bits(first.dw) && t.db.same_bits(first.db));
        }
      });
    }
  }
}

TYPED_TEST(CudaNorms, EachOperandsAlignmentIsLookedAt) {
  for (const bool centered : {true, false}) {
    NormCase<TypeParam> first(3, 48, {}, centered);
    first.send(), first.forward(), first.backward();
    for (const int odd : {0, 1, 2, 3, 4, 5}) {
      NormCase<TypeParam> t(3, 48, {}, centered, 0.5, odd);
      t.send(), t.forward(), t.backward();
      EXPECT_TRUE(t.y.same_bits(first.y) && t.dx.same_bits(first.dx)) << "operand " << odd;
      EXPECT_TRUE(t.dw.same_bits(first.dw) && t.db.same_bits(first.db)) << "operand " << odd;
    }
  }
}

TYPED_TEST(CudaNorms, NanReachesItsRowOnly) {
  for (const bool centered : {true, false}) {
    NormCase<TypeParam> t(3, 43, {}, centered);
    t.x.set(1, 7, std::numeric_limits<double>::quiet_NaN());
    t.send(), t.forward();
    for (std::int64_t c = 0; c < 43; ++c) {
      EXPECT_TRUE(std::isnan(t.y(1, c)));
      EXPECT_TRUE(std::isfinite(t.y(0, c)) && std::isfinite(t.y(2, c)));
    }
    t.define(), t.backward();
    for (std::int64_t c = 0; c < 43; ++c) {
      EXPECT_TRUE(std::isnan(t.dx(1, c)) && std::isnan(t.dw(0, c)));
      EXPECT_TRUE(std::isfinite(t.dx(0, c)) && std::isfinite(t.dx(2, c)));
    }
  }
}

TYPED_TEST(CudaNorms, NoRowsChangeNothing) {
  for (const bool centered : {true, false}) {
    NormCase<TypeParam> t(1, 43, {}, centered), before(1, 43, {}, centered);
    t.rows = 0;
    t.send(), t.forward(), t.backward();
    EXPECT_TRUE(t.dw.same_bits(before.dw) && t.db.same_bits(before.db) && t.dx.same_bits(before.dx));
  }
}

TYPED_TEST(CudaNorms, BiasBackwardSumsColumns) {
  using T = TypeParam;
  using A = Acc<T>;
  for (const std::int64_t cols : {1, 43, 264, 515}) {
    for (const std::int64_t rows : {0, 1, 37, 300}) {
      if (rows == 300 && cols > 100) continue;
      for (const Layout layout : kLayouts) {
        SCOPED_TRACE(testing::Message() << rows << " rows, " << cols << " columns, " << layout);
        auto random = generator(static_cast<std::uint64_t>(rows * 10000 + cols));
        Operand<T> dy(rows, cols, layout);
        Operand<A> db(1, cols), scratch(kRowGroups, cols, {layout.gap, 0});
        dy.fill_normal(random).send(), db.fill_normal(random), scratch.send();
        std::vector<double> sum, size;
        for (std::int64_t c = 0; c < cols; ++c) sum.push_back(db(0, c)), size.push_back(std::abs(db(0, c)));
        db.send();
        cuda::bias_backward<T>(launch(), {rows, cols}, dy.read(), db.data(), scratch.view());
        dy.fetch("dy"), db.fetch("db"), scratch.fetch("scratch");
        for (std::int64_t c = 0; c < cols; ++c) {
          const auto i = static_cast<std::size_t>(c);
          for (std::int64_t r = 0; r < rows; ++r) sum[i] += dy(r, c), size[i] += std::abs(dy(r, c));
          // Any order of the rows, and twice 8 slices.
          ASSERT_NEAR(db(0, c), sum[i], static_cast<double>(rows + 17) * unit_roundoff<A>() * size[i]) << c;
        }
      }
    }
  }
}

TYPED_TEST(CudaNorms, BiasBackwardOfManyRows) {
  using T = TypeParam;
  using A = Acc<T>;
  const std::int64_t rows = 45 * kRowGroups + 3;
  std::vector<Acc<T>> first;
  for (const Layout layout : kLayouts) {
    Operand<T> dy(rows, 8, layout);
    Operand<A> db(1, 8), scratch(kRowGroups, 8);
    auto random = generator(11);
    dy.fill_normal(random).send(), db.fill(1).send(), scratch.send();
    cuda::bias_backward<T>(launch(), {rows, 8}, dy.read(), db.data(), scratch.view());
    db.fetch("db");
    for (std::int64_t c = 0; c < 8; ++c) {
      double sum = 1, size = 1;
      for (std::int64_t r = 0; r < rows; ++r) sum += dy(r, c), size += std::abs(dy(r, c));
      // 46 rows of a group in 8 slices, 256 groups in 8: chains of 6 + 8 + 32 + 8 and the last.
      ASSERT_NEAR(db(0, c), sum, 55 * unit_roundoff<A>() * size) << c;
    }
    if (first.empty()) first.assign(&db.at(0, 0), &db.at(0, 0) + 8);
    EXPECT_EQ(std::memcmp(first.data(), &db.at(0, 0), 8 * sizeof(A)), 0) << "other bits, " << layout;
  }
}

}  // namespace
}  // namespace zg::test
