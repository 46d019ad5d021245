// update() against its formulae, bit for bit: in every format, with all types, on every instruction set, with
// any number of threads and however it is cut into calls.
#include "kernels/host/update.hpp"

#include "tests/kernels/update_support.hpp"

namespace zg::test {
namespace {

class Update : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, Update, testing::ValuesIn(all_cases()), test_name);

// States compare with the guards around their arrays, so that a byte written outside shows, too.
TEST_P(Update, SameBitsAsTheDefinitionOnEveryInstructionSet) {
  const Case& c = GetParam();
  for (const std::size_t n : {0u, 1u, 2u, 15u, 17u, 65u, 255u, 256u, 257u, 600u}) {
    for (const std::size_t offset : {0u, 1u, 3u}) {
      State begin(c, n, offset);
      begin.fill(n, c.params);
      State expected = begin;
      reference(expected, c, c.params);
      for_each_target([&] {
        State actual = begin;
        actual.update(c.params);
        ASSERT_TRUE(actual == expected) << "n " << n << ", offset " << offset;
      });
    }
  }
}

TEST_P(Update, EveryTail) {
  const Case& c = GetParam();
  for (std::size_t n = 0; n < 300; ++n) {
    State actual(c, n, n % 5), expected(c, n, n % 5);
    actual.fill(n, c.params), expected.fill(n, c.params);
    actual.update(c.params);
    reference(expected, c, c.params);
    ASSERT_TRUE(actual == expected) << "n " << n;
  }
}

TEST_P(Update, SameBitsForAnyNumberOfThreadsAndCutIntoCalls) {
  const Case& c = GetParam();
  constexpr std::size_t kCount = 65536 + 256 * 3 + 17;
  State begin(c, kCount);
  begin.fill(1, c.params);
  State expected = begin;
  reference(expected, c, c.params);
  for_each_thread_count([&](int) {
    State actual = begin;
    actual.update(c.params);
    EXPECT_TRUE(actual == expected);
  });
  State actual = begin;
  auto random = generator(2);
  for (std::size_t at = 0; at < kCount;) {
    const std::size_t n = std::min<std::size_t>(kCount - at, 256 * (1 + random() % 100));
    UpdateParams p = c.params;
    p.first_element += static_cast<std::int64_t>(at);
    host::update(static_cast<std::int64_t>(n), actual.arrays(at), c.format, p);
    at += n;
  }
  EXPECT_TRUE(actual == expected);
}

// A parameter in the type of its master may be its own master: both are the same memory.
TEST_P(Update, AWeightThatIsItsOwnMaster) {
  const Case& c = GetParam();
  if (c.format.master != MasterFormat::kFull || c.weight != c.format.full) return;
  for (const std::size_t n : {1u, 255u, 256u, 600u, 65536u + 256u * 3 + 17u}) {
    for (const std::size_t offset : {0u, 1u}) {
      State begin(c, n, offset);
      begin.fill(n, c.params);
      State expected = begin;
      reference(expected, c, c.params);
      for_each_target([&] {
        State actual = begin;
        host::UpdateArrays arrays = actual.arrays();
        arrays.weight = arrays.master;
        host::update(static_cast<std::int64_t>(n), arrays, c.format, c.params);
        *actual.memory().at(1) = *expected.memory().at(1);  // the other weight is in nobody's use
        ASSERT_TRUE(actual == expected) << "n " << n << ", offset " << offset;
      });
    }
  }
}

// Infinities and NaN go where the formulae take them, and nowhere else. Which NaN a whole moment holds is
// left to the machine.
TEST_P(Update, InfinitiesAndNan) {
  const Case& c = GetParam();
  State begin(c, 2000);
  begin.fill(3, c.params, true);
  State expected = begin;
  reference(expected, c, c.params);
  expected.make_moment_nans_one();
  for_each_target([&] {
    State actual = begin;
    actual.update(c.params);
    actual.make_moment_nans_one();
    ASSERT_TRUE(actual == expected);
  });
}

TEST_P(Update, ZerosStayZeros) {
  Case c = GetParam();
  State s(c, 300);
  const State zeros = s;
  for (c.params.step = 1; c.params.step < 5; ++c.params.step) s.update(c.params);
  for (std::size_t i = 0; i < s.n(); ++i) {
    ASSERT_EQ(s.master<double>(i), 0);
    ASSERT_EQ(s.weight(i), 0);
    for (std::size_t k = 0; k < s.moments(); ++k) ASSERT_EQ(s.moment<double>(k, i), 0);
  }
}

TEST_P(Update, ASkippedStepChangesNothing) {
  Case c = GetParam();
  for (const std::size_t n : {1u, 255u, 256u, 1000u}) {
    State actual(c, n, 1);
    actual.fill(4, c.params, true);
    const State expected = actual;
    c.params.skip = true;
    // A weight that is a copy is made anew from its master. One that is half of its master must stay.
    if (!actual.split()) {
      for (std::size_t i = 0; i < n; ++i) actual.spoil_weight(i);
    }
    host::UpdateArrays arrays = actual.arrays();
    arrays.grad = nullptr;
    host::update(static_cast<std::int64_t>(n), arrays, c.format, c.params);
    EXPECT_TRUE(actual == expected) << "n " << n;
  }
}

TEST(UpdateDeathTest, RefusesWhatItCannotCompute) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Case c = optimizers()[0];
  State s(c, 3);
  Case bad = c;
  bad.params.eps = 1e-60;
  EXPECT_DEATH(s.update(bad.params), "eps");
  bad = c;
  bad.params.step = 0;
  EXPECT_DEATH(s.update(bad.params), "step");
  const auto update = [&](const Case& d) { host::update(3, s.arrays(), d.format, d.params); };
  bad = c;
  bad.format.master = MasterFormat::kSplit;
  EXPECT_DEATH(update(bad), "split");
  bad = c;
  bad.format.moments = MomentFormat::kBf16, bad.params.first_element = 128;
  EXPECT_DEATH(update(bad), "first element");
  bad = c;
  bad.format.full = DType::kF64;
  EXPECT_DEATH(update(bad), "f64");
  bad = c;
  bad.format.moment_count = 1;
  EXPECT_DEATH(update(bad), "moments");
}

}  // namespace
}  // namespace zg::test
