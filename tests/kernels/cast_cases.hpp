// Casts against the types' own conversions, bit for bit, and finish_gradient against sums in long double, for
// the kernels of the host and of CUDA.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/on_device.hpp"

namespace zg::test {

// All 65536 upper halves of a float with lower halves at, beside and between the ties of bf16.
inline std::vector<float> bf16_rounding_cases() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  return values;
}

// The magnitude of a half, by its definition; 2^16 stands for infinity.
inline double half_magnitude(std::uint32_t bits) {
  const std::uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
  if (exponent == 0) return std::ldexp(static_cast<double>(fraction), -24);
  return std::ldexp(1024.0 + fraction, static_cast<int>(exponent) - 25);
}

// The cases of bf16, and every half and every tie between two neighbours, with the floats on either side.
inline std::vector<float> half_rounding_cases() {
  std::vector<float> values = bf16_rounding_cases();
  for (std::uint32_t half = 0; half <= 0x7c00u; ++half) {
    const double exact = half_magnitude(half), tie = (exact + half_magnitude(half + 1)) / 2;
    for (const double at : {exact, tie}) {
      const float f = static_cast<float>(at);
      EXPECT_EQ(static_cast<double>(f), at);
      for (const float v : {std::nextafter(f, 0.0f), f, std::nextafter(f, 1e30f)}) {
        values.push_back(v), values.push_back(-v);
      }
    }
  }
  return values;
}

template <class T>
double value_of(T x) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<double>(static_cast<float>(x));
  } else {
    return static_cast<double>(x);
  }
}

// Converts x by the types' own conversions; a double becomes a float on its way to 16 bits.
template <class Out, class In>
Out converted(In x) {
  if constexpr (std::is_same_v<In, Out>) {
    return x;
  } else if constexpr (sizeof(In) == 2 || sizeof(Out) == 2) {
    return static_cast<Out>(static_cast<float>(x));
  } else {
    return static_cast<Out>(x);
  }
}

template <class K, class T>
void expect_same(T actual, T expected, std::int64_t i) {
  if (!K::kExactNans && std::isnan(value_of(expected))) {
    ASSERT_TRUE(std::isnan(value_of(actual))) << i;
  } else {
    ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(T)), 0)
        << i << ": " << value_of(actual) << ", expected " << value_of(expected);
  }
}

