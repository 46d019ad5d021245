#include <numbers>

#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

// GPT-2 writes 0.5 x (1 + tanh(u)); as x / (1 + exp(-2u)) it does not cancel, so that the bound can be
// relative.
double gelu_reference(double x) {
  const double u = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
  const double as_written = 0.5 * x * (1 + std::tanh(u)), value = x / (1 + std::exp(-2 * u));
  EXPECT_NEAR(value, as_written, 1e-14 * std::abs(x));
  return value;
}
double silu_reference(double x) {
  return x / (1 + std::exp(-x));
}

template <class T>
class Activations : public testing::Test {};
TYPED_TEST_SUITE(Activations, StorageTypes);

// Highway states 1 ulp for exp; its argument 2u is rounded four times and stands in the exponent, so it errs
// by 4 |2u| units; a handful of roundings follow. (For |2u| beyond 88 the result is below 1e-36.)
double activation_roundings(double argument) {
  return 16 + 8 * std::min(std::abs(argument), 88.0);
}

TYPED_TEST(Activations, GeluMatchesItsDefinition) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      for (const std::int64_t gap : {0, 5}) {
        auto random = generator(1);
        Matrix<T> x(9, cols, gap), y(9, cols, gap);
        x.fill_normal(random, 0, 3);
        const double large = std::min(1e25, overflow_of<T>() / 2);
        x.set(0, 0, 0), x.set(1, 0, 40), x.set(2, 0, -40), x.set(3, 0, large), x.set(4, 0, -large),
            x.set(5, 0, -10);
        host::gelu<T>({9, cols}, x, y);
        x.expect_gaps_intact("x"), y.expect_gaps_intact("y");
        for (std::int64_t r = 0; r < 9; ++r) {
          for (std::int64_t c = 0; c < cols; ++c) {
            const double v = x.get(r, c);
            const double expected = std::abs(v) > 1e6 ? std::max(v, 0.0) : gelu_reference(v);
            const double argument =
                1.6 * (std::min(std::abs(v), 30.0) + 0.044715 * std::pow(std::min(std::abs(v), 30.0), 3));
            // The exponent is bounded: x * e^-88 (in double e^-700) is left where the limit is 0.
            ASSERT_NEAR(y.get(r, c), expected,
                        bound<T>(expected, activation_roundings(argument), std::abs(expected)) +
                            std::abs(v) * 0x1p-126)
                << v;
          }
        }
      }
    }
  });
}

TYPED_TEST(Activations, NonFiniteValuesStayVisible) {
  using T = TypeParam;
  for_each_target([] {
    Matrix<T> x(1, 43), y(1, 43), dx(1, 43), dy(1, 43);
    dy.fill(1);
    x.set(0, 3, std::numeric_limits<double>::quiet_NaN());
    x.set(0, 42, std::numeric_limits<double>::quiet_NaN());
    x.set(0, 5, std::numeric_limits<double>::infinity());
    host::gelu<T>({1, 43}, x, y);
    host::gelu_backward<T>({1, 43}, x, dy, dx);
    for (const std::int64_t c : {3, 42}) EXPECT_TRUE(std::isnan(y.get(0, c)) && std::isnan(dx.get(0, c)));
    EXPECT_FALSE(std::isfinite(y.get(0, 5)));
    EXPECT_EQ(y.get(0, 4), 0);
  });
}

TEST(ActivationSlopes, Gelu) {
  for_each_target([] {
    Matrix<double> x(1, 257), y(1, 257), dy(1, 257), dx(1, 257);
    auto random = generator(2);
    x.fill_normal(random, 0, 2), dy.fill_normal(random);
    host::gelu_backward<double>({1, 257}, x, dy, dx);
    for (std::int64_t c = 0; c < 257; ++c) {
      const double expected = slope(x.at(0, c), [&] {
        host::gelu<double>({1, 257}, x, y);
        return y.get(0, c) * dy.get(0, c);
      });
      ASSERT_NEAR(dx.get(0, c), expected, kSlopeBound);
    }
  });
}

