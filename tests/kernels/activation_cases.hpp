// Activations, sums and multiples of elements against fp64 formulae, for the kernels of the host and of CUDA.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/activation_bounds.hpp"

namespace zg::test {

// Normal numbers of deviation 3, among them those where functions end: 0, where exponents are bounded,
// beyond.
template <class T>
void fill_arguments(Operand<T>& x, std::mt19937_64& random) {
  x.fill_normal(random, 0, 3);
  const double large = std::min(1e25, overflow_of<T>() / 2);
  const double ends[] = {0, -10, 40, -40, 100, -100, large, -large, -0.0};
  for (std::int64_t i = 0; i < 9 && i < x.rows() * x.cols(); ++i) x.set(i % x.rows(), i / x.rows(), ends[i]);
}

template <class K>
class Elementwise : public testing::Test {
 protected:
  template <class Body>
  static void for_each_shape(const Body& body) {
    K::for_each_variant([&] {
      for (const std::int64_t cols : K::columns()) {
        for (const Layout layout : K::kLayouts) {
          SCOPED_TRACE(testing::Message() << cols << " columns, " << layout);
          body(cols, layout);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    });
  }
  // Calls kernel(x, x's or another's view) in both ways. What was written must be expected(r, c), exactly.
  template <class T, class Kernel, class Expected>
  static void expect_rounded_once(Operand<T>& x, Layout layout, const Kernel& kernel,
                                  const Expected& expected) {
    Operand<T> out(x.rows(), x.cols(), apart(layout, 1)), rounded(x.rows(), x.cols());
    for (std::int64_t r = 0; r < x.rows(); ++r) {
      for (std::int64_t c = 0; c < x.cols(); ++c) rounded.at(r, c) = static_cast<T>(expected(r, c));
    }
    x.send(), out.send();
    kernel(out.view());
    out.fetch("out");
    EXPECT_TRUE(out.same_bits(rounded));
    kernel(x.view());
    x.fetch("in place");
    EXPECT_TRUE(x.same_bits(rounded)) << "in place";
  }
};
TYPED_TEST_SUITE_P(Elementwise);

TYPED_TEST_P(Elementwise, AddRoundsOnceAndMayAlias) {
  using T = typename TypeParam::T;
  auto random = generator(1);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    for (const bool first : {true, false}) {
      Operand<T> x(5, cols, layout), other(5, cols, apart(layout, 2));
      x.fill_normal(random), other.fill_normal(random).send();
      this->expect_rounded_once(
          x, layout,
          [&](Strided<T> out) {
            TypeParam::add(Extent{5, cols}, first ? x.read() : other.read(), first ? other.read() : x.read(),
                           out);
          },
          [&](std::int64_t r, std::int64_t c) {
            return static_cast<Acc<T>>(x.at(r, c)) + static_cast<Acc<T>>(other.at(r, c));
          });
    }
  });
}

TYPED_TEST_P(Elementwise, ScaleRoundsOnceAndMayAlias) {
  using T = typename TypeParam::T;
  auto random = generator(9);
  const auto factor = static_cast<Acc<T>>(std::sqrt(3072.0));  // no number of bf16
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(5, cols, layout);
    x.fill_normal(random);
    this->expect_rounded_once(
        x, layout,
        [&](Strided<T> out) {
          TypeParam::scale(Extent{5, cols}, x.read(), factor, out);
        },
        [&](std::int64_t r, std::int64_t c) { return static_cast<Acc<T>>(x.at(r, c)) * factor; });
  });
}

