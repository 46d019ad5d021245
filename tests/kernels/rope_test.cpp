// Rotary embedding against plain double references.
#include "ziggurat/kernels/rope.hpp"

#include "kernels/host/matrix.hpp"
#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kGap = 5;  // columns between rows that nobody may touch

// All frequencies differ from the plain ones.
RopeTable scaled_table(double theta, std::int64_t pairs, double amplitude) {
  RopeTable table = rope_table(theta, pairs);
  table.amplitude = amplitude;
  for (std::int64_t i = 0; i < pairs; ++i)
    table.frequency[static_cast<std::size_t>(i)] *= 1 - 0.4 / static_cast<double>(i + 1);
  return table;
}

// Rotates by a row's position in its sequence, or with `first_keys` in its document. Columns that do not turn
// stay.
template <class T>
void compare_rope(std::int64_t head_size, const RopeTable& table, std::vector<std::int32_t> first_keys = {}) {
  SCOPED_TRACE(testing::Message() << table.pairs << " pairs of heads of " << head_size);
  const std::int64_t time = 37, rows = 2 * time, heads = 3, pairs = table.pairs;
  const std::int64_t first_column = table.first_column;
  const std::int32_t* const first = first_keys.empty() ? nullptr : first_keys.data();
  // Roundings of sine and cosine, of two products and a sum, and of the stored result.
  const double roundings = 3 * unit_roundoff<Acc<T>>() + unit_roundoff<T>();
  Matrix<T> x(rows, heads * head_size + 4, kGap);  // the last four columns are not rope's
  auto random = generator();
  x.fill_normal(random);
  const Matrix<T> before = x;
  for (const bool inverse : {false, true}) {
    x = before;
    host::rope<T>(rows, {.x = {x.data(), x.ld()},
                         .positions = time,
                         .heads = heads,
                         .head_size = head_size,
                         .table = table,
                         .inverse = inverse,
                         .first_keys = first});
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t place = r % time - (first == nullptr ? 0 : first[r]);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < pairs; ++i) {
          const double angle =
              static_cast<double>(place) * table.frequency[static_cast<std::size_t>(i)] * (inverse ? -1 : 1);
          const std::int64_t begin = h * head_size + first_column;
          const std::int64_t left = begin + (table.interleaved ? 2 * i : i);
          const std::int64_t right = table.interleaved ? left + 1 : left + pairs;
          const double a = before.get(r, left), b = before.get(r, right);
          const double cosine = table.amplitude * std::cos(angle), sine = table.amplitude * std::sin(angle);
          const double tolerance =
              table.amplitude * (std::abs(a) + std::abs(b)) * roundings + least_error<T>();
          ASSERT_NEAR(x.get(r, left), a * cosine - b * sine, tolerance);
          ASSERT_NEAR(x.get(r, right), b * cosine + a * sine, tolerance);
        }
        for (std::int64_t c = 0; c < head_size; ++c) {
          if (c >= first_column && c < first_column + 2 * pairs) continue;
          ASSERT_EQ(x.get(r, h * head_size + c), before.get(r, h * head_size + c));
        }
      }
      for (std::int64_t c = heads * head_size; c < x.cols(); ++c) ASSERT_EQ(x.get(r, c), before.get(r, c));
    }
    x.expect_gaps_intact("x");
  }
}

template <class T>
class Rope : public testing::Test {};
TYPED_TEST_SUITE(Rope, StorageTypes);

TYPED_TEST(Rope, TurnsPairsOfHalves) {
  for_each_target([] {
    for (const std::int64_t head_size : {2, 22, 64, 128}) {
      compare_rope<TypeParam>(head_size, rope_table(10000, head_size / 2));
      compare_rope<TypeParam>(head_size, scaled_table(5000, head_size / 2, 1.3));
    }
  });
}

TYPED_TEST(Rope, FurtherColumnsStay) {
  for_each_target([] {
    compare_rope<TypeParam>(43, scaled_table(10000, 16, 0.8));
    compare_rope<TypeParam>(64, rope_table(10000, 8));
    compare_rope<TypeParam>(7, rope_table(10000, 0));
  });
}

