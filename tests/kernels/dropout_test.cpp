#include "ziggurat/kernels/dropout.hpp"
#include "tests/kernels/support.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::test {
namespace {

constexpr Dropout kSome{
    .rate = 0.3, .key = {{5, 0x89abcdefu}}, .counter = 0x1'0000'0007ull, .first_element = 40};

// The definition, element by element.
std::uint32_t word_of(const Dropout& d, std::int64_t i) {
  const auto element = static_cast<std::uint64_t>(d.first_element + i), block = element / 4;
  return philox4x32_10({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                        static_cast<std::uint32_t>(d.counter), static_cast<std::uint32_t>(d.counter >> 32)},
                       {d.key.key[0], d.key.key[1]})[element % 4];
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
        const bool stays = word_of(kSome, i) >= 0.3 * 0x1p32;
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

TYPED_TEST(HostDropout, IsAFunctionOfTheElementsNumber) {
  using T = TypeParam;
  Matrix<T> x(1, 60'000), all(1, 60'000), part(1, 10'000);
  x.fill(1);
  host::dropout<T>({1, 60'000}, x, kSome, all);
  Dropout shifted = kSome;
  shifted.first_element += 32'768;
  host::dropout<T>({1, 10'000}, x, shifted, part);
  EXPECT_EQ(std::memcmp(part.data(), all.data() + 32'768, 10'000 * sizeof(T)), 0);
  // A matrix with gaps has the elements of one without.
  Matrix<T> rows(40, 1500, 3), ones(40, 1500, 3);
  ones.fill(1);
  host::dropout<T>({40, 1500}, ones, kSome, rows);
  for (std::int64_t r = 0; r < 40; ++r)
    ASSERT_EQ(std::memcmp(&rows.at(r, 0), &all.at(0, 1500 * r), 1500 * sizeof(T)), 0) << r;
  // Number of threads, and place.
  for_each_thread_count([&](int) {
    Matrix<T> in_place = x;
    host::dropout<T>({1, 60'000}, in_place, kSome, in_place);
    EXPECT_TRUE(in_place.same_bits(all));
  });
  // Key and counter matter.
  for (const int which : {0, 1, 2, 3}) {
    Dropout other = kSome;
    which < 2 ? other.key.key[which] ^= 1 : other.counter ^= which == 2 ? 1 : 1ull << 32;
    Matrix<T> y(1, 60'000);
    host::dropout<T>({1, 60'000}, x, other, y);
    EXPECT_FALSE(y.same_bits(all)) << which;
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
  const std::uint32_t word = word_of(kSome, 6);
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
