#include <gtest/gtest.h>

#include "ziggurat/base/units.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {
namespace {

class DeviceRoofs : public testing::TestWithParam<std::int64_t> {};

// With any budget speeds are found, and the memory is given back.
TEST_P(DeviceRoofs, OfADeviceAreMeasuredWithinItsBudget) {
  const auto device = make_host_device(GetParam(), nullptr);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64})
    EXPECT_GT(measure_products(*device, dtype), 0) << name_of(dtype);
  EXPECT_GT(measure_memory(*device), 0);
  const LinkRates link = measure_link(*device);
  EXPECT_GT(link.to_device, 0);
  EXPECT_GT(link.to_host, 0);
  EXPECT_GT(link.both, 0);
  EXPECT_EQ(device->arena().in_use(), 0);
  EXPECT_LE(device->arena().peak(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Budgets, DeviceRoofs, testing::Values(64 * kKiB, 3 * kMiB, 256 * kMiB));

TEST(DeviceRoofsAlone, WithoutAnyMemoryAreAnError) {
  const auto device = make_host_device(8192, nullptr);
  EXPECT_THROW(measure_memory(*device), Error);
  EXPECT_EQ(device->arena().in_use(), 0);
}

}  // namespace
}  // namespace zg
