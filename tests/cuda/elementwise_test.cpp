// Elementwise kernels against fp64 formulae.
#include <numbers>

#include "tests/cuda/operand.hpp"
#include "ziggurat/kernels/rope.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaElementwise : public testing::Test {};
TYPED_TEST_SUITE(CudaElementwise, StorageTypes);

// Less than a pack, packs with and without a rest, more than one block.
constexpr std::int64_t kColumns[] = {1, 7, 8, 43, 256, 257, 4104};

template <class Body>
void for_each_shape(const Body& body) {
  for (const std::int64_t cols : kColumns) {
    for (const Layout layout : kLayouts) {
      SCOPED_TRACE(testing::Message() << cols << " columns, " << layout);
      body(cols, layout);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Normal numbers of deviation 3, among them those where functions end: 0, where exponents are bounded,
// beyond.
template <class T>
void fill_arguments(Operand<T>& x, std::mt19937_64& random) {
  x.fill_normal(random, 0, 3);
  const double large = std::min(1e25, overflow_of<T>() / 2);
  const double ends[] = {0, -10, 40, -40, 100, -100, large, -large, -0.0};
  for (std::int64_t i = 0; i < 9 && i < x.rows() * x.cols(); ++i) x.set(i % x.rows(), i / x.rows(), ends[i]);
}

TYPED_TEST(CudaElementwise, AddsRows) {
  using T = TypeParam;
  auto random = generator(1);
  for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> a(5, cols, layout), b(5, cols, layout), out(5, cols, layout);
    a.fill_normal(random).send(), b.fill_normal(random).send(), out.send();
    cuda::add<T>(launch(), {5, cols}, a.read(), b.read(), out.view());
    out.fetch("out");
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const double sum = a(r, c) + b(r, c);
        ASSERT_NEAR(out(r, c), sum, bound<T>(sum, 1, std::abs(sum)));
      }
    }
  });
}

TYPED_TEST(CudaElementwise, AddsInPlace) {
  using T = TypeParam;
  auto random = generator(2);
  for (const std::int64_t cols : {43, 264}) {
    Operand<T> a(5, cols), b(5, cols), out(5, cols);
    a.fill_normal(random).send(), b.fill_normal(random).send(), out.send();
    cuda::add<T>(launch(), {5, cols}, a.read(), b.read(), out.view());
    out.fetch("out");
    for (Operand<T>* in_place : {&a, &b}) {
      a.send(), b.send();
      cuda::add<T>(launch(), {5, cols}, a.read(), b.read(), in_place->view());
      Matrix<T> before(5, cols);
      for (std::int64_t i = 0; i < 5 * cols; ++i)
        before.at(i / cols, i % cols) = in_place->at(i / cols, i % cols);
      in_place->fetch("in place");
      EXPECT_TRUE(in_place->same_bits(out));
      for (std::int64_t i = 0; i < 5 * cols; ++i)
        in_place->at(i / cols, i % cols) = before.at(i / cols, i % cols);
    }
  }
}

// One operand alone that has gaps, or is not aligned, or has a pitch that is not, changes no bit.
TYPED_TEST(CudaElementwise, EachOperandsLayoutIsLookedAt) {
  using T = TypeParam;
  constexpr Layout kUsual[] = {{0, 0}, {16, 0}}, kOdd[] = {{16, 0}, {5, 0}, {0, 1}, {15, 1}};
  constexpr std::int64_t kCols = 48;
  auto random = generator(9);
  Operand<T> gate_up(3, 2 * kCols), dy(3, kCols), d_gate_up(3, 2 * kCols);
  gate_up.fill_normal(random).send(), dy.fill_normal(random).send(), d_gate_up.send();
  cuda::swiglu_backward<T>(launch(), {3, kCols}, gate_up.read(), dy.read(), d_gate_up.view());
  d_gate_up.fetch("d_gate_up");
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
        cuda::swiglu_backward<T>(launch(), {3, kCols}, x.read(), e.read(), out.view());
        out.fetch("d_gate_up");
        EXPECT_TRUE(out.same_bits(d_gate_up));
        // A flat one: one input, one output, no halves.
        Operand<T> y(3, kCols, which == 2 ? odd : usual), sum(3, kCols);
        y.send(), sum.send();
        cuda::add<T>(launch(), {3, kCols}, e.read(), dy.read(), y.view());
        cuda::add<T>(launch(), {3, kCols}, dy.read(), dy.read(), sum.view());
        y.fetch("y"), sum.fetch("sum");
        EXPECT_TRUE(y.same_bits(sum));
      }
    }
  }
}