TEST(ActivationSlopes, SwiGlu) {
  for_each_target([] {
    constexpr std::int64_t kCols = 43;
    Matrix<double> gate_up(3, 2 * kCols, 3), y(3, kCols, 1), dy(3, kCols), d(3, 2 * kCols, 2);
    auto random = generator(3);
    gate_up.fill_normal(random, 0, 2), dy.fill_normal(random);
    host::swiglu_backward<double>({3, kCols}, gate_up, dy, d);
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t c = 0; c < 2 * kCols; ++c) {
        const double expected = slope(gate_up.at(r, c), [&] {
          host::swiglu<double>({3, kCols}, gate_up, y);
          return y.get(r, c % kCols) * dy.get(r, c % kCols);
        });
        ASSERT_NEAR(d.get(r, c), expected, kSlopeBound) << r << ", " << c;
      }
    }
  });
}

TYPED_TEST(Activations, SwiGluMatchesItsDefinition) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      auto random = generator(4);
      Matrix<T> gate_up(7, 2 * cols, 3), y(7, cols, 2);
      gate_up.fill_normal(random, 0, 3);
      gate_up.set(0, 0, 100), gate_up.set(1, 0, -100);
      host::swiglu<T>({7, cols}, gate_up, y);
      gate_up.expect_gaps_intact("gate_up"), y.expect_gaps_intact("y");
      for (std::int64_t r = 0; r < 7; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const double g = gate_up.get(r, c);
          const double expected = silu_reference(g) * gate_up.get(r, cols + c);
          ASSERT_NEAR(y.get(r, c), expected,
                      bound<T>(expected, activation_roundings(g), std::abs(expected)) + 1e-34);
        }
      }
    }
  });
}

TYPED_TEST(Activations, GeluGatedMatchesItsDefinition) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      auto random = generator(7);
      Matrix<T> gate_up(7, 2 * cols, 3), y(7, cols, 2);
      gate_up.fill_normal(random, 0, 2);
      host::swiglu<T>({7, cols}, gate_up, y, Gate::kGeluTanh);
      gate_up.expect_gaps_intact("gate_up"), y.expect_gaps_intact("y");
      for (std::int64_t r = 0; r < 7; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const double g = gate_up.get(r, c), expected = gelu_reference(g) * gate_up.get(r, cols + c);
          ASSERT_NEAR(
              y.get(r, c), expected,
              bound<T>(expected, activation_roundings(1.6 * (std::abs(g) + 0.05 * std::pow(g, 3))) + 32,
                       std::abs(expected)) +
                  1e-34);
        }
      }
    }
  });
}

TEST(ActivationSlopes, GeluGated) {
  for_each_target([] {
    constexpr std::int64_t kCols = 43;
    auto random = generator(8);
    Matrix<double> gate_up(3, 2 * kCols, 1), y(3, kCols), dy(3, kCols), d(3, 2 * kCols, 2);
    gate_up.fill_normal(random, 0, 2), dy.fill_normal(random);
    host::swiglu_backward<double>({3, kCols}, gate_up, dy, d, Gate::kGeluTanh);
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t c = 0; c < 2 * kCols; ++c) {
        const double expected = slope(gate_up.at(r, c), [&] {
          host::swiglu<double>({3, kCols}, gate_up, y, Gate::kGeluTanh);
          return y.get(r, c % kCols) * dy.get(r, c % kCols);
        });
        ASSERT_NEAR(d.get(r, c), expected, kSlopeBound) << r << ", " << c;
      }
    }
  });
}

TYPED_TEST(Activations, ScaleRoundsOnceAndMayAlias) {
  using T = TypeParam;
  using A = Acc<T>;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      auto random = generator(9);
      Matrix<T> x(5, cols, 3), y(5, cols, 2);
      x.fill_normal(random);
      const A factor = static_cast<A>(std::sqrt(3072.0));  // no number of bf16
      host::scale<T>({5, cols}, x, factor, y);
      y.expect_gaps_intact("y");
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const A product = static_cast<A>(x.at(r, c)) * factor;
          ASSERT_EQ(y.get(r, c), static_cast<double>(static_cast<A>(static_cast<T>(product))));
        }
      }
      host::scale<T>({5, cols}, x, factor, x);
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) ASSERT_EQ(x.get(r, c), y.get(r, c));
      }
    }
  });
}

