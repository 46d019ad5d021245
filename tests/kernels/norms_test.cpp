#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

template <class T>
struct NormCase {
  using A = Acc<T>;
  std::int64_t rows, cols;
  Matrix<T> x, w, b, y, dy, dx;
  Matrix<A> stats, rms_stats, dw, db, scratch;

  NormCase(std::int64_t n, std::int64_t c, std::int64_t gap) : rows(n), cols(c) {
    auto random = generator(static_cast<std::uint64_t>(n * 1000 + c));
    x = Matrix<T>(n, c, gap), dy = Matrix<T>(n, c, gap + 1), dx = Matrix<T>(n, c, gap + 2),
    y = Matrix<T>(n, c, gap);
    w = Matrix<T>(1, c), b = Matrix<T>(1, c);
    stats = Matrix<A>(n, 2, gap), rms_stats = Matrix<A>(n, 1, gap);
    dw = Matrix<A>(1, c), db = Matrix<A>(1, c), scratch = Matrix<A>(host::kRowGroups, 2 * c, gap);
    x.fill_normal(random, 0.5, 2), dy.fill_normal(random), dx.fill_normal(random);
    w.fill_normal(random, 1, 0.2), b.fill_normal(random), dw.fill_normal(random), db.fill_normal(random);
    scratch.fill(std::numeric_limits<double>::quiet_NaN());
  }
  // The same case in double.
  NormCase<double> widened() const {
    NormCase<double> d(rows, cols, 0);
    d.x = copy_as<double>(x), d.w = copy_as<double>(w), d.b = copy_as<double>(b), d.dy = copy_as<double>(dy);
    d.dx = copy_as<double>(dx), d.stats = copy_as<double>(stats), d.rms_stats = copy_as<double>(rms_stats);
    d.dw = copy_as<double>(dw), d.db = copy_as<double>(db);
    return d;
  }
  void layernorm() {
    host::layernorm<T>({rows, cols},
                       {.x = x, .w = w.data(), .b = b.data(), .eps = 1e-5, .y = y, .stats = stats});
  }
  void layernorm_backward() {
    host::layernorm_backward<T>({rows, cols}, {.dy = dy,
                                               .x = x,
                                               .w = w.data(),
                                               .stats = stats,
                                               .dx = dx,
                                               .dw = dw.data(),
                                               .db = db.data(),
                                               .scratch = scratch});
  }
  void rmsnorm() {
    host::rmsnorm<T>({rows, cols}, {.x = x, .w = w.data(), .eps = 1e-5, .y = y, .stats = rms_stats});
  }
  void rmsnorm_backward() {
    host::rmsnorm_backward<T>(
        {rows, cols},
        {.dy = dy, .x = x, .w = w.data(), .stats = rms_stats, .dx = dx, .dw = dw.data(), .scratch = scratch});
  }
  double loss() const {
    double sum = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) sum += y.get(r, c) * dy.get(r, c);
    }
    return sum;
  }
  double largest(const Matrix<T>& m) const {
    double most = 0;
    for (std::int64_t r = 0; r < m.rows(); ++r) {
      for (std::int64_t c = 0; c < m.cols(); ++c) most = std::max(most, std::abs(m.get(r, c)));
    }
    return most;
  }
  void expect_gaps_intact() {
    x.expect_gaps_intact("x"), y.expect_gaps_intact("y"), dy.expect_gaps_intact("dy"),
        dx.expect_gaps_intact("dx");
    stats.expect_gaps_intact("stats"), rms_stats.expect_gaps_intact("stats"),
        scratch.expect_gaps_intact("scratch");
  }
};

template <class T>
class Norms : public testing::Test {};
TYPED_TEST_SUITE(Norms, StorageTypes);