// More rows than a grid is high, and rows longer than a grid of one block each would take.
TYPED_TEST(CudaElementwise, ManyRowsAndLongRows) {
  using T = TypeParam;
  for (const Extent extent : {Extent{65'541, 2}, Extent{2, 70'001}}) {
    Operand<T> a(extent.rows, extent.cols, {1, 0}), out(extent.rows, extent.cols, {1, 0});
    for (std::int64_t r = 0; r < extent.rows; ++r) {
      for (std::int64_t c = 0; c < extent.cols; ++c) a.set(r, c, static_cast<double>((r * 7 + c) % 251));
    }
    a.send(), out.send();
    cuda::add<T>(launch(), extent, a.read(), a.read(), out.view());
    out.fetch("out");
    for (std::int64_t r = 0; r < extent.rows; ++r) {
      for (std::int64_t c = 0; c < extent.cols; ++c) {
        ASSERT_EQ(out(r, c), 2 * a(r, c)) << r << ", " << c;  // exact: integers below 2 * 251
      }
    }
  }
}

// GPT-2 writes 0.5 x (1 + tanh(u)); as x / (1 + exp(-2u)) it does not cancel, so that the bound can be
// relative.
double two_u(double x) {
  return 2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
}
double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

// In roundings of the type of arithmetic. CUDA states 2 + 1.173 |x| units in the last place for __expf, which
// are twice as many roundings; the argument is rounded up to five times and stands in the exponent;
// __fdividef has two units; a handful of roundings follow. (For arguments beyond 87 the result is below
// 1e-37.)
double sigmoid_roundings(double argument) {
  return 20 + 8 * std::min(std::abs(argument), 87.0);
}
// What the bound of the exponent leaves where the limit is 0. It errs itself: by 104 units of __expf, far
// less than by its rounding to T, 2^-8 at most.
double floor_of(double x) {
  return std::abs(x) * std::exp(-87.0) * (1 + 0x1p-7);
}

TYPED_TEST(CudaElementwise, Gelu) {
  using T = TypeParam;
  auto random = generator(3);
  for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(5, cols, layout), y(5, cols, layout);
    fill_arguments(x, random);
    x.send(), y.send();
    cuda::gelu<T>(launch(), {5, cols}, x.read(), y.view());
    y.fetch("y");
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const double v = x(r, c), b = std::clamp(v, -30.0, 30.0), expected = v * sigmoid(two_u(b));
        ASSERT_NEAR(y(r, c), expected,
                    bound<T>(expected, sigmoid_roundings(two_u(b)), std::abs(expected)) + floor_of(v))
            << v;
      }
    }
  });
}

TYPED_TEST(CudaElementwise, GeluBackward) {
  using T = TypeParam;
  auto random = generator(4);
  for_each_shape([&](std::int64_t cols, Layout layout) {
    for (const bool in_place : {false, true}) {
      Operand<T> x(5, cols, layout), dy(5, cols, layout), dx(5, cols, layout);
      fill_arguments(x, random);
      x.send(), dy.fill_normal(random).send(), dx.send();
      Operand<T>& out = in_place ? dy : dx;
      const std::vector<double> e = [&] {
        std::vector<double> values;
        for (std::int64_t i = 0; i < 5 * cols; ++i) values.push_back(dy(i / cols, i % cols));
        return values;
      }();
      cuda::gelu_backward<T>(launch(), {5, cols}, x.read(), dy.read(), out.view());
      out.fetch("dx");
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          // s + x s (1 - s) d(2u)/dx. The terms may cancel: the bound is of their sizes; 1 - s errs by a
          // rounding of 1, and s by those of the sigmoid.
          const double v = x(r, c), b = std::clamp(v, -30.0, 30.0), s = sigmoid(two_u(b));
          const double slope = 2 * std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * b * b);
          const double d = e[static_cast<std::size_t>(r * cols + c)];
          const double expected = d * (s + v * slope * s * sigmoid(-two_u(b)));
          const double scale = std::abs(d) * s * (1 + std::abs(v) * slope);
          ASSERT_NEAR(out(r, c), expected,
                      bound<T>(expected, sigmoid_roundings(two_u(b)), scale) +
                          floor_of(d) * (1 + std::abs(v) * slope))
              << v << (in_place ? " in place" : "");
        }
      }
    }
  });
}

