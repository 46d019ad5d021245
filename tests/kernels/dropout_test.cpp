#include "ziggurat/kernels/dropout.hpp"
#include "tests/kernels/support.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::test {
namespace {

// Row 1 of sequence 6, whose five rows here are two stretches of a longer sequence.
constexpr Dropout kSome{.rate = 0.3,
                        .key = {{5, 0x89abcdefu}},
                        .step = 0x9000'0007,
                        .positions = {5, 10, 40},
                        .first_row = 6,
                        .first_sequence = 5};

// The definition, element by element.
std::uint32_t word_of(const Dropout& d, std::int64_t r, std::int64_t c) {
  const std::int64_t row = d.first_row + r;
  return philox4x32_10({static_cast<std::uint32_t>(c / 4), static_cast<std::uint32_t>(d.positions.of(row)),
                        static_cast<std::uint32_t>(d.first_sequence + row / d.positions.time),
                        static_cast<std::uint32_t>(d.step)},
                       {d.key.key[0], d.key.key[1]})[static_cast<std::size_t>(c % 4)];
}

template <class T>
class HostDropout : public testing::Test {};
TYPED_TEST_SUITE(HostDropout, StorageTypes);

TYPED_TEST(HostDropout, MatchesItsDefinition) {
  using T = TypeParam;
  for (const std::int64_t cols : {1, 4, 43, 257, 40'001}) {  // the last is cut into spans
    for (const std::int64_t gap : {0, 5}) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gap " << gap);
      Matrix<T> x(3, cols, gap), y(3, cols, gap);
      auto random = generator(1);
      x.fill_normal(random), y.fill(NAN);
      host::dropout<T>({3, cols}, x, kSome, y);
      x.expect_gaps_intact("x"), y.expect_gaps_intact("y");
      std::int64_t stay = 0;
      for (std::int64_t i = 0; i < 3 * cols; ++i) {
        const bool stays = word_of(kSome, i / cols, i % cols) >= 0.3 * 0x1p32;
        const double v = x.get(i / cols, i % cols), expected = stays ? v / (1 - 0.3) : 0;
        // 1 / (1 - rate) rounded to the type of arithmetic, and the product.
        ASSERT_NEAR(y.get(i / cols, i % cols), expected,
                    stays ? bound<T>(expected, 2, std::abs(expected)) : 0)
            << i;
        stay += stays ? 1 : 0;
      }
      // Binomial; five standard deviations.
      const double n = static_cast<double>(3 * cols);
      EXPECT_NEAR(static_cast<double>(stay), 0.7 * n, 5 * std::sqrt(0.3 * 0.7 * n) + 1);
    }
  }
}

// Whoever has a row drops the same of it: several rows at once or one, with gaps or without, in sequences or
// in the stretches of them that a rank has.
TYPED_TEST(HostDropout, IsAFunctionOfSequencePositionAndColumn) {
  using T = TypeParam;
  constexpr std::int64_t kTime = 12, kSequences = 3, kRows = kTime * kSequences, kCols = 1501;
  const Dropout all{.rate = 0.3, .key = {{5, 6}}, .step = 9, .positions = kTime, .first_sequence = 40};
  Matrix<T> ones(kRows, kCols), whole(kRows, kCols);
  ones.fill(1);
  host::dropout<T>({kRows, kCols}, ones, all, whole);
  const auto expect_row = [&](Matrix<T>& part, std::int64_t r, std::int64_t of_whole) {
    EXPECT_EQ(std::memcmp(&part.at(r, 0), &whole.at(of_whole, 0), kCols * sizeof(T)), 0)
        << r << ", " << of_whole;
  };
  // From any row on, one row, and a matrix with gaps.
  for (std::int64_t first = 0; first < kRows; first += 5) {
    Dropout from = all;
    from.first_row = first;
    Matrix<T> one(1, kCols), gaps(2, kCols, 3);
    one.fill(1), gaps.fill(1);
    host::dropout<T>({1, kCols}, one, from, one);
    expect_row(one, 0, first);
    if (first + 2 > kRows) continue;
    host::dropout<T>({2, kCols}, gaps, from, gaps);
    expect_row(gaps, 0, first), expect_row(gaps, 1, first + 1);
  }
  // Rows by their slots, three of each token.
  const std::int32_t slots[] = {100, 3, 4, 77, 35};
  Dropout by_slot = all;
  by_slot.first_row = 7, by_slot.slots = slots, by_slot.per_token = 3;
  Matrix<T> gathered(5, kCols);
  gathered.fill(1);
  host::dropout<T>({5, kCols}, gathered, by_slot, gathered);
  for (std::int64_t r = 0; r < 5; ++r) expect_row(gathered, r, slots[r] / 3);
  // A micro-batch that begins at another sequence.
  Dropout later = all;
  later.first_sequence += 2;
  Matrix<T> last(kTime, kCols);
  last.fill(1);
  host::dropout<T>({kTime, kCols}, last, later, last);
  for (std::int64_t r = 0; r < kTime; ++r) expect_row(last, r, 2 * kTime + r);
  // The second of two ranks in a ring: positions 3 to 5 and 6 to 8 of each sequence.
  Dropout ring = all;
  ring.positions = {6, 3, 3};
  Matrix<T> part(6 * kSequences, kCols);
  part.fill(1);
  host::dropout<T>({6 * kSequences, kCols}, part, ring, part);
  for (std::int64_t r = 0; r < 6 * kSequences; ++r) expect_row(part, r, r / 6 * kTime + 3 + r % 6);
  // Number of threads, and place.
  for_each_thread_count([&](int) {
    Matrix<T> in_place = ones;
    host::dropout<T>({kRows, kCols}, in_place, all, in_place);
    EXPECT_TRUE(in_place.same_bits(whole));
  });
  // Some columns of the rows, beginning anywhere in a block of random words.
  for (const std::int64_t first : {1, 2, 3, 4, 43, 1024, 1499}) {
    Dropout columns = all;
    columns.first_column = first;
    Matrix<T> some(kRows, kCols - first, 1);
    some.fill(1);
    host::dropout<T>({kRows, kCols - first}, some, columns, some);
    for (std::int64_t r = 0; r < kRows; ++r)
      EXPECT_EQ(std::memcmp(&some.at(r, 0), &whole.at(r, first),
                            static_cast<std::size_t>(kCols - first) * sizeof(T)),
                0);
  }
  // Key, step, sequence and position matter.
  for (const int which : {0, 1, 2, 3, 4}) {
    Dropout other = all;
    if (which < 2) other.key.key[which] ^= 1;
    if (which == 2) ++other.step;
    if (which == 3) other.first_sequence += kSequences;
    if (which == 4) other.positions = {kTime, kTime, kTime};
    Matrix<T> y(kRows, kCols);
    host::dropout<T>({kRows, kCols}, ones, other, y);
    EXPECT_FALSE(y.same_bits(whole)) << which;
  }
}

TYPED_TEST(HostDropout, AtTheEndsOfTheRate) {
  using T = TypeParam;
  Matrix<T> x(1, 43), y(1, 43);
  auto random = generator(3);
  x.fill_normal(random);
  Dropout d = kSome;
  d.rate = 0;
  host::dropout<T>({1, 43}, x, d, y);
  EXPECT_TRUE(y.same_bits(x));
  // Every word is below; NaN and infinity are left out like all others.
  d.rate = 1 - 0x1p-53;
  x.set(0, 3, NAN), x.set(0, 4, INFINITY);
  host::dropout<T>({1, 43}, x, d, y);
  for (std::int64_t c = 0; c < 43; ++c) EXPECT_EQ(y.get(0, c), 0);
  // A word that is the rate's stays; for the next larger rate it does not.
  x.fill(1);
  const std::uint32_t word = word_of(kSome, 0, 6);
  for (const double more : {0.0, 0.25}) {
    d.rate = (word + more) * 0x1p-32;
    host::dropout<T>({1, 43}, x, d, y);
    EXPECT_EQ(y.get(0, 6) != 0, more == 0) << word;
  }
  d.rate = 0.3;
  host::dropout<T>({0, 43}, x, d, y);
}

}  // namespace
}  // namespace zg::test