TYPED_TEST(Norms, LayerNormMatchesItsDefinition) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      for (const std::int64_t gap : {0, 5}) {
        NormCase<T> t(7, cols, gap);
        t.layernorm();
        t.expect_gaps_intact();
        for (std::int64_t r = 0; r < t.rows; ++r) {
          double mean = 0, var = 0;
          for (std::int64_t c = 0; c < cols; ++c) mean += t.x.get(r, c) / static_cast<double>(cols);
          for (std::int64_t c = 0; c < cols; ++c)
            var += std::pow(t.x.get(r, c) - mean, 2) / static_cast<double>(cols);
          const double rstd = 1 / std::sqrt(var + 1e-5);
          // The sums over the row take cols roundings, the mean's error counts rstd times in the result; the
          // variance moves rstd by half its relative error, and a few more roundings follow. Factor 4 for the
          // constants.
          const double roundings = 4 * static_cast<double>(cols + 8);
          const double size = t.largest(t.x);
          EXPECT_NEAR(t.stats.get(r, 0), mean, roundings * unit_roundoff<Acc<T>>() * size);
          EXPECT_NEAR(t.stats.get(r, 1), rstd,
                      roundings * unit_roundoff<Acc<T>>() * rstd * (1 + size * rstd));
          for (std::int64_t c = 0; c < cols; ++c) {
            const double expected = (t.x.get(r, c) - mean) * rstd * t.w.get(0, c) + t.b.get(0, c);
            const double scale =
                std::abs(t.w.get(0, c)) * rstd * size * (1 + size * rstd) + std::abs(t.b.get(0, c));
            ASSERT_NEAR(t.y.get(r, c), expected, bound<T>(expected, roundings, scale)) << r << ", " << c;
          }
        }
      }
    }
  });
}

TYPED_TEST(Norms, RmsNormMatchesItsDefinition) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      for (const std::int64_t gap : {0, 5}) {
        NormCase<T> t(7, cols, gap);
        t.rmsnorm();
        t.expect_gaps_intact();
        for (std::int64_t r = 0; r < t.rows; ++r) {
          double square = 0;
          for (std::int64_t c = 0; c < cols; ++c)
            square += std::pow(t.x.get(r, c), 2) / static_cast<double>(cols);
          const double rstd = 1 / std::sqrt(square + 1e-5);
          // cols roundings of positive terms, halved by the root, and eight more.
          const double roundings = static_cast<double>(cols + 8);
          EXPECT_NEAR(t.rms_stats.get(r, 0), rstd, roundings * unit_roundoff<Acc<T>>() * rstd);
          for (std::int64_t c = 0; c < cols; ++c) {
            const double expected = t.x.get(r, c) * rstd * t.w.get(0, c);
            ASSERT_NEAR(t.y.get(r, c), expected, bound<T>(expected, roundings, std::abs(expected)));
          }
        }
      }
    }
  });
}

// The narrower types against the double kernels, which the slopes below check.
template <class T>
void expect_backward_near_double(NormCase<T>& t, NormCase<double>& d, const Matrix<Acc<T>>& stats,
                                 std::int64_t column) {
  t.expect_gaps_intact();
  for (std::int64_t r = 0; r < t.rows; ++r) {
    const double rstd = stats.get(r, column);
    double g_max = 0, n_max = 0;
    for (std::int64_t c = 0; c < t.cols; ++c) {
      const double mean = column == 1 ? stats.get(r, 0) : 0.0;
      g_max = std::max(g_max, std::abs(t.dy.get(r, c) * t.w.get(0, c)));
      n_max = std::max(n_max, std::abs((t.x.get(r, c) - mean) * rstd));
    }
    for (std::int64_t c = 0; c < t.cols; ++c) {
      // Terms g, mean(g) and n mean(g n), the means with cols roundings each.
      const double scale = rstd * g_max * (2 + n_max * n_max) + std::abs(d.dx.get(r, c));
      ASSERT_NEAR(t.dx.get(r, c), d.dx.get(r, c),
                  bound<T>(d.dx.get(r, c), static_cast<double>(t.cols + 8), scale))
          << r << ", " << c;
    }
  }
  for (std::int64_t c = 0; c < t.cols; ++c) {
    double terms = 2 * std::abs(t.dw.get(0, c)) + 10, terms_b = terms;
    for (std::int64_t r = 0; r < t.rows; ++r) {
      const double mean = column == 1 ? stats.get(r, 0) : 0.0;
      terms += std::abs(t.dy.get(r, c)) * (std::abs(t.x.get(r, c)) + std::abs(mean)) * stats.get(r, column);
      terms_b += std::abs(t.dy.get(r, c));
    }
    const double roundings = static_cast<double>(t.rows + host::kRowGroups + 4) * unit_roundoff<Acc<T>>();
    ASSERT_NEAR(t.dw.get(0, c), d.dw.get(0, c), roundings * terms) << c;
    ASSERT_NEAR(t.db.get(0, c), d.db.get(0, c), roundings * terms_b) << c;
  }
}

