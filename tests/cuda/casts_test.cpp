// Casts against the host's types, bit for bit; finish_gradient against sums in long double.
#include <algorithm>

#include "tests/cuda/harness.hpp"
#include "tests/kernels/cast_cases.hpp"

namespace zg::test {
namespace {

// The cases of bf16, and every half with the ties between two of them and the floats on either side.
std::vector<float> rounding_cases() {
  std::vector<float> values = bf16_rounding_cases();
  for (std::uint16_t half = 0; half < 0x7c00u; ++half) {
    fp16 low, high;
    low.bits = half, high.bits = static_cast<std::uint16_t>(half + 1);
    const float at = static_cast<float>(low), next = half == 0x7bff ? 65536.0f : static_cast<float>(high);
    for (const float f : {at, (at + next) / 2}) {
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

// By the types' own conversions; from double to 16 bits by way of float.
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

template <class T>
void expect_same(T actual, T expected, std::int64_t i) {
  if (std::isnan(value_of(expected))) {
    ASSERT_TRUE(std::isnan(value_of(actual))) << i;
  } else {
    ASSERT_EQ(std::memcmp(&actual, &expected, sizeof(T)), 0)
        << i << ": " << value_of(actual) << ", expected " << value_of(expected);
  }
}

// Rows in one piece, with gaps, from an address that is only an element's; whole tiles and parts of one.
template <class In, class Out>
void expect_cast(const std::vector<In>& values) {
  const std::int64_t all = static_cast<std::int64_t>(values.size());
  struct Layout {
    std::int64_t rows, cols, in_gap, in_offset, out_gap, out_offset;
  };
  std::vector<Layout> layouts{{1, all, 0, 0, 0, 0}, {1, all - 1, 0, 1, 0, 0}, {1, all - 1, 0, 0, 0, 1}};
  for (const std::int64_t cols : {1, 3, 4, 43, 257, 4096, 5000}) {
    layouts.insert(layouts.end(), {{5, cols, 0, 0, 0, 0},
                                   {5, cols, 8, 0, 4, 0},
                                   {5, cols, 3, 0, 0, 0},
                                   {5, cols, 0, 0, 3, 0},
                                   {4, cols, 4, 1, 4, 0},
                                   {4, cols, 4, 0, 4, 1}});
  }
  for (const Layout& at : layouts) {
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
    cuda::cast<In, Out>(launch(), {at.rows, at.cols}, {d_in.data() + at.in_offset, in.ld()},
                        {d_out.data() + at.out_offset, out.ld()});
    d_out.fetch();
    for (std::int64_t i = 0; i < out.rows() * out.ld(); ++i) {
      const std::int64_t place = i - at.out_offset, r = place / out.ld(), c = place % out.ld();
      const bool written = place >= 0 && r < at.rows && c < at.cols;
      const Out expected =
          written ? converted<Out>(in.data()[at.in_offset + r * in.ld() + c]) : poison<Out>();
      expect_same(out.data()[i], expected, i);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

template <class In>
void expect_casts(const std::vector<In>& values) {
  expect_cast<In, float>(values), expect_cast<In, bf16>(values);
  expect_cast<In, fp16>(values), expect_cast<In, double>(values);
}

TEST(CudaCasts, FromFloat) {
  expect_casts(rounding_cases());
}

TEST(CudaCasts, FromSixteenBits) {
  std::vector<bf16> brains(65536);
  std::vector<fp16> halves(65536);
  for (std::size_t i = 0; i < 65536; ++i) brains[i].bits = halves[i].bits = static_cast<std::uint16_t>(i);
  expect_casts(brains), expect_casts(halves);
}

// Among them doubles that are ties of 16 bits only once they are floats.
TEST(CudaCasts, FromDouble) {
  std::vector<double> values;
  for (const float f : rounding_cases()) {
    values.push_back(static_cast<double>(f) * (1 + 0x1p-40));
    if (values.size() % 3 == 0) values.push_back(static_cast<double>(f) * 1e80);
  }
  values.push_back(1 + 0x1p-8 + 0x1p-40);
  EXPECT_EQ(value_of(converted<bf16>(values.back())), 1.0);
  expect_casts(values);
}

struct Finished {
  double norm_sq = 0.5;
  std::vector<double> scratch = std::vector<double>(cuda::kSumPartials, NAN);
};

template <class In, class Out>
double finish(const std::vector<In>& values, std::int64_t offset, std::vector<Out>& written,
              int processors = 0) {
  const std::int64_t n = static_cast<std::int64_t>(values.size());
  Finished f;
  std::vector<In> in(static_cast<std::size_t>(offset), In{3});
  in.insert(in.end(), values.begin(), values.end());
  std::vector<Out> out(in.size() + 1, poison<Out>());
  std::vector<double> norm{f.norm_sq};
  OnDevice<In> d_in(in);
  OnDevice<Out> d_out(out);
  OnDevice<double> d_norm(norm), d_scratch(f.scratch);
  cuda::Launch on = launch();
  if (processors > 0) on.multiprocessors = processors;
  cuda::finish_gradient<In, Out>(on, n, d_in.data() + offset, d_out.data() + offset, d_norm.data(),
                                 d_scratch.data());
  d_out.fetch(), d_norm.fetch();
  const Out guard = poison<Out>();
  for (std::int64_t i = 0; i < offset; ++i)
    EXPECT_EQ(std::memcmp(&out[static_cast<std::size_t>(i)], &guard, sizeof(Out)), 0);
  EXPECT_EQ(std::memcmp(&out.back(), &guard, sizeof(Out)), 0);
  written.assign(out.begin() + offset, out.end() - 1);
  return norm[0];
}

template <class In, class Out>
void expect_finish(std::size_t n) {
  SCOPED_TRACE(testing::Message() << n << " elements");
  auto random = generator(n);
  std::normal_distribution<double> normal(0, 3);
  std::vector<In> in(n);
  for (auto& v : in) v = static_cast<In>(normal(random));
  std::vector<Out> out;
  const double norm = finish<In, Out>(in, 0, out);
  long double exact = 0.5L;
  for (std::size_t i = 0; i < n; ++i) {
    expect_same(out[i], converted<Out>(in[i]), static_cast<std::int64_t>(i));
    if (testing::Test::HasFatalFailure()) return;
    exact += static_cast<long double>(value_of(out[i])) * static_cast<long double>(value_of(out[i]));
  }
  // Each square and each addition rounds once in double; all terms are positive, so that of n elements the
  // relative error is below 2 n 2^-53, whatever the order.
  EXPECT_NEAR(norm, static_cast<double>(exact),
              2 * static_cast<double>(n + 1) * 0x1p-53 * static_cast<double>(exact));
  // The order depends on n alone: not on addresses, on the GPU's size or on what runs first.
  for_each_order([&] { EXPECT_EQ(finish(in, 1, out, 7), norm); });
}

TEST(CudaFinishGradient, WritesAndAddsSquares) {
  for (const std::size_t n : {0u, 1u, 3u, 4u, 31u, 255u, 256u, 4095u, 4096u, 4097u, 50001u}) {
    expect_finish<float, bf16>(n), expect_finish<float, fp16>(n);
    expect_finish<float, float>(n), expect_finish<double, double>(n);
  }
}

// More tiles than there are partial sums.
TEST(CudaFinishGradient, ManyElements) {
  const std::int64_t n = cuda::kSumPartials * 4096 + 5 * 4096 + 3;
  std::vector<float> in(static_cast<std::size_t>(n), 1.0f);
  in.back() = 2;
  std::vector<bf16> out;
  EXPECT_EQ((finish<float, bf16>(in, 0, out)), 0.5 + static_cast<double>(n) + 3);
  EXPECT_TRUE(std::all_of(out.begin(), out.end() - 1, [](bf16 v) { return static_cast<float>(v) == 1; }));
  EXPECT_EQ(value_of(out.back()), 2);
}

// too_large rounds to infinity in Out: what was written counts.
template <class Out>
void expect_not_finite(float too_large) {
  expect_norm_not_finite(5000, too_large, [](std::vector<float>& in) {
    std::vector<Out> out;
    return finish(in, 0, out);
  });
}

TEST(CudaFinishGradient, NonFiniteValuesReachTheNorm) {
  // The ties between the largest finite numbers and the powers of two that they do not reach.
  expect_not_finite<bf16>(0x1.ffp127f);
  expect_not_finite<fp16>(65520.0f);
}

}  // namespace
}  // namespace zg::test