// Pairs whose columns lie side by side (DeepSeek, ERNIE), in whole heads and in their last columns.
TYPED_TEST(Rope, TurnsInterleavedPairs) {
  for_each_target([] {
    for (const auto& [head_size, pairs] :
         {std::pair<std::int64_t, std::int64_t>{2, 1}, {22, 11}, {64, 32}, {192, 32}, {43, 5}}) {
      RopeTable table = scaled_table(5000, pairs, 1.3);
      table.interleaved = true;
      compare_rope<TypeParam>(head_size, table);
      table.first_column = head_size - 2 * pairs;
      compare_rope<TypeParam>(head_size, table);
    }
  });
}

TYPED_TEST(Rope, TurnsTheLastColumns) {
  for_each_target([] {
    RopeTable table = scaled_table(10000, 8, 0.8);
    table.first_column = 7;
    compare_rope<TypeParam>(43, table);
  });
}

TYPED_TEST(Rope, PositionsRestartInDocuments) {
  std::vector<std::int32_t> first(74);
  for (std::size_t r = 0; r < 74; ++r) {
    const std::size_t t = r % 37;
    first[r] = r < 37 ? (t < 5 ? 0 : t < 6 ? 5 : t < 30 ? 6 : 30) : t < 20 ? 0 : 20;
  }
  compare_rope<TypeParam>(22, rope_table(10000, 11), first);
  compare_rope<TypeParam>(22, scaled_table(10000, 7, 1.2), first);
}

// The power of theta that all models of the Llama family without scaling have.
TEST(RopeTables, ThePlainOneIsAPowerOfTheta) {
  const RopeTable table = rope_table(10000, 64);
  EXPECT_EQ(table.amplitude, 1);
  for (std::size_t i = 0; i < 64; ++i) {
    EXPECT_NEAR(table.frequency[i], std::exp(-2.0 * static_cast<double>(i) / 128 * std::log(10000.0)), 1e-14);
  }
}

// Two kinds of layers in turns, and then a third: each has its own angles.
TEST(RopeTables, AnglesThatAreKeptAreTheTables) {
  const RopeTable tables[] = {rope_table(10000, 4), rope_table(1e6, 4), scaled_table(10000, 4, 1)};
  const auto turned = [](const RopeTable& table) {
    Matrix<double> x(9, 8);
    x.fill(1);
    host::rope<double>(9,
                       {.x = {x.data(), x.ld()}, .positions = 9, .heads = 1, .head_size = 8, .table = table});
    return x;
  };
  const Matrix<double> once[] = {turned(tables[0]), turned(tables[1]), turned(tables[2])};
  EXPECT_FALSE(once[0].same_bits(once[1]) || once[0].same_bits(once[2]));
  for (const std::size_t i : {0, 1, 0, 1, 2, 1, 0, 2}) EXPECT_TRUE(turned(tables[i]).same_bits(once[i])) << i;
}

// With y = a R x the gradient of x is a R^T dy: <y, dy> = <x, dx>, by the same amplitude.
TEST(RopeTables, InverseIsTheTranspose) {
  const RopeTable table = scaled_table(10000, 5, 1.3);
  auto random = generator(3);
  Matrix<double> x(30, 12), dy(30, 12);
  x.fill_normal(random), dy.fill_normal(random);
  Matrix<double> y = x, dx = dy;
  host::rope<double>(30,
                     {.x = {y.data(), y.ld()}, .positions = 15, .heads = 1, .head_size = 12, .table = table});
  host::rope<double>(30, {.x = {dx.data(), dx.ld()},
                          .positions = 15,
                          .heads = 1,
                          .head_size = 12,
                          .table = table,
                          .inverse = true});
  for (std::int64_t r = 0; r < 30; ++r) {
    double forward = 0, backward = 0;
    for (std::int64_t c = 0; c < 12; ++c)
      forward += y.get(r, c) * dy.get(r, c), backward += x.get(r, c) * dx.get(r, c);
    ASSERT_NEAR(forward, backward, 1e-13) << r;
  }
}

TEST(RopeDeathTest, MorePairsThanAHeadHas) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Matrix<float> x(1, 8);
  EXPECT_DEATH(
      host::rope<float>(
          1, {.x = {x.data(), 8}, .positions = 1, .heads = 1, .head_size = 8, .table = rope_table(10000, 5)}),
      "5 pairs turn from column 0 of a head of 8");
  EXPECT_DEATH((void)rope_table(10000, kMaxRopePairs + 1), "257 pairs of columns turn");
}

}  // namespace
}  // namespace zg::test