TYPED_TEST(Norms, BackwardMatchesDouble) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      for (const std::int64_t rows : {1, 7, 71}) {
        for (const std::int64_t gap : {0, 3}) {
          NormCase<T> t(rows, cols, gap);
          t.layernorm();
          NormCase<double> d = t.widened();
          d.layernorm_backward(), t.layernorm_backward();
          expect_backward_near_double(t, d, t.stats, 1);

          NormCase<T> t2(rows, cols, gap);
          t2.rmsnorm();
          NormCase<double> d2 = t2.widened();
          d2.rmsnorm_backward(), t2.rmsnorm_backward();
          expect_backward_near_double(t2, d2, t2.rms_stats, 0);
        }
      }
    }
  });
}

template <class Forward, class Backward>
void expect_slopes(Forward forward, Backward backward, bool has_bias) {
  for_each_target([&] {
    for (const std::int64_t cols : {3, 43}) {
      NormCase<double> t(5, cols, 2);
      (t.*forward)();
      NormCase<double> before = t;
      (t.*backward)();
      const auto loss = [&] {
        (before.*forward)();
        return before.loss();
      };
      for (std::int64_t c = 0; c < cols; ++c) {
        for (std::int64_t r = 0; r < t.rows; ++r) {
          const double added = t.dx.get(r, c) - before.dx.get(r, c);
          ASSERT_NEAR(added, slope(before.x.at(r, c), loss), kSlopeBound) << r << ", " << c;
        }
        ASSERT_NEAR(t.dw.get(0, c) - before.dw.get(0, c), slope(before.w.at(0, c), loss), kSlopeBound);
        if (has_bias) {
          ASSERT_NEAR(t.db.get(0, c) - before.db.get(0, c), slope(before.b.at(0, c), loss), kSlopeBound);
        }
      }
    }
  });
}

TEST(NormSlopes, LayerNorm) {
  expect_slopes(&NormCase<double>::layernorm, &NormCase<double>::layernorm_backward, true);
}
TEST(NormSlopes, RmsNorm) {
  expect_slopes(&NormCase<double>::rmsnorm, &NormCase<double>::rmsnorm_backward, false);
}

TYPED_TEST(Norms, BiasBackwardSumsColumns) {
  using T = TypeParam;
  using A = Acc<T>;
  for_each_target([] {
    for (const std::int64_t cols : {1, 43, 257, 2500}) {
      for (const std::int64_t rows : {1, 31, 33, 101}) {
        auto random = generator(static_cast<std::uint64_t>(rows * 10000 + cols));
        Matrix<T> dy(rows, cols, 3);
        Matrix<A> db(1, cols), scratch(host::kRowGroups, cols, 2);
        dy.fill_normal(random), db.fill_normal(random),
            scratch.fill(std::numeric_limits<double>::quiet_NaN());
        const Matrix<A> before = db;
        host::bias_backward<T>({rows, cols}, dy, db.data(), scratch);
        scratch.expect_gaps_intact("scratch");
        for (std::int64_t c = 0; c < cols; ++c) {
          double sum = before.get(0, c), size = std::abs(sum);
          for (std::int64_t r = 0; r < rows; ++r) sum += dy.get(r, c), size += std::abs(dy.get(r, c));
          ASSERT_NEAR(db.get(0, c), sum, static_cast<double>(rows + 1) * unit_roundoff<A>() * size);
        }
      }
    }
  });
}

TYPED_TEST(Norms, SameBitsForAnyNumberOfThreads) {
  using T = TypeParam;
  NormCase<T> layer(131, 257, 3), rms(131, 257, 3);
  for_each_thread_count([&](int threads) {
    NormCase<T> l(131, 257, 3), r(131, 257, 3);
    l.layernorm(), l.layernorm_backward();
    r.rmsnorm(), r.rmsnorm_backward();
    if (threads == 1) {
      layer = l, rms = r;
      return;
    }
    EXPECT_TRUE(l.y.same_bits(layer.y) && l.dx.same_bits(layer.dx));
    EXPECT_TRUE(l.dw.same_bits(layer.dw) && l.db.same_bits(layer.db));
    EXPECT_TRUE(r.y.same_bits(rms.y) && r.dx.same_bits(rms.dx) && r.dw.same_bits(rms.dw));
  });
}

TYPED_TEST(Norms, NanReachesItsRowOnly) {
  using T = TypeParam;
  NormCase<T> t(3, 43, 0);
  t.x.set(1, 7, std::numeric_limits<double>::quiet_NaN());
  t.layernorm();
  for (std::int64_t c = 0; c < 43; ++c) {
    EXPECT_TRUE(std::isnan(t.y.get(1, c)));
    EXPECT_TRUE(std::isfinite(t.y.get(0, c)) && std::isfinite(t.y.get(2, c)));
  }
}

}  // namespace
}  // namespace zg::test
