// Reductions of several operands against a plain loop in their order, bit for bit.
#include "kernels/cuda/reduce.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

template <class T>
T element(std::int64_t operand, std::int64_t i) {
  const auto h = static_cast<std::uint64_t>(operand * 1000003 + i + 7) * 0x9E3779B97F4A7C15ull;
  const double mantissa = static_cast<double>(h >> 40) / (1 << 24) + 0.5;
  const double v = ((h & 1) != 0 ? -1 : 1) * std::ldexp(mantissa, static_cast<int>(h >> 8 & 15) - 8);
  return T(static_cast<Acc<T>>(v));
}

// `skew`: elements that the operands lie behind an aligned address.
template <class T>
void expect_reduced(int operands, std::int64_t count, std::int64_t skew, bool maximum) {
  SCOPED_TRACE(testing::Message() << operands << " of " << count << ", skew " << skew << ", " << maximum);
  std::vector<std::vector<T>> host;
  for (int m = 0; m < operands; ++m) {
    host.emplace_back();
    for (std::int64_t i = 0; i < count + skew; ++i) host.back().push_back(element<T>(m, i));
  }
  if (maximum && count > 2)
    host.back()[static_cast<std::size_t>(skew + 1)] = T(std::numeric_limits<Acc<T>>::quiet_NaN());
  std::vector<T> expected;
  for (std::int64_t i = skew; i < count + skew; ++i) {
    const auto at = static_cast<std::size_t>(i);
    auto sum = static_cast<Acc<T>>(host[0][at]);
    for (int m = 1; m < operands; ++m) {
      const auto x = static_cast<Acc<T>>(host[static_cast<std::size_t>(m)][at]);
      sum = !maximum ? sum + x : std::isnan(sum) || std::isnan(x) ? sum + x : std::max(sum, x);
    }
    expected.push_back(T(sum));
  }
  std::vector<std::unique_ptr<OnDevice<T>>> on_device;
  std::vector<const void*> pointers;
  for (auto& h : host) {
    on_device.push_back(std::make_unique<OnDevice<T>>(h));
    pointers.push_back(on_device.back()->data() + skew);
  }
  std::vector<T> result(static_cast<std::size_t>(count + skew));
  OnDevice<T> out(result);
  cuda::reduce<T>(launch(), pointers, out.data() + skew, count, maximum);
  out.fetch();
  // In place of the last operand.
  cuda::reduce<T>(launch(), pointers, const_cast<void*>(pointers.back()), count, maximum);
  on_device.back()->fetch();
  for (std::int64_t i = 0; i < count; ++i) {
    for (const T got :
         {result[static_cast<std::size_t>(i + skew)], host.back()[static_cast<std::size_t>(i + skew)]}) {
      const T want = expected[static_cast<std::size_t>(i)];
      if (std::isnan(static_cast<double>(static_cast<Acc<T>>(want)))) {
        ASSERT_TRUE(std::isnan(static_cast<double>(static_cast<Acc<T>>(got)))) << i;
      } else {
        ASSERT_EQ(std::memcmp(&got, &want, sizeof(T)), 0) << i;
      }
    }
  }
}

template <class T>
class Reduce : public testing::Test {};
using Types = testing::Types<double, float, fp16, bf16>;
TYPED_TEST_SUITE(Reduce, Types);

TYPED_TEST(Reduce, GivesTheBitsOfALoop) {
  for (const int operands : {1, 2, 5, 8}) {
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{2049}}) {
      for (const std::int64_t skew : {0, 1}) {
        expect_reduced<TypeParam>(operands, count, skew, false);
        expect_reduced<TypeParam>(operands, count, skew, true);
      }
    }
  }
  expect_reduced<TypeParam>(cuda::kMostOperands, 100, 0, false);
}

}  // namespace
}  // namespace zg::test
