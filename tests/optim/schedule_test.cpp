// The expected numbers are worked out by hand from the definitions at the head of schedule.cpp.
#include "ziggurat/optim/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/errors.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

using Kind = ScheduleConfig::Kind;

// A few roundings of a double each, on values of at most 1.
constexpr double kTolerance = 8 * 0x1p-53;

double lr_at(const ScheduleConfig& config, std::int64_t step, double base_lr = 0.5) {
  return schedule_at(config, step, base_lr, 0.9).lr;
}

std::vector<double> lrs(const ScheduleConfig& config, std::int64_t steps, double base_lr = 0.5) {
  std::vector<double> values;
  for (std::int64_t k = 0; k < steps; ++k) values.push_back(lr_at(config, k, base_lr));
  return values;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t k = 0; k < found.size(); ++k)
    EXPECT_NEAR(found[k], expected[k], kTolerance) << "step " << k;
}

TEST(Schedule, ConstantLeavesTheOptimizersValues) {
  const ScheduleValue value = schedule_at({}, 12345, 0.25, 0.75);
  EXPECT_EQ(value.lr, 0.25);
  EXPECT_EQ(value.beta1, 0.75);
}

TEST(Schedule, WarmupLogStartsWithTwoStepsAtTheMinimum) {
  ScheduleConfig c{.kind = Kind::kWarmup, .warmup_min_lr = 0, .warmup_max_lr = 1, .warmup_num_steps = 8};
  // log2(1..8) / 3 in steps 1..8.
  expect_near(lrs(c, 11), {0, 0, 1.0 / 3, std::log2(3) / 3, 2.0 / 3, std::log2(5) / 3, std::log2(6) / 3,
                           std::log2(7) / 3, 1, 1, 1});
  c.warmup_min_lr = 0.5;
  c.warmup_max_lr = 0.75;
  expect_near({lr_at(c, 0), lr_at(c, 2), lr_at(c, 100)}, {0.5, 0.5 + 0.25 / 3, 0.75});
}

TEST(Schedule, WarmupLinear) {
  const ScheduleConfig c{.kind = Kind::kWarmup,
                         .warmup_min_lr = 0.2,
                         .warmup_max_lr = 0.6,
                         .warmup_num_steps = 4,
                         .warmup_linear = true};
  expect_near(lrs(c, 8), {0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6});
}

TEST(Schedule, WarmupOfOneStepCountsAsTwo) {
  const ScheduleConfig c{
      .kind = Kind::kWarmup, .warmup_max_lr = 1, .warmup_num_steps = 1, .warmup_linear = true};
  expect_near(lrs(c, 4), {0, 0, 0.5, 1});
}

TEST(Schedule, WarmupDecayEndsAtTheMinimum) {
  const ScheduleConfig c{.kind = Kind::kWarmupDecay,
                         .warmup_min_lr = 0.1,
                         .warmup_max_lr = 0.9,
                         .warmup_num_steps = 2,
                         .warmup_linear = true,
                         .total_num_steps = 6};
  // gamma: constructor, 0/2, 1/2, then (6 - i) / 4 from i = 2 on.
  expect_near(lrs(c, 10), {0.1, 0.1, 0.5, 0.9, 0.7, 0.5, 0.3, 0.1, 0.1, 0.1});
}

TEST(Schedule, WarmupDecayWithoutRoomToDecay) {
  const ScheduleConfig c{.kind = Kind::kWarmupDecay,
                         .warmup_max_lr = 1,
                         .warmup_num_steps = 4,
                         .warmup_linear = true,
                         .total_num_steps = 3};
  expect_near(lrs(c, 8), {0, 0, 0.25, 0.5, 0.75, 0, 0, 0});
}

TEST(Schedule, WarmupCosine) {
  const ScheduleConfig c{.kind = Kind::kWarmupCosine,
                         .warmup_num_steps = 2,
                         .warmup_linear = true,
                         .total_num_steps = 6,
                         .warmup_min_ratio = 0.5,
                         .cos_min_ratio = 0.2};
  // Ratios: 0 before the start; 0.5 + 0.5 * {0, 1/2}; then 0.2 + 0.8 * (1 + cos(pi p)) / 2 with p = 1/4, 1/2,
  // 3/4, 1.
  const double h = std::sqrt(0.5);
  std::vector<double> ratios = {0, 0.5, 0.75, 0.6 + 0.4 * h, 0.6, 0.6 - 0.4 * h, 0.2, 0.2, 0.2, 0.2};
  for (double& r : ratios) r *= 0.5;
  expect_near(lrs(c, 10, 0.5), ratios);
  EXPECT_NEAR(lr_at(c, 1'000'000, 2), 0.4, kTolerance);
}