// The narrower types against the double kernels, in place as the engine uses them.
TYPED_TEST(Activations, BackwardMatchesDoubleInPlace) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      auto random = generator(5);
      Matrix<T> x(5, 2 * cols, 3), dy(5, cols, 2), gelu_x(5, cols, 1);
      x.fill_normal(random, 0, 2), dy.fill_normal(random), gelu_x.fill_normal(random, 0, 2);
      auto xd = copy_as<double>(x), dyd = copy_as<double>(dy), gxd = copy_as<double>(gelu_x);
      Matrix<T> gelu_gated = x;
      auto gelu_gated_d = xd;
      host::swiglu_backward<T>({5, cols}, gelu_gated, dy, gelu_gated, Gate::kGeluTanh);
      host::swiglu_backward<double>({5, cols}, gelu_gated_d, dyd, gelu_gated_d, Gate::kGeluTanh);
      host::swiglu_backward<T>({5, cols}, x, dy, x);
      host::swiglu_backward<double>({5, cols}, xd, dyd, xd);
      host::gelu_backward<T>({5, cols}, gelu_x, dy, dy);
      host::gelu_backward<double>({5, cols}, gxd, dyd, dyd);
      x.expect_gaps_intact("x"), dy.expect_gaps_intact("dy");
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < 2 * cols; ++c) {
          // Values are below 10 and 1 - s errs by units of 1; |argument| is below 20.
          ASSERT_NEAR(x.get(r, c), xd.get(r, c), bound<T>(xd.get(r, c), activation_roundings(20), 50));
          const double gelu = gelu_gated_d.get(r, c);
          ASSERT_NEAR(gelu_gated.get(r, c), gelu, bound<T>(gelu, activation_roundings(60), 50));
        }
        for (std::int64_t c = 0; c < cols; ++c) {
          ASSERT_NEAR(dy.get(r, c), dyd.get(r, c), bound<T>(dyd.get(r, c), activation_roundings(60), 20));
        }
      }
    }
  });
}

TYPED_TEST(Activations, AddRoundsOnceAndMayAlias) {
  using T = TypeParam;
  for_each_target([] {
    for (const std::int64_t cols : kWidths) {
      auto random = generator(6);
      Matrix<T> a(5, cols, 3), b(5, cols, 1), out(5, cols, 2);
      a.fill_normal(random), b.fill_normal(random);
      host::add<T>({5, cols}, a, b, out);
      out.expect_gaps_intact("out");
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const auto sum = static_cast<Acc<T>>(a.at(r, c)) + static_cast<Acc<T>>(b.at(r, c));
          ASSERT_EQ(out.get(r, c), static_cast<double>(static_cast<Acc<T>>(static_cast<T>(sum))));
        }
      }
      host::add<T>({5, cols}, a, b, a);
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) ASSERT_EQ(a.get(r, c), out.get(r, c));
      }
    }
  });
}

// An element's bits depend on its value, not on the place, the split or the number of threads.
TYPED_TEST(Activations, SameBitsEverywhere) {
  using T = TypeParam;
  constexpr std::int64_t kCols = 40013;
  Matrix<T> x(1, kCols), first(1, kCols);
  for (std::int64_t c = 0; c < kCols; ++c) x.set(0, c, 0.37 + static_cast<double>(c % 5));
  for_each_thread_count([&](int threads) {
    Matrix<T> y(1, kCols);
    host::gelu<T>({1, kCols}, x, y);
    for (std::int64_t c = 5; c < kCols; ++c) ASSERT_EQ(y.get(0, c), y.get(0, c % 5)) << c;
    if (threads == 1) first = y;
    EXPECT_TRUE(y.same_bits(first));
  });
}

}  // namespace
}  // namespace zg::test
