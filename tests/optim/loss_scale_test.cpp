// Sequences worked out by hand from the rules at the head of loss_scale.cpp, and random ones against a second
// way to say them.
#include "ziggurat/optim/loss_scale.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

// Steps by letter: 'o' overflows, '.' does not. The scales after each.
std::vector<double> scales(LossScaler& scaler, const std::string& steps) {
  std::vector<double> values;
  for (const char step : steps) {
    scaler.update(step == 'o');
    values.push_back(scaler.scale());
  }
  return values;
}
std::vector<double> scales(const LossScaleConfig& config, const std::string& steps) {
  LossScaler scaler(config);
  return scales(scaler, steps);
}

using Values = std::vector<double>;

TEST(LossScale, BeginsAtThePowerOfTwo) {
  EXPECT_EQ(LossScaler({}).scale(), 65536.0);
  EXPECT_EQ(LossScaler({.initial_scale_power = 3}).scale(), 8.0);
  EXPECT_EQ(LossScaler({.initial_scale_power = -2, .min_loss_scale = 0.125}).scale(), 0.25);
  EXPECT_TRUE(LossScaler({}).dynamic());
}

TEST(LossScale, DoublesAfterEachWindow) {
  // Counted from step -1: after steps 2, 5, 8.
  EXPECT_EQ(scales({.initial_scale_power = 0, .loss_scale_window = 3}, "........."),
            (Values{1, 1, 2, 2, 2, 4, 4, 4, 8}));
  EXPECT_EQ(scales({.initial_scale_power = 0, .loss_scale_window = 1}, "..."), (Values{2, 4, 8}));
}

TEST(LossScale, AnOverflowBeginsTheWindowAnew) {
  EXPECT_EQ(scales({.initial_scale_power = 4, .loss_scale_window = 3, .hysteresis = 1}, "..o......"),
            (Values{16, 16, 8, 8, 8, 16, 16, 16, 32}));
}

TEST(LossScale, WithoutHysteresisEachOverflowHalves) {
  EXPECT_EQ(scales({.initial_scale_power = 4, .hysteresis = 1}, "oo.o"), (Values{8, 4, 4, 2}));
}

// Once the count is used up every further overflow halves, until the scale has doubled again.
TEST(LossScale, HysteresisCountsUntilTheScaleDoubles) {
  EXPECT_EQ(scales({.initial_scale_power = 4, .loss_scale_window = 3, .hysteresis = 3}, "oo.oo...oo"),
            (Values{16, 16, 16, 8, 4, 4, 4, 8, 8, 8}));
}

// With consecutive_hysteresis overflows count only in a row.
TEST(LossScale, ConsecutiveHysteresisCountsOverflowsInARow) {
  EXPECT_EQ(scales({.initial_scale_power = 4, .hysteresis = 2, .consecutive_hysteresis = true}, "o.o.ooo.oo"),
            (Values{16, 16, 16, 16, 16, 8, 4, 4, 4, 2}));
}

TEST(LossScale, StopsAtTheMinimumAndThenFails) {
  LossScaler scaler({.initial_scale_power = 4, .hysteresis = 1, .min_loss_scale = 3});
  EXPECT_EQ(scales(scaler, "ooo.").back(), 3.0);  // 8, 4, and not 2
  const LossScaler::State before = scaler.state();
  const Error e = test::error_of([&] { scaler.update(true); });
  EXPECT_EQ(e.code(), Errc::kNumeric);
  EXPECT_HAS(e.message(), "smallest loss scale, 3");
  EXPECT_HAS(e.hint(), "min_loss_scale");
  EXPECT_TRUE(scaler.state() == before);
}

// Only the overflow that would halve it fails.
TEST(LossScale, HysteresisHoldsAtTheMinimumToo) {
  LossScaler scaler({.initial_scale_power = 0, .hysteresis = 3});
  EXPECT_EQ(scales(scaler, "oo"), (Values{1, 1}));
  EXPECT_THROW(scaler.update(true), Error);
}

TEST(LossScale, AStaticScaleStays) {
  LossScaler scaler({.loss_scale = 128, .loss_scale_window = 1, .hysteresis = 1, .min_loss_scale = 128});
  EXPECT_FALSE(scaler.dynamic());
  for (const double scale : scales(scaler, "oo..o...ooooo....")) EXPECT_EQ(scale, 128.0);
}

// Nothing is learned, and no scale will change that.
TEST(LossScale, AStaticScaleThatOverflowsInEveryStepIsAnError) {
  LossScaler scaler({.loss_scale = 128});
  for (std::int64_t i = 1; i < LossScaler::kMostInVain; ++i) {
    scaler.update(true);
    EXPECT_EQ(scaler.overflows_in_a_row(), i);
    EXPECT_EQ(scaler.worth_a_warning(), i == 10);
  }
  try {
    scaler.update(true);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Errc::kNumeric);
    EXPECT_EQ(error.where(), "fp16.loss_scale");
  }
  // One good step, of this run or of the one before, and it goes on.
  LossScaler once({.loss_scale = 128}), restored({.loss_scale = 128});
  once.update(false);
  restored.restore(once.state());
  int told = 0;
  for (int i = 0; i < 2000; ++i) {
    once.update(true);
    restored.update(true);
    told += once.worth_a_warning();
  }
  EXPECT_EQ(told, 3) << "after 10, 100 and 1000";
  once.update(false);
  EXPECT_EQ(once.overflows_in_a_row(), 0);
}