TYPED_TEST(CudaElementwise, Swiglu) {
  using T = TypeParam;
  auto random = generator(5);
  for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> gate_up(5, 2 * cols, layout), y(5, cols, layout);
    gate_up.fill_normal(random, 0, 3);
    for (std::int64_t i = 0; i < 5; ++i) gate_up.set(i, 0, (i - 2) * 50.0);
    gate_up.send(), y.send();
    cuda::swiglu<T>(launch(), {5, cols}, gate_up.read(), y.view());
    y.fetch("y");
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const double g = gate_up(r, c), u = gate_up(r, cols + c), expected = g * sigmoid(g) * u;
        ASSERT_NEAR(y(r, c), expected,
                    bound<T>(expected, sigmoid_roundings(g), std::abs(expected)) + floor_of(g * u));
      }
    }
  });
}

TYPED_TEST(CudaElementwise, SwigluBackward) {
  using T = TypeParam;
  auto random = generator(6);
  for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> gate_up(5, 2 * cols, layout), dy(5, cols, layout), both(5, 2 * cols, layout);
    gate_up.fill_normal(random, 0, 3);
    for (std::int64_t i = 0; i < 5; ++i) gate_up.set(i, 0, (i - 2) * 50.0);
    Operand<T> in_place(5, 2 * cols, layout);
    for (std::int64_t i = 0; i < 10 * cols; ++i)
      in_place.set(i / cols / 2, i % (2 * cols), gate_up(i / cols / 2, i % (2 * cols)));
    gate_up.send(), in_place.send(), dy.fill_normal(random).send(), both.send();
    cuda::swiglu_backward<T>(launch(), {5, cols}, gate_up.read(), dy.read(), both.view());
    cuda::swiglu_backward<T>(launch(), {5, cols}, in_place.read(), dy.read(), in_place.view());
    both.fetch("d_gate_up"), in_place.fetch("in place");
    EXPECT_TRUE(both.same_bits(in_place));
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const double g = gate_up(r, c), u = gate_up(r, cols + c), e = dy(r, c), s = sigmoid(g);
        // silu' = s + g s (1 - s), whose terms may cancel.
        const double d_gate = e * u * (s + g * s * sigmoid(-g)), d_up = e * g * s;
        const double roundings = sigmoid_roundings(g), scale = std::abs(e * u) * s * (1 + std::abs(g));
        ASSERT_NEAR(both(r, c), d_gate,
                    bound<T>(d_gate, roundings, scale) + floor_of(e * u) * (1 + std::abs(g)));
        ASSERT_NEAR(both(r, cols + c), d_up, bound<T>(d_up, roundings, std::abs(d_up)) + floor_of(e * g));
      }
    }
  });
}