// One operand alone that has gaps, or is not aligned, or has a pitch that is not, changes no bit.
TYPED_TEST_P(Elementwise, EachOperandsLayoutIsLookedAt) {
  using T = typename TypeParam::T;
  constexpr Layout kUsual[] = {{0, 0}, {16, 0}}, kOdd[] = {{16, 0}, {5, 0}, {0, 1}, kUnaligned};
  constexpr std::int64_t kCols = 48;
  auto random = generator(9);
  Operand<T> gate_up(3, 2 * kCols), dy(3, kCols), d_gate_up(3, 2 * kCols);
  gate_up.fill_normal(random).send(), dy.fill_normal(random).send(), d_gate_up.send();
  const auto backward = [](Operand<T>& x, Operand<T>& e, Operand<T>& out) {
    TypeParam::swiglu_backward(Extent{3, kCols}, x.read(), e.read(), out.view(), Gate::kSilu);
    out.fetch("d_gate_up");
  };
  backward(gate_up, dy, d_gate_up);
  for (const Layout usual : kUsual) {
    for (const Layout odd : kOdd) {
      for (const int which : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message() << usual << ", operand " << which << ": " << odd);
        Operand<T> x(3, 2 * kCols, which == 0 ? odd : usual), e(3, kCols, which == 1 ? odd : usual),
            out(3, 2 * kCols, which == 2 ? odd : usual);
        for (std::int64_t i = 0; i < 6 * kCols; ++i) {
          const std::int64_t r = i / (2 * kCols), c = i % (2 * kCols);
          x.at(r, c) = gate_up.at(r, c);
          if (c < kCols) e.at(r, c) = dy.at(r, c);
        }
        x.send(), e.send(), out.send();
        backward(x, e, out);
        EXPECT_TRUE(out.same_bits(d_gate_up));
        // A flat one: one input, one output, no halves.
        Operand<T> y(3, kCols, which == 2 ? odd : usual), sum(3, kCols);
        y.send(), sum.send();
        TypeParam::add(Extent{3, kCols}, e.read(), dy.read(), y.view());
        TypeParam::add(Extent{3, kCols}, dy.read(), dy.read(), sum.view());
        y.fetch("y"), sum.fetch("sum");
        EXPECT_TRUE(y.same_bits(sum));
      }
    }
  }
}

// More rows than a grid is high, and rows longer than a grid of one block each would take.
TYPED_TEST_P(Elementwise, ManyRowsAndLongRows) {
  using T = typename TypeParam::T;
  for (const Extent extent : {Extent{65'541, 2}, Extent{2, 70'001}}) {
    Operand<T> a(extent.rows, extent.cols, {1, 0}), out(extent.rows, extent.cols, {1, 0});
    for (std::int64_t r = 0; r < extent.rows; ++r) {
      for (std::int64_t c = 0; c < extent.cols; ++c) a.set(r, c, static_cast<double>((r * 7 + c) % 251));
    }
    a.send(), out.send();
    TypeParam::add(extent, a.read(), a.read(), out.view());
    out.fetch("out");
    for (std::int64_t r = 0; r < extent.rows; ++r) {
      for (std::int64_t c = 0; c < extent.cols; ++c) {
        ASSERT_EQ(out(r, c), 2 * a(r, c)) << r << ", " << c;  // exact: integers below 2 * 251
      }
    }
  }
}

TYPED_TEST_P(Elementwise, GeluMatchesItsDefinition) {
  using T = typename TypeParam::T;
  auto random = generator(3);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(5, cols, layout), y(5, cols, apart(layout, 1));
    fill_arguments(x, random);
    x.send(), y.send();
    TypeParam::gelu(Extent{5, cols}, x.read(), y.view());
    x.fetch("x"), y.fetch("y");
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) expect_value<TypeParam>(y(r, c), Gate::kGeluTanh, x(r, c), 1);
    }
  });
}

TYPED_TEST_P(Elementwise, GeluBackwardMatchesItsDefinition) {
  using T = typename TypeParam::T;
  auto random = generator(4);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    for (const bool in_place : {false, true}) {
      Operand<T> x(5, cols, layout), dy(5, cols, apart(layout, 1)), dx(5, cols, apart(layout, 2));
      fill_arguments(x, random);
      x.send(), dy.fill_normal(random).send(), dx.send();
      const Matrix<double> e = dy.values();
      Operand<T>& out = in_place ? dy : dx;
      TypeParam::gelu_backward(Extent{5, cols}, x.read(), dy.read(), out.view());
      out.fetch("dx");
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c)
          expect_slope<TypeParam>(out(r, c), Gate::kGeluTanh, x(r, c), e.get(r, c));
      }
    }
  });
}

