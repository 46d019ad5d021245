// Rotary embedding against plain fp64 references.
#include "ziggurat/kernels/rope.hpp"

#include "tests/cuda/cuda_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaRope : public testing::Test {};
TYPED_TEST_SUITE(CudaRope, StorageTypes);

TYPED_TEST(CudaRope, NothingOfNothing) {
  using T = TypeParam;
  Operand<T> y(1, 8);
  y.fill(3).send();
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

TYPED_TEST(CudaRope, TurnsPairs) {
  auto random = generator(7);
  // Heads of packs and not, fewer and more heads than a thread takes, and the most pairs.
  for (const RopeCase& k : {RopeCase{7, 3, 3, 64}, RopeCase{5, 9, 9, 16}, RopeCase{3, 2, 19, 6},
                            RopeCase{4, 4, 1, 2}, RopeCase{3, 3, 1, 512}}) {
    for (const Layout layout : CudaKernels::kLayouts) {
      expect_turned<TypeParam>(k, 10000, layout, random);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Part of each head, times an amplitude either way, by places in documents.
TYPED_TEST(CudaRope, ByATable) {
  using T = TypeParam;
  constexpr std::int64_t kRows = 10, kTime = 5, kHeads = 9;
  std::vector<std::int32_t> first = {0, 0, 2, 2, 2, 0, 1, 2, 2, 4};
  auto random = generator(9);
  struct Case {
    std::int64_t head_size, pairs, first_column;
    bool interleaved;
  };
  for (const auto& [head_size, pairs, first_column, interleaved] :
       {Case{64, 16, 0, false}, Case{24, 12, 0, false}, Case{43, 7, 0, false}, Case{64, 16, 32, false},
        Case{64, 32, 0, true}, Case{192, 32, 128, true}, Case{22, 11, 0, true}, Case{43, 5, 33, true}}) {
    RopeTable table = rope_table(10000, pairs);
    table.amplitude = 1.3;
    table.first_column = first_column;
    table.interleaved = interleaved;
    for (std::int64_t i = 0; i < pairs; ++i)
      table.frequency[static_cast<std::size_t>(i)] *= 1 - 0.4 / static_cast<double>(i + 1);
    for (const Layout layout : CudaKernels::kLayouts) {
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
            const std::int64_t turned = c % head_size - first_column, begin = c - turned;
            if (turned < 0 || turned >= 2 * pairs) {
              ASSERT_EQ(x(r, c), before(r, c));
              continue;
            }
            const std::int64_t i = interleaved ? turned / 2 : turned % pairs;
            const std::int64_t left = begin + (interleaved ? 2 * i : i);
            const std::int64_t right = interleaved ? left + 1 : left + pairs;
            const double angle = static_cast<double>(r % kTime - first[static_cast<std::size_t>(r)]) *
                                 table.frequency[static_cast<std::size_t>(i)];
            const double a = before(r, left), b = before(r, right);
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
TYPED_TEST(CudaRope, IsAccurateInLongContexts) {
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