TYPED_TEST(CudaElementwise, GeluGated) {
  using T = TypeParam;
  auto random = generator(7);
  for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> gate_up(5, 2 * cols, layout), dy(5, cols, layout), y(5, cols, layout),
        both(5, 2 * cols, layout);
    gate_up.fill_normal(random, 0, 2);
    gate_up.send(), dy.fill_normal(random).send(), y.send(), both.send();
    cuda::swiglu<T>(launch(), {5, cols}, gate_up.read(), y.view(), Gate::kGeluTanh);
    cuda::swiglu_backward<T>(launch(), {5, cols}, gate_up.read(), dy.read(), both.view(), Gate::kGeluTanh);
    y.fetch("y"), both.fetch("d_gate_up");
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const double g = gate_up(r, c), u = gate_up(r, cols + c), e = dy(r, c), s = sigmoid(two_u(g));
        const double roundings = sigmoid_roundings(two_u(g)), value = g * s;
        ASSERT_NEAR(y(r, c), value * u,
                    bound<T>(value * u, roundings, std::abs(value * u)) + floor_of(g * u));
        const double slope = 2 * std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * g * g);
        const double d_gate = e * u * (s + g * slope * s * sigmoid(-two_u(g))), d_up = e * value;
        const double scale = std::abs(e * u) * s * (1 + std::abs(g) * slope);
        ASSERT_NEAR(both(r, c), d_gate,
                    bound<T>(d_gate, roundings, scale) + floor_of(e * u) * (1 + std::abs(g) * slope));
        ASSERT_NEAR(both(r, cols + c), d_up, bound<T>(d_up, roundings, std::abs(d_up)) + floor_of(e * g));
      }
    }
  });
}

// Rounded once, with the same bits as on the host; in place, too.
TYPED_TEST(CudaElementwise, Scale) {
  using T = TypeParam;
  using A = Acc<T>;
  auto random = generator(8);
  const A factor = static_cast<A>(std::sqrt(3072.0));
  for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(5, cols, layout), y(5, cols, layout), expected(5, cols, layout);
    x.fill_normal(random);
    host::scale<T>({5, cols}, x.host_view(), factor, expected.host_view());
    x.send(), y.send();
    cuda::scale<T>(launch(), {5, cols}, x.read(), factor, y.view());
    cuda::scale<T>(launch(), {5, cols}, x.read(), factor, x.view());
    y.fetch("y"), x.fetch("x");
    EXPECT_TRUE(y.same_bits(expected) && x.same_bits(expected));
  });
}

TYPED_TEST(CudaElementwise, NonFiniteValuesStayVisible) {
  using T = TypeParam;
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
  for (const bool gated : {false, true}) {
    gated ? cuda::swiglu<T>(launch(), {1, 43}, x.read(), y.view())
          : cuda::gelu<T>(launch(), {1, 43}, x.read(), y.view());
    expect_nan(y);
    EXPECT_EQ(y(0, 5), infinity);
    EXPECT_EQ(y(0, 6), -infinity);  // as on the host: what is left of the sigmoid is not 0
    gated ? cuda::swiglu_backward<T>(launch(), {1, 43}, x.read(), dy.read(), dx.view())
          : cuda::gelu_backward<T>(launch(), {1, 43}, x.read(), dy.read(), dx.view());
    expect_nan(dx);
  }
}

TYPED_TEST(CudaElementwise, NothingOfNothing) {
  using T = TypeParam;
  Operand<T> x(1, 8), y(1, 8);
  x.fill(1).send(), y.fill(3).send();
  cuda::gelu<T>(launch(), {0, 8}, x.read(), y.view());
  cuda::add<T>(launch(), {1, 0}, x.read(), x.read(), y.view());
  cuda::dropout<T>(launch(), {0, 0}, x.read(), {.rate = 0.5}, y.view());
  cuda::rope<T>(
      launch(), 0,
      {.x = {y.data(), 8}, .positions = 1, .heads = 1, .head_size = 8, .table = rope_table(10000, 4)});
  cuda::rope<T>(
      launch(), 1,
      {.x = {y.data(), 8}, .positions = 1, .heads = 0, .head_size = 8, .table = rope_table(10000, 4)});
  y.fetch("y");
  for (std::int64_t c = 0; c < 8; ++c) EXPECT_EQ(y(0, c), 3);
}

struct RopeCase {
  std::int64_t rows, time, heads, head_size;
};