TYPED_TEST_P(Elementwise, GatedMatchesItsDefinitionAndInPlace) {
  using T = typename TypeParam::T;
  auto random = generator(5);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    for (const Gate gate : {Gate::kSilu, Gate::kGeluTanh}) {
      SCOPED_TRACE(gate == Gate::kSilu ? "SiLU" : "GELU");
      Operand<T> gate_up(5, 2 * cols, layout), dy(5, cols, apart(layout, 1)), y(5, cols, apart(layout, 2)),
          both(5, 2 * cols, apart(layout, 3));
      gate_up.fill_normal(random, 0, gate == Gate::kSilu ? 3 : 2);
      for (std::int64_t i = 0; i < 5 && gate == Gate::kSilu; ++i) gate_up.set(i, 0, (i - 2) * 50.0);
      gate_up.send(), dy.fill_normal(random).send(), y.send(), both.send();
      const Matrix<double> before = gate_up.values();
      const Extent extent{5, cols};
      TypeParam::swiglu(extent, gate_up.read(), y.view(), gate);
      TypeParam::swiglu_backward(extent, gate_up.read(), dy.read(), both.view(), gate);
      TypeParam::swiglu_backward(extent, gate_up.read(), dy.read(), gate_up.view(), gate);
      y.fetch("y"), dy.fetch("dy"), both.fetch("d_gate_up"), gate_up.fetch("in place");
      EXPECT_TRUE(both.same_bits(gate_up));
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const double g = before.get(r, c), u = before.get(r, cols + c), e = dy(r, c);
          expect_value<TypeParam>(y(r, c), gate, g, u);
          expect_slope<TypeParam>(both(r, c), gate, g, e * u);
          expect_value<TypeParam>(both(r, cols + c), gate, g, e);
        }
      }
    }
  });
}

TYPED_TEST_P(Elementwise, NonFiniteValuesStayVisible) {
  using T = typename TypeParam::T;
  TypeParam::for_each_variant([] {
    Operand<T> x(1, 86), dy(1, 43), y(1, 43), dx(1, 86);
    const auto nan = std::numeric_limits<double>::quiet_NaN(),
               infinity = std::numeric_limits<double>::infinity();
    x.fill(1), dy.fill(1);
    x.set(0, 3, nan), x.set(0, 42, nan), x.set(0, 5, infinity), x.set(0, 6, -infinity);
    x.send(), dy.send(), y.send(), dx.send();
    const auto expect_nan = [](Operand<T>& out) {
      out.fetch("out");
      for (const std::int64_t c : {3, 42}) EXPECT_TRUE(std::isnan(out(0, c)));
      EXPECT_TRUE(std::isfinite(out(0, 4)));
    };
    constexpr Extent kExtent{1, 43};
    for (const bool gated : {false, true}) {
      gated ? TypeParam::swiglu(kExtent, x.read(), y.view(), Gate::kSilu)
            : TypeParam::gelu(kExtent, x.read(), y.view());
      expect_nan(y);
      EXPECT_EQ(y(0, 5), infinity);
      EXPECT_EQ(y(0, 6), -infinity);  // what is left of the sigmoid is not 0
      gated ? TypeParam::swiglu_backward(kExtent, x.read(), dy.read(), dx.view(), Gate::kSilu)
            : TypeParam::gelu_backward(kExtent, x.read(), dy.read(), dx.view());
      expect_nan(dx);
    }
  });
}