TEST(Schedule, CosineFallsMonotonicallyBetweenItsEnds) {
  const ScheduleConfig c{.kind = Kind::kWarmupCosine, .warmup_num_steps = 37, .total_num_steps = 1009};
  // One step moves the cosine's ratio by at most pi / 2 / (T - W).
  const double largest = std::acos(-1.0) / 2 / (1009 - 37) + kTolerance;
  for (std::int64_t k = 39; k < 1100; ++k) {
    const double before = lr_at(c, k - 1, 1), now = lr_at(c, k, 1);
    ASSERT_LE(now, before + kTolerance) << k;
    ASSERT_LE(before - now, largest) << k;
  }
  for (std::int64_t k = 2; k <= 37; ++k) ASSERT_GT(lr_at(c, k, 1), lr_at(c, k - 1, 1)) << k;
  EXPECT_NEAR(lr_at(c, 37, 1), 1, kTolerance);  // log(W) / log(W)
  EXPECT_NEAR(lr_at(c, 1009, 1), 0.0001, kTolerance);
}

TEST(Schedule, OneCycleLrMomentumAndDecay) {
  const ScheduleConfig c{.kind = Kind::kOneCycle,
                         .cycle_min_lr = 0.1,
                         .cycle_max_lr = 0.5,
                         .decay_lr_rate = 1,
                         .cycle_first_step_size = 4,
                         .cycle_second_step_size = 2,
                         .decay_step_size = 2,
                         .cycle_min_mom = 0.6,
                         .cycle_max_mom = 0.8,
                         .decay_mom_rate = 0.125};
  expect_near(lrs(c, 10), {0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1 / 1.5, 0.1 / 2, 0.1 / 2.5});
  std::vector<double> momenta;
  for (std::int64_t k = 0; k < 9; ++k) momenta.push_back(schedule_at(c, k, 1, 0.9).beta1);
  expect_near(momenta, {0.6, 0.75, 0.7, 0.65, 0.6, 0.7, 0.8, 0.8 * 1.0625, 0.8 * 1.125});
}

TEST(Schedule, OneCycleDefaultsAreSymmetricAndHoldAfterwards) {
  const ScheduleConfig c{
      .kind = Kind::kOneCycle, .cycle_min_lr = 0.01, .cycle_max_lr = 0.1, .cycle_first_step_size = 101};
  for (std::int64_t k = 0; k <= 101; ++k) ASSERT_NEAR(lr_at(c, k), lr_at(c, 202 - k), kTolerance) << k;
  EXPECT_NEAR(lr_at(c, 101), 0.1, kTolerance);
  EXPECT_EQ(lr_at(c, 5000), 0.01);
  EXPECT_EQ(schedule_at(c, 5000, 1, 0.5).beta1, 0.9);
}

TEST(Schedule, OneCycleStairs) {
  const ScheduleConfig c{.kind = Kind::kOneCycle,
                         .cycle_min_lr = 0,
                         .cycle_max_lr = 1,
                         .cycle_first_step_size = 6,
                         .cycle_second_step_size = 3,
                         .cycle_first_stair_count = 2,
                         .cycle_second_stair_count = 1,
                         .cycle_momentum = false};
  expect_near(lrs(c, 11), {0, 0, 0, 0.5, 0.5, 0.5, 1, 0, 0, 0, 0});
  EXPECT_EQ(schedule_at(c, 3, 1, 0.77).beta1, 0.77);
}

TEST(Schedule, OnlyOneCycleMovesBeta1) {
  for (const Kind kind : {Kind::kConstant, Kind::kWarmup, Kind::kWarmupDecay, Kind::kWarmupCosine}) {
    const ScheduleConfig c{.kind = kind, .total_num_steps = 2000};
    for (const std::int64_t k : {0, 1, 999, 1000, 1001, 5000})
      EXPECT_EQ(schedule_at(c, k, 1, 0.7).beta1, 0.7);
  }
}

TEST(Schedule, ImpossibleNumbersAreTheUsersErrors) {
  const auto key_of = [](const ScheduleConfig& c, std::int64_t step) {
    const Error e = test::error_of([&] { return schedule_at(c, step, 1, 0.9); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    return e.where();
  };
  EXPECT_EQ(key_of({.kind = Kind::kWarmup, .warmup_num_steps = 0}, 0), "scheduler.params.warmup_num_steps");
  EXPECT_EQ(key_of({.kind = Kind::kWarmupDecay}, 0), "scheduler.params.total_num_steps");
  EXPECT_EQ(key_of({.kind = Kind::kWarmupCosine}, 0), "scheduler.params.total_num_steps");
  EXPECT_EQ(key_of({.kind = Kind::kOneCycle, .cycle_first_step_size = 0}, 0),
            "scheduler.params.cycle_first_step_size");
  EXPECT_EQ(key_of({.kind = Kind::kOneCycle, .cycle_second_step_size = 0}, 0),
            "scheduler.params.cycle_second_step_size");
  ScheduleConfig growing{.kind = Kind::kOneCycle, .cycle_first_step_size = 1, .decay_step_size = 1};
  growing.decay_mom_rate = 1;
  EXPECT_NO_THROW((void)schedule_at(growing, 1, 1, 0.9));
  EXPECT_EQ(key_of(growing, 3), "scheduler.params.decay_mom_rate");
}

}  // namespace
}  // namespace zg