// The angle p * theta^(-i / half) is made in double: the power, the quotient by pi and the product are three
// roundings and an error of pow, 4 * 2^-53 of the angle together. float: what is left of whole quarter turns,
// at most pi/4, is rounded to float (2^-25 relative) and multiplied by pi within sincospif, whose own error
// is 1 unit in the last place: at most 4 roundings of 1. double: sincospi has 2 units, 4 roundings; the
// emulation multiplies what is left of whole turns, up to 2 pi, by a rounded pi: 2 pi * 2^-53 and a rounding
// of it, 16 roundings in all.
template <class T>
void expect_turned(const RopeCase& k, double theta, Layout layout, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << k.rows << " rows, time " << k.time << ", " << k.heads << " heads of "
                                  << k.head_size << ", " << layout);
  const std::int64_t width = k.heads * k.head_size, half = k.head_size / 2;
  // Columns behind the heads stay as they are.
  Operand<T> x(k.rows, width + 2, layout), before(k.rows, width + 2, layout);
  x.fill_normal(random);
  for (std::int64_t r = 0; r < k.rows; ++r) {
    for (std::int64_t c = 0; c < width + 2; ++c) before.set(r, c, x(r, c));
  }
  for (const bool inverse : {false, true}) {
    x.send();
    cuda::rope<T>(launch(), k.rows,
                  {.x = {x.data(), x.view().ld},
                   .positions = k.time,
                   .heads = k.heads,
                   .head_size = k.head_size,
                   .table = rope_table(theta, half),
                   .inverse = inverse});
    x.fetch("x");
    for (std::int64_t r = 0; r < k.rows; ++r) {
      for (std::int64_t c = 0; c < width; ++c) {
        const std::int64_t i = c % k.head_size % half, left = c - c % k.head_size + i;
        const long double angle = static_cast<long double>(r % k.time) *
                                  std::pow(static_cast<long double>(theta),
                                           -static_cast<long double>(i) / static_cast<long double>(half));
        const double a = before(r, left), b = before(r, left + half);
        const double cosine = static_cast<double>(std::cos(angle));
        const double sine = static_cast<double>(std::sin(angle)) * (inverse ? -1 : 1);
        const double expected = c == left ? a * cosine - b * sine : b * cosine + a * sine;
        const double angle_error = 4 * 0x1p-53 * static_cast<double>(angle);
        const double size = std::abs(a) + std::abs(b);
        ASSERT_NEAR(x(r, c), expected,
                    bound<T>(expected, (std::is_same_v<T, double> ? 16 : 4) + 3, size) + angle_error * size)
            << r << ", " << c << (inverse ? " inverse" : "");
        x.set(r, c, before(r, c));
      }
      for (const std::int64_t c : {width, width + 1}) ASSERT_EQ(x(r, c), before(r, c));
    }
  }
}