// An element's bits depend on its value, not on the place, the split or the order.
TYPED_TEST_P(Elementwise, SameBitsEverywhere) {
  using T = typename TypeParam::T;
  constexpr std::int64_t kCols = 40013;
  Operand<T> x(1, kCols), y(1, kCols);
  for (std::int64_t c = 0; c < kCols; ++c) x.set(0, c, 0.37 + static_cast<double>(c % 5));
  std::vector<double> first;
  TypeParam::for_each_order([&] {
    x.send(), y.fill(NAN).send();
    TypeParam::gelu(Extent{1, kCols}, x.read(), y.view());
    y.fetch("y");
    for (std::int64_t c = 0; c < kCols && first.size() < 5; ++c) first.push_back(y(0, c));
    for (std::int64_t c = 0; c < kCols; ++c) ASSERT_EQ(y(0, c), first[static_cast<std::size_t>(c % 5)]) << c;
  });
}

TYPED_TEST_P(Elementwise, NothingOfNothing) {
  using T = typename TypeParam::T;
  Operand<T> x(1, 8), y(1, 8);
  x.fill(1).send(), y.fill(3).send();
  TypeParam::gelu(Extent{0, 8}, x.read(), y.view());
  TypeParam::add(Extent{1, 0}, x.read(), x.read(), y.view());
  y.fetch("y");
  for (std::int64_t c = 0; c < 8; ++c) EXPECT_EQ(y(0, c), 3);
}

REGISTER_TYPED_TEST_SUITE_P(Elementwise, AddRoundsOnceAndMayAlias, ScaleRoundsOnceAndMayAlias,
                            EachOperandsLayoutIsLookedAt, ManyRowsAndLongRows, GeluMatchesItsDefinition,
                            GeluBackwardMatchesItsDefinition, GatedMatchesItsDefinitionAndInPlace,
                            NonFiniteValuesStayVisible, SameBitsEverywhere, NothingOfNothing);

// K's kernels in double.
template <class K>
class ActivationSlopes : public testing::Test {
 protected:
  // forward and backward of rows of x with `cols` columns, which give rows of y with 43.
  template <class Forward, class Backward>
  static void expect_slopes(std::int64_t cols, const Forward& forward, const Backward& backward) {
    K::for_each_variant([&] {
      auto random = generator(2);
      Operand<double> x(3, cols, {5, 0}), y(3, 43, {1, 0}), dy(3, 43), dx(3, cols, {2, 0});
      x.fill_normal(random, 0, 2).send(), dy.fill_normal(random).send(), dx.send();
      backward(Extent{3, 43}, x, dy, dx);
      dx.fetch("dx");
      for (std::int64_t r = 0; r < 3; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const double expected = slope(x.at(r, c), [&] {
            x.send(), y.send();
            forward(Extent{3, 43}, x, y);
            y.fetch("y");
            return y(r, c % 43) * dy(r, c % 43);
          });
          ASSERT_NEAR(dx(r, c), expected, kSlopeBound) << r << ", " << c;
        }
      }
    });
  }
  static void expect_gated(Gate gate) {
    expect_slopes(
        86, [&](Extent e, auto& x, auto& y) { K::swiglu(e, x.read(), y.view(), gate); },
        [&](Extent e, auto& x, auto& dy, auto& dx) {
          K::swiglu_backward(e, x.read(), dy.read(), dx.view(), gate);
        });
  }
};
TYPED_TEST_SUITE_P(ActivationSlopes);
TYPED_TEST_P(ActivationSlopes, Gelu) {
  this->expect_slopes(
      43, [](Extent e, auto& x, auto& y) { TypeParam::gelu(e, x.read(), y.view()); },
      [](Extent e, auto& x, auto& dy, auto& dx) {
        TypeParam::gelu_backward(e, x.read(), dy.read(), dx.view());
      });
}
TYPED_TEST_P(ActivationSlopes, SwiGlu) {
  this->expect_gated(Gate::kSilu);
}
TYPED_TEST_P(ActivationSlopes, GeluGated) {
  this->expect_gated(Gate::kGeluTanh);
}
REGISTER_TYPED_TEST_SUITE_P(ActivationSlopes, Gelu, SwiGlu, GeluGated);

}  // namespace zg::test