// Rows in one piece, with gaps, from an address that is only an element's; whole tiles and parts of one.
template <class K, class In, class Out>
void expect_cast(const std::vector<In>& values) {
  const std::int64_t all = static_cast<std::int64_t>(values.size());
  struct Places {
    std::int64_t rows, cols, in_gap, in_offset, out_gap, out_offset;
  };
  std::vector<Places> layouts{{1, all, 0, 0, 0, 0}, {1, all - 1, 0, 1, 0, 0}, {1, all - 1, 0, 0, 0, 1}};
  for (const std::int64_t cols : {1, 3, 4, 43, 257, 4096, 5000}) {
    layouts.insert(layouts.end(), {{5, cols, 0, 0, 0, 0},
                                   {5, cols, 8, 0, 4, 0},
                                   {5, cols, 3, 0, 0, 0},
                                   {5, cols, 0, 0, 3, 0},
                                   {4, cols, 4, 1, 4, 0},
                                   {4, cols, 4, 0, 4, 1}});
  }
  for (const Places& at : layouts) {
    SCOPED_TRACE(testing::Message() << at.rows << " x " << at.cols << ", gaps " << at.in_gap << " and "
                                    << at.out_gap << ", offsets " << at.in_offset << " and "
                                    << at.out_offset);
    Matrix<In> in(at.rows + 1, at.cols, at.in_gap);
    Matrix<Out> out(at.rows + 1, at.cols, at.out_gap);
    for (std::int64_t i = 0; i < in.rows() * in.ld(); ++i) {
      in.data()[i] = values[static_cast<std::size_t>(i * (at.cols == all ? 1 : 977) % all)];
    }
    std::fill_n(out.data(), out.rows() * out.ld(), poison<Out>());
    OnDevice<In> d_in(in);
    OnDevice<Out> d_out(out);
    K::cast(Extent{at.rows, at.cols}, Strided<const In>(d_in.data() + at.in_offset, in.ld()),
            Strided<Out>(d_out.data() + at.out_offset, out.ld()));
    d_out.fetch();
    for (std::int64_t i = 0; i < out.rows() * out.ld(); ++i) {
      const std::int64_t place = i - at.out_offset, r = place / out.ld(), c = place % out.ld();
      const bool written = place >= 0 && r < at.rows && c < at.cols;
      const Out expected =
          written ? converted<Out>(in.data()[at.in_offset + r * in.ld() + c]) : poison<Out>();
      expect_same<K>(out.data()[i], expected, i);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

template <class K, class In>
void expect_casts(const std::vector<In>& values) {
  K::for_each_variant([&] {
    expect_cast<K, In, float>(values), expect_cast<K, In, bf16>(values);
    expect_cast<K, In, fp16>(values), expect_cast<K, In, double>(values);
  });
}

template <class K>
class Casts : public testing::Test {};
TYPED_TEST_SUITE_P(Casts);

TYPED_TEST_P(Casts, FromFloat) {
  expect_casts<TypeParam>(half_rounding_cases());
}

TYPED_TEST_P(Casts, FromSixteenBits) {
  std::vector<bf16> brains(65536);
  std::vector<fp16> halves(65536);
  for (std::size_t i = 0; i < 65536; ++i) brains[i].bits = halves[i].bits = static_cast<std::uint16_t>(i);
  expect_casts<TypeParam>(brains), expect_casts<TypeParam>(halves);
}

// Some of these doubles are ties of 16 bits only once they are floats.
TYPED_TEST_P(Casts, FromDouble) {
  std::vector<double> values;
  for (const float f : half_rounding_cases()) {
    values.push_back(static_cast<double>(f) * (1 + 0x1p-40));
    if (values.size() % 3 == 0) values.push_back(static_cast<double>(f) * 1e80);
  }
  values.push_back(1 + 0x1p-8 + 0x1p-40);
  EXPECT_EQ(value_of(converted<bf16>(values.back())), 1.0);
  expect_casts<TypeParam>(values);
}
REGISTER_TYPED_TEST_SUITE_P(Casts, FromFloat, FromSixteenBits, FromDouble);

// What finish_gradient() adds to, and returns: `before` and the squares. offset: elements in front of both
// arrays.
template <class K, class In, class Out>
double finish(const std::vector<In>& values, std::vector<Out>& written, double before = 0.5,
              std::int64_t offset = 0) {
  std::vector<In> in(static_cast<std::size_t>(offset), In{3});
  in.insert(in.end(), values.begin(), values.end());
  std::vector<Out> out(in.size() + 1, poison<Out>());
  std::vector<double> norm{before}, scratch(K::kSumPartials, NAN);
  OnDevice<In> d_in(in);
  OnDevice<Out> d_out(out);
  OnDevice<double> d_norm(norm), d_scratch(scratch);
  K::finish_gradient(static_cast<std::int64_t>(values.size()), d_in.data() + offset, d_out.data() + offset,
                     d_norm.data(), d_scratch.data());
  d_out.fetch(), d_norm.fetch();
  const Out guard = poison<Out>();
  for (std::int64_t i = 0; i < offset; ++i)
    EXPECT_EQ(std::memcmp(&out[static_cast<std::size_t>(i)], &guard, sizeof(Out)), 0);
  EXPECT_EQ(std::memcmp(&out.back(), &guard, sizeof(Out)), 0);
  written.assign(out.begin() + offset, out.end() - 1);
  return norm[0];
}

template <class K, class In, class Out>
void expect_finish(std::size_t n) {
  SCOPED_TRACE(testing::Message() << n << " elements");
  auto random = generator(n);
  std::normal_distribution<double> normal(0, 3);
  std::vector<In> in(n);
  for (auto& v : in) v = static_cast<In>(normal(random));
  std::vector<Out> out;
  const double norm = finish<K>(in, out);
  long double exact = 0.5L;
  for (std::size_t i = 0; i < n; ++i) {
    expect_same<K>(out[i], converted<Out>(in[i]), static_cast<std::int64_t>(i));
    if (testing::Test::HasFatalFailure()) return;
    exact += static_cast<long double>(value_of(out[i])) * static_cast<long double>(value_of(out[i]));
  }
  // Each square and each addition rounds once in double; all terms are positive. So the relative
  // error of a sum over n elements is below 2 n 2^-53, whatever the order.
  EXPECT_NEAR(norm, static_cast<double>(exact),
              2 * static_cast<double>(n + 1) * 0x1p-53 * static_cast<double>(exact));
  // The order depends on n alone: not on addresses, on the device's size or on what runs first.
  K::for_each_order([&] { EXPECT_EQ((finish<K>(in, out, 0.5, 1)), norm); });
}

template <class K>
class FinishGradient : public testing::Test {};
TYPED_TEST_SUITE_P(FinishGradient);

TYPED_TEST_P(FinishGradient, WritesAndAddsSquares) {
  for (const std::size_t n : {0u, 1u, 3u, 4u, 31u, 255u, 256u, 4095u, 4096u, 4097u, 50001u}) {
    expect_finish<TypeParam, float, bf16>(n), expect_finish<TypeParam, float, fp16>(n);
    expect_finish<TypeParam, float, float>(n), expect_finish<TypeParam, double, double>(n);
  }
}

// The written values count: too_large is infinite in Out.
template <class K, class Out>
void expect_not_finite(float too_large) {
  constexpr std::size_t kCount = 5000;
  for (const std::size_t where : {std::size_t{0}, std::size_t{17}, kCount - 1}) {
    std::vector<float> in(kCount, 0.5f);
    std::vector<Out> out;
    const auto norm = [&](float value) {
      in[where] = value;
      return finish<K>(in, out);
    };
    EXPECT_TRUE(std::isinf(norm(std::numeric_limits<float>::infinity())));
    EXPECT_TRUE(std::isnan(norm(std::numeric_limits<float>::quiet_NaN())));
    EXPECT_TRUE(std::isinf(norm(too_large)));
    EXPECT_TRUE(std::isinf(norm(-too_large)));
    EXPECT_TRUE(std::isfinite(norm(std::nextafter(too_large, 0.0f))));
  }
}

// The ties between the largest finite numbers and the powers of two that they do not reach.
TYPED_TEST_P(FinishGradient, NonFiniteValuesReachTheNorm) {
  TypeParam::for_each_variant([] {
    expect_not_finite<TypeParam, bf16>(0x1.ffp127f);
    expect_not_finite<TypeParam, fp16>(65520.0f);
  });
}
REGISTER_TYPED_TEST_SUITE_P(FinishGradient, WritesAndAddsSquares, NonFiniteValuesReachTheNorm);

}  // namespace zg::test
