// update() against its formulae, bit for bit, in every format, with all types, on every instruction set.
#include "kernels/host/update.hpp"

#include "tests/kernels/update_support.hpp"

namespace zg::test {
namespace {

class Update : public testing::TestWithParam<Case> {};
std::string test_name(const testing::TestParamInfo<Case>& info) {
  std::string name;
  for (const char ch : describe(info.param)) {
    if (std::isalnum(static_cast<unsigned char>(ch))) name += ch;
  }
  return name;
}
INSTANTIATE_TEST_SUITE_P(All, Update, testing::ValuesIn(all_cases()), test_name);

TEST_P(Update, SameBitsAsTheDefinitionOnEveryInstructionSet) {
  const Case& c = GetParam();
  for (const std::size_t n : {0u, 1u, 2u, 15u, 17u, 65u, 255u, 256u, 257u, 600u}) {
    for (const std::size_t offset : {0u, 1u, 3u}) {
      State expected(c, n, offset);
      expected.fill(n, c.params);
      const State begin = expected;
      reference(expected, c, c.params);
      for_each_target([&] {
        State actual = begin;
        actual.update(c.params);
        ASSERT_TRUE(actual == expected) << "n " << n << ", offset " << offset;
      });
    }
  }
}

}  // namespace
}  // namespace zg::test