TYPED_TEST(CudaElementwise, RopeTurnsPairs) {
  auto random = generator(7);
  // Heads of packs and not, fewer and more heads than a thread takes, and the most pairs.
  for (const RopeCase& k : {RopeCase{7, 3, 3, 64}, RopeCase{5, 9, 9, 16}, RopeCase{3, 2, 19, 6},
                            RopeCase{4, 4, 1, 2}, RopeCase{3, 3, 1, 512}}) {
    for (const Layout layout : kLayouts) {
      expect_turned<TypeParam>(k, 10000, layout, random);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Part of each head, times an amplitude either way, by places in documents.
TYPED_TEST(CudaElementwise, RopeByATable) {
  using T = TypeParam;
  constexpr std::int64_t kRows = 10, kTime = 5, kHeads = 9;
  std::vector<std::int32_t> first = {0, 0, 2, 2, 2, 0, 1, 2, 2, 4};
  auto random = generator(9);
  for (const auto& [head_size, pairs] : {std::pair<std::int64_t, std::int64_t>{64, 16}, {24, 12}, {43, 7}}) {
    RopeTable table = rope_table(10000, pairs);
    table.amplitude = 1.3;
    for (std::int64_t i = 0; i < pairs; ++i)
      table.frequency[static_cast<std::size_t>(i)] *= 1 - 0.4 / static_cast<double>(i + 1);
    for (const Layout layout : kLayouts) {
      for (const bool inverse : {false, true}) {
        Operand<T> x(kRows, kHeads * head_size, layout), before(kRows, kHeads * head_size, layout);
        x.fill_normal(random);
        for (std::int64_t r = 0; r < kRows; ++r) {
          for (std::int64_t c = 0; c < x.cols(); ++c) before.set(r, c, x(r, c));
        }
        x.send();
        OnDevice<std::int32_t> on_first(first);
        cuda::rope<T>(launch(), kRows,
                      {.x = {x.data(), x.view().ld},
                       .positions = kTime,
                       .heads = kHeads,
                       .head_size = head_size,
                       .table = table,
                       .inverse = inverse,
                       .first_keys = on_first.data()});
        x.fetch("x");
        for (std::int64_t r = 0; r < kRows; ++r) {
          for (std::int64_t c = 0; c < x.cols(); ++c) {
            const std::int64_t i = c % head_size % pairs, left = c - c % head_size + i;
            if (c % head_size >= 2 * pairs) {
              ASSERT_EQ(x(r, c), before(r, c));
              continue;
            }
            const double angle = static_cast<double>(r % kTime - first[static_cast<std::size_t>(r)]) *
                                 table.frequency[static_cast<std::size_t>(i)];
            const double a = before(r, left), b = before(r, left + pairs);
            const double cosine = 1.3 * std::cos(angle), sine = 1.3 * std::sin(angle) * (inverse ? -1 : 1);
            const double expected = c == left ? a * cosine - b * sine : b * cosine + a * sine;
            // As in expect_turned(), and of the amplitude's product; angles are at most 4.
            ASSERT_NEAR(x(r, c), expected,
                        bound<T>(expected, (std::is_same_v<T, double> ? 32 : 4) + 5,
                                 1.3 * (std::abs(a) + std::abs(b))))
                << r << ", " << c << ", head size " << head_size << (inverse ? " inverse" : "");
          }
        }
      }
    }
  }
}

// At position 131071 the first pair has turned 20861 times: a float has its angle within 2^-8.
TYPED_TEST(CudaElementwise, RopeIsAccurateInLongContexts) {
  using T = TypeParam;
  auto random = generator(8);
  constexpr std::int64_t kTime = 131'072;
  std::uniform_int_distribution<std::int64_t> position(kTime / 2, kTime - 1);
  for (const double theta : {10000.0, 500000.0}) expect_turned<T>({200, 131'072, 1, 16}, theta, {}, random);
  // Row r of so many has position r: reached by looking at the last rows of a long matrix.
  const std::int64_t rows = kTime, half = 4;
  std::vector<T> x(static_cast<std::size_t>(rows * 2 * half));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i % 8 < 4 ? 1.0f : 0.0f);
  OnDevice<T> device(x);
  cuda::rope<T>(launch(), rows,
                {.x = {device.data(), 2 * half},
                 .positions = kTime,
                 .heads = 1,
                 .head_size = 2 * half,
                 .table = rope_table(10000, half)});
  device.fetch();
  for (int k = 0; k < 2000; ++k) {
    const std::int64_t p = k == 0 ? kTime - 1 : position(random), i = k % half;
    const long double angle =
        static_cast<long double>(p) * std::pow(10000.0L, -static_cast<long double>(i) / half);
    const double cosine = static_cast<double>(std::cos(angle)), sine = static_cast<double>(std::sin(angle));
    const double tolerance = 4 * 0x1p-53 * static_cast<double>(angle);
    const double roundings = (std::is_same_v<T, double> ? 16 : 4) + 3;
    const auto at = static_cast<std::size_t>(p * 2 * half + i);
    const auto value = [](T v) { return static_cast<double>(static_cast<Acc<T>>(v)); };
    ASSERT_NEAR(value(x[at]), cosine, bound<T>(cosine, roundings, 1) + tolerance) << p;
    ASSERT_NEAR(value(x[at + half]), sine, bound<T>(sine, roundings, 1) + tolerance) << p;
  }
}

}  // namespace
}  // namespace zg::test