// The same in another form: the scale is what the history of overflows says, and is made anew from all of it.
// Nothing: it fails.
std::optional<double> scale_after(const LossScaleConfig& c, const std::vector<bool>& history) {
  double scale = std::pow(2.0, c.initial_scale_power);
  int unpunished = c.hysteresis - 1;  // overflows that do not halve yet
  std::int64_t good = 0;              // steps without overflow in a row
  for (std::size_t i = 0; i < history.size(); ++i) {
    if (history[i]) {
      good = 0;
      if (unpunished-- > 0) continue;
      unpunished = 0;
      if (scale <= c.min_loss_scale) return std::nullopt;
      scale = scale / 2 < c.min_loss_scale ? c.min_loss_scale : scale / 2;
    } else {
      ++good;
      const bool doubles = good == c.loss_scale_window;
      if (doubles) scale *= 2, good = 0;
      if (c.consecutive_hysteresis || doubles) unpunished = c.hysteresis - 1;
    }
  }
  return scale;
}

std::vector<LossScaleConfig> configs() {
  std::vector<LossScaleConfig> all;
  for (const std::int64_t window : {1, 2, 5, 17}) {
    for (const int hysteresis : {1, 2, 4}) {
      for (const bool consecutive : {false, true}) {
        for (const double minimum : {0.5, 3.0}) {
          all.push_back({.initial_scale_power = 5,
                         .loss_scale_window = window,
                         .hysteresis = hysteresis,
                         .consecutive_hysteresis = consecutive,
                         .min_loss_scale = minimum});
        }
      }
    }
  }
  return all;
}

TEST(LossScale, RandomHistories) {
  const std::uint64_t seed = test::test_seed(20240901);
  SCOPED_TRACE(testing::Message() << "ZG_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  std::int64_t failed = 0, finished = 0;
  for (const LossScaleConfig& config : configs()) {
    for (const std::uint64_t one_in : {2u, 3u, 8u, 30u}) {
      LossScaler scaler(config);
      std::vector<bool> history;
      bool fails = false;
      for (int step = 0; step < 120 && !fails; ++step) {
        const bool overflow = random() % one_in == 0;
        history.push_back(overflow);
        const std::optional<double> expected = scale_after(config, history);
        fails = !expected;
        if (fails) {
          EXPECT_THROW(scaler.update(overflow), Error) << "step " << step;
          continue;
        }
        scaler.update(overflow);
        ASSERT_EQ(scaler.scale(), *expected) << "step " << step;
      }
      fails ? ++failed : ++finished;
    }
  }
  EXPECT_GT(failed, 0);
  EXPECT_GT(finished, 0);
}

// Saved after any step and restored, it goes on as the one that was not.
TEST(LossScale, ARestoredScalerGoesOnAlike) {
  const std::string steps = "..o.o.....oo....o......oooo........";
  for (const bool consecutive : {false, true}) {
    const LossScaleConfig config{.initial_scale_power = 8,
                                 .loss_scale_window = 4,
                                 .hysteresis = 3,
                                 .consecutive_hysteresis = consecutive};
    const Values expected = scales(config, steps);
    for (std::size_t cut = 0; cut <= steps.size(); ++cut) {
      LossScaler first(config), second(config);
      Values found = scales(first, steps.substr(0, cut));
      second.restore(first.state());
      EXPECT_TRUE(second.state() == first.state());
      for (const double scale : scales(second, steps.substr(cut))) found.push_back(scale);
      ASSERT_EQ(found, expected) << "cut at " << cut;
    }
  }
}

TEST(LossScale, ARestoredScalerFollowsItsOwnConfiguration) {
  const LossScaler::State saved{.scale = 4, .steps = 10, .last_overflow = 3, .hysteresis = 3};
  LossScaler higher({.hysteresis = 2, .min_loss_scale = 16});
  higher.restore(saved);
  EXPECT_EQ(higher.scale(), 16.0);
  EXPECT_EQ(higher.state().hysteresis, 2);
  EXPECT_EQ(higher.state().last_overflow, 3);
  LossScaler fixed({.loss_scale = 32});
  fixed.restore(saved);
  EXPECT_EQ(fixed.scale(), 32.0);
}

TEST(LossScale, RefusesAStateThatNoRunLeft) {
  const LossScaler::State good{.scale = 4, .steps = 10, .last_overflow = 3, .hysteresis = 1};
  const auto refused = [&](const std::function<void(LossScaler::State&)>& change) {
    LossScaler scaler({});
    LossScaler::State state = good;
    change(state);
    const LossScaler::State before = scaler.state();
    EXPECT_THROW(scaler.restore(state), Error);
    EXPECT_TRUE(scaler.state() == before);
  };
  LossScaler({}).restore(good);
  refused([](auto& s) { s.scale = 0; });
  refused([](auto& s) { s.scale = std::numeric_limits<double>::quiet_NaN(); });
  refused([](auto& s) { s.scale = std::numeric_limits<double>::infinity(); });
  refused([](auto& s) { s.steps = -1; });
  refused([](auto& s) { s.last_overflow = 10; });
  refused([](auto& s) { s.last_overflow = -2; });
  refused([](auto& s) { s.hysteresis = 0; });
}

TEST(LossScale, NamesTheKeyOfWhatMakesNoSense) {
  const auto refused = [](const LossScaleConfig& config, const std::string& key) {
    const Error e = test::error_of([&] { LossScaler scaler(config); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), "fp16." + key) << e.what();
  };
  refused({.loss_scale = -1}, "loss_scale");
  refused({.loss_scale = std::numeric_limits<double>::infinity()}, "loss_scale");
  refused({.initial_scale_power = 128}, "initial_scale_power");
  refused({.initial_scale_power = 3, .min_loss_scale = 9}, "initial_scale_power");
  refused({.loss_scale_window = 0}, "loss_scale_window");
  refused({.hysteresis = 0}, "hysteresis");
  refused({.min_loss_scale = 0}, "min_loss_scale");
}

}  // namespace
}  // namespace zg
