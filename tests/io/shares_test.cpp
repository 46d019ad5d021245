// Bandwidths from samples, and splits from shares: arithmetic, without drives or clocks.
#include "io/shares.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "support.hpp"

namespace zg::io::test {
namespace {

constexpr double kWindow = Shares::kWindowSeconds;

class Noise {
 public:
  explicit Noise(const char* name) : random_(printed_seed(), name) {}
  // Uniform in [1 - amplitude, 1 + amplitude].
  double operator()(double amplitude) { return 1 + amplitude * (2 * random_.uniform(n_++) - 1); }
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(random_.below(n_++, static_cast<std::uint64_t>(bound)));
  }

 private:
  NamedRandom random_;
  std::uint64_t n_ = 0;
};

// One window in which every drive was busy for `busy` of the time, at its rate, give or take the noise.
bool sample(Shares& shares, const std::vector<double>& rates, Noise& noise, double amplitude,
            const std::vector<double>& busy = {}) {
  std::vector<DriveSample> samples;
  for (std::size_t d = 0; d < rates.size(); ++d) {
    const double s = kWindow * (busy.empty() ? 1 : busy[d]);
    samples.push_back({static_cast<std::int64_t>(rates[d] * s * noise(amplitude)), s, rates[d] > 0 ? s : 0});
  }
  return shares.sample(samples, kWindow);
}

void expect_shares(const Shares& shares, const std::vector<double>& rates, double tolerance) {
  const double sum = std::accumulate(rates.begin(), rates.end(), 0.0);
  double total = 0;
  for (std::size_t d = 0; d < rates.size(); ++d) {
    EXPECT_NEAR(shares.shares()[d], rates[d] / sum, tolerance * rates[d] / sum) << "drive " << d;
    total += shares.shares()[d];
  }
  EXPECT_NEAR(total, 1, 1e-9);
}

TEST(Shares, BeginWithTheWeights) {
  expect_shares(Shares({1, 1, 2, 4}, true), {1, 1, 2, 4}, 1e-9);
  expect_shares(Shares({1, 1, 1}, true), {1, 1, 1}, 1e-9);
  EXPECT_FALSE(Shares({1, 1}, true).learned());
}

TEST(Shares, AreLearnedAndStableUnderNoise) {
  Noise noise("learned");
  const std::vector<double> rates = {1e9, 1e9, 2e9, 4e9};
  Shares shares({1, 1, 1, 1}, true);
  for (int i = 0; i < 6; ++i) sample(shares, rates, noise, 0.2);
  EXPECT_TRUE(shares.learned());
  expect_shares(shares, rates, 0.2);
  // A mean of 5 windows of uniform noise of 0.2 has a deviation of 0.05; four of them are 0.2.
  for (int i = 0; i < 2000; ++i) {
    sample(shares, rates, noise, 0.2);
    expect_shares(shares, rates, 0.2);
    if (HasFailure()) FAIL() << "window " << i;
  }
}

// Whatever the phase of the change within the window: it is known after at most 0.3 s of busy samples.
TEST(Shares, ADriveTenTimesSlowerIsKnownSoon) {
  Noise noise("slower");
  for (double phase = 0; phase < 1; phase += 0.1) {
    std::vector<double> rates = {1e9, 1e9, 2e9, 4e9};
    Shares shares({1, 1, 1, 1}, true);
    for (int i = 0; i < 100; ++i) sample(shares, rates, noise, 0.2);
    rates[3] = 4e9 * phase + 4e8 * (1 - phase);
    sample(shares, rates, noise, 0.2);
    rates[3] = 4e8;
    for (int i = 0; i < 5; ++i) sample(shares, rates, noise, 0.2);
    expect_shares(shares, rates, 0.25);
    if (HasFailure()) FAIL() << "phase " << phase;
  }
}

TEST(Shares, ADriveThatRecoversIsKnownSoon) {
  Noise noise("recovers");
  std::vector<double> rates = {1e9, 1e9, 1e6};
  Shares shares({1, 1, 1}, true);
  for (int i = 0; i < 100; ++i) sample(shares, rates, noise, 0.2);
  EXPECT_NEAR(shares.shares()[2], Shares::kFloor, 1e-3);  // it is still asked
  rates[2] = 1e9;
  // With so little to do it is seldom busy, until it is thought faster.
  for (int i = 0; i < 40; ++i) sample(shares, rates, noise, 0.2, {1, 1, 0.05});
  expect_shares(shares, rates, 0.25);
}

TEST(Shares, WithoutSamplesTheEstimateStays) {
  Noise noise("idle");
  Shares shares({1, 1}, true);
  for (int i = 0; i < 20; ++i) sample(shares, {1e9, 3e9}, noise, 0);
  const std::vector<double> before = shares.shares();
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(shares.sample(std::vector<DriveSample>{{0, 0}, {0, 0}}, kWindow));
    EXPECT_FALSE(shares.sample(
        std::vector<DriveSample>{{static_cast<std::int64_t>(1e9 * kWindow), kWindow, kWindow}, {0, 0}},
        kWindow));
  }
  EXPECT_EQ(shares.shares(), before);
}

// One that waited for the others a third of the time had a short queue then, as a faster drive has where
// memory for what comes next is scarce.
TEST(Shares, ADriveThatWasNotKeptBusyIsNotThoughtSlower) {
  Noise noise("not kept busy");
  Shares shares({2, 1}, true);
  for (int i = 0; i < 20; ++i) sample(shares, {1e9, 0.5e9}, noise, 0);
  for (int i = 0; i < 100; ++i) sample(shares, {0.75e9, 0.5e9}, noise, 0, {0.67, 1});
  expect_shares(shares, {2, 1}, 0.05);
  for (int i = 0; i < 100; ++i) sample(shares, {0.75e9, 0.5e9}, noise, 0, {0.97, 1});
  expect_shares(shares, {1.5, 1}, 0.05);
}

// A drive that waits for the others has a short queue and delivers less than it could.
TEST(Shares, ASeldomBusyDriveIsNotThoughtSlowerButCanBeFaster) {
  Noise noise("seldom");
  Shares shares({1, 1}, true);
  for (int i = 0; i < 20; ++i) sample(shares, {1e9, 1e9}, noise, 0);
  for (int i = 0; i < 100; ++i) sample(shares, {1e9, 0.5e9}, noise, 0, {1, 0.3});
  expect_shares(shares, {1, 1}, 0.05);
  for (int i = 0; i < 100; ++i) sample(shares, {1e9, 2e9}, noise, 0, {1, 0.3});
  expect_shares(shares, {1, 2}, 0.05);
}

// Blocks of 4 MiB take a drive of 90 MB/s as long as a window: now none is done in one, and now two.
TEST(Shares, BlocksAsLongAsAWindowMakeNoNoise) {
  constexpr double kRates[] = {360e6, 270e6, 180e6, 90e6}, kBlock = 4 << 20;
  Shares shares({4, 3, 2, 1}, true);
  std::int64_t blocks[4] = {};
  for (int window = 1; window <= 2000; ++window) {
    std::vector<DriveSample> samples;
    for (int d = 0; d < 4; ++d) {
      const auto done = static_cast<std::int64_t>(window * kWindow * kRates[d] / kBlock);
      const std::int64_t n = done - std::exchange(blocks[d], done);
      samples.push_back({n * (4 << 20), kWindow, static_cast<double>(n) * kBlock / kRates[d]});
    }
    EXPECT_FALSE(shares.sample(samples, kWindow)) << "window " << window;
    if (HasFailure()) return;
  }
  EXPECT_TRUE(shares.learned());
  expect_shares(shares, {4, 3, 2, 1}, 1e-6);
}

// Silent for half a second, it is thought slow; that half second is not counted again when it goes on.
TEST(Shares, AStuckDriveThatGoesOnIsKnownSoon) {
  Shares shares({1, 1}, true);
  const auto sample = [&](double busy_before, std::int64_t bytes) {
    shares.sample(std::vector<DriveSample>{{50'000'000, kWindow, kWindow}, {bytes, kWindow, busy_before}},
                  kWindow);
  };
  for (int i = 0; i < 20; ++i) sample(kWindow, 50'000'000);
  for (int i = 0; i < 11; ++i) sample(0, 0);
  EXPECT_LT(shares.shares()[1], 0.02);
  sample(12 * kWindow, 50'000'000);
  for (int i = 0; i < 3; ++i) sample(kWindow, 50'000'000);
  expect_shares(shares, {1, 1}, 0.05);
}

TEST(Shares, AStuckDriveLosesItsShare) {
  Noise noise("stuck");
  Shares shares({1, 1}, true);
  for (int i = 0; i < 20; ++i) sample(shares, {1e9, 1e9}, noise, 0);
  for (int i = 0; i < 25; ++i) sample(shares, {1e9, 0}, noise, 0);
  EXPECT_LT(shares.shares()[1], 0.02);
}

TEST(Shares, UnmeasuredDrivesKeepTheirWeightBesideMeasuredOnes) {
  Shares shares({1, 2, 3}, true);
  shares.sample(std::vector<DriveSample>{{50'000'000, 0.05, 0.05}, {0, 0}, {150'000'000, 0.05, 0.05}},
                kWindow);  // 1 and 3 GB/s
  expect_shares(shares, {1, 2, 3}, 1e-6);
  EXPECT_EQ(shares.bytes_per_second(1), 0);
}

// Whatever counters say, no drive was busy for longer than time has passed, or for less than none.
// In bursts the latency of the first block counts in full, and a fast drive seems slower than it is, beside a
// slow one.
TEST(Shares, ADriveThatIdlesAtTimesDoesNotBecomeSlower) {
  Shares shares({1.0, 0.5}, true);
  const std::vector<DriveSample> bursts = {{20'000'000, 0.03, 0.03}, {12'000'000, 0.03, 0.03}};
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(shares.sample(bursts, kWindow));  // the weights stand
  EXPECT_FALSE(shares.learned());
  const std::vector<DriveSample> busy = {{50'000'000, kWindow, kWindow}, {10'000'000, kWindow, kWindow}};
  EXPECT_TRUE(shares.sample(busy, kWindow));
  EXPECT_NEAR(shares.shares()[0], 5.0 / 6, 1e-9);
  for (int i = 0; i < 100; ++i) shares.sample(std::vector<DriveSample>{bursts[0], {}}, kWindow);
  EXPECT_NEAR(shares.shares()[0], 5.0 / 6, 1e-9);
  // It may be faster than was known.
  for (int i = 0; i < 100; ++i) shares.sample(bursts, kWindow);
  EXPECT_NEAR(shares.bytes_per_second(0), 1e9, 1);
  EXPECT_NEAR(shares.bytes_per_second(1), 0.4e9, 1e6);
}

TEST(Shares, ImpossibleSamplesAreTakenForWhatTheyCanBe) {
  const auto rate = [](const DriveSample& sample, double wall_seconds) {
    Shares shares({1, 1}, true);
    shares.sample(std::vector<DriveSample>{sample, {50'000'000, kWindow, kWindow}}, wall_seconds);
    return shares.bytes_per_second(0);
  };
  EXPECT_NEAR(rate({50'000'000, 40 * kWindow, 40 * kWindow}, kWindow), 1e9, 1);  // and not a fortieth of it
  EXPECT_NEAR(rate({50'000'000, kWindow, 2 * kWindow}, kWindow), 1e9, 1);
  EXPECT_EQ(rate({50'000'000, -kWindow, kWindow}, kWindow), 0);  // nothing is known of it
  EXPECT_EQ(rate({50'000'000, kWindow, -kWindow}, kWindow), 0);
  EXPECT_EQ(rate({50'000'000, kWindow, kWindow}, -1), 0);
  // What was gathered before is not taken back.
  Shares shares({1, 1}, true);
  const DriveSample other = {50'000'000, kWindow, kWindow};
  const auto sample = [&](std::int64_t bytes, double busy) {
    shares.sample(std::vector<DriveSample>{{bytes, busy, busy}, other}, std::max(busy, 0.0));
  };
  sample(10'000'000, 0.01);
  sample(-70'000'000, -3);
  EXPECT_EQ(shares.bytes_per_second(0), 0);
  sample(10'000'000, 0.01);
  EXPECT_NEAR(shares.bytes_per_second(0), 1e9, 1);
  for (int i = 0; i < 100; ++i) sample(-70'000'000, kWindow);
  for (const double share : shares.shares()) {
    EXPECT_GT(share, 0);
    EXPECT_LE(share, 1);
  }
}

TEST(Shares, GivenForGoodTheyStay) {
  Noise noise("fixed");
  Shares shares({1, 3}, false);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(sample(shares, {5e9, 1e9}, noise, 0));
  expect_shares(shares, {1, 3}, 1e-9);
  EXPECT_FALSE(shares.learned());
}

constexpr std::int64_t kStripe = 8;
const std::vector<std::int64_t> kRoom = {1 << 30, 1 << 30, 1 << 30, 1 << 30};

std::vector<std::int64_t> split(Splitter& splitter, std::int64_t grains, const std::vector<double>& shares,
                                const std::vector<std::int64_t>& free = kRoom) {
  std::vector<std::int64_t> given;
  EXPECT_TRUE(splitter.split(grains, shares, free, given));
  EXPECT_EQ(std::accumulate(given.begin(), given.end(), std::int64_t{0}), grains);
  for (std::size_t d = 0; d < given.size(); ++d) EXPECT_LE(given[d], free[d]);
  splitter.commit(grains, shares, free, given);
  EXPECT_NEAR(std::accumulate(splitter.credit().begin(), splitter.credit().end(), 0.0), 0, 1e-3);
  return given;
}

TEST(Splitter, LargeExtentsAreCutByShares) {
  Splitter splitter(4, kStripe);
  const std::vector<double> shares = {0.125, 0.125, 0.25, 0.5};
  EXPECT_EQ(split(splitter, 128, shares), (std::vector<std::int64_t>{16, 16, 32, 64}));
  EXPECT_EQ(split(splitter, 128, shares), (std::vector<std::int64_t>{16, 16, 32, 64}));
}

TEST(Splitter, SmallExtentsGoToOneDriveInTurn) {
  Splitter splitter(4, kStripe);
  std::vector<int> times(4);
  for (int i = 0; i < 80; ++i) {
    const std::vector<std::int64_t> given = split(splitter, 4, {0.125, 0.125, 0.25, 0.5});
    for (std::size_t d = 0; d < 4; ++d) {
      EXPECT_TRUE(given[d] == 0 || given[d] == 4);
      times[d] += given[d] > 0;
    }
  }
  EXPECT_EQ(times, (std::vector<int>{10, 10, 20, 40}));
}

// In any mix of sizes what each got never strays from its share by more than a fixed number of stripes.
TEST(Splitter, InTheLongRunSharesAreExactAndNoPartIsSmall) {
  Noise noise("splits");
  const std::vector<double> shares = {0.01, 0.19, 0.25, 0.55};
  Splitter splitter(4, kStripe);
  std::vector<std::int64_t> total(4);
  std::int64_t sum = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::int64_t grains = 1 + noise.below(noise.below(2) == 0 ? 12 : 200);
    const std::vector<std::int64_t> given = split(splitter, grains, shares);
    sum += grains;
    for (std::size_t d = 0; d < 4; ++d) {
      total[d] += given[d];
      EXPECT_TRUE(given[d] == 0 || given[d] >= std::min(grains, kStripe)) << given[d] << " of " << grains;
      EXPECT_LE(std::abs(static_cast<double>(total[d]) - shares[d] * static_cast<double>(sum)),
                4 * 4 * kStripe);
    }
    if (HasFailure()) FAIL() << "split " << i;
  }
}

TEST(Splitter, OthersTakeOverForAFullDriveAndItIsNotOwedIt) {
  Splitter splitter(3, kStripe);
  const std::vector<double> shares = {0.5, 0.25, 0.25};
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(split(splitter, 64, shares, {4, 1000, 1000}), (std::vector<std::int64_t>{0, 32, 32}));
  }
  // Space again: its share, and not what it missed.
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(split(splitter, 64, shares, {1000, 1000, 1000}), (std::vector<std::int64_t>{32, 16, 16}));
  }
}

TEST(Splitter, SucceedsExactlyIfEnoughIsFree) {
  Noise noise("tight");
  Splitter splitter(3, kStripe);
  for (int i = 0; i < 5000; ++i) {
    const std::vector<std::int64_t> free = {noise.below(30), noise.below(30), noise.below(30)};
    const std::int64_t grains = 1 + noise.below(90), room = free[0] + free[1] + free[2];
    std::vector<std::int64_t> given;
    if (grains > room) {
      EXPECT_FALSE(splitter.split(grains, std::vector<double>{0.2, 0.3, 0.5}, free, given));
    } else {
      split(splitter, grains, {0.2, 0.3, 0.5}, free);
    }
    if (HasFailure()) FAIL() << i;
  }
}

TEST(Splitter, ADriveWithALongQueueGetsNothingUntilItIsWorkedOff) {
  Splitter splitter(2, kStripe);
  const std::vector<double> before = {0.5, 0.5}, after = {0.9, 0.1};
  for (int i = 0; i < 10; ++i) split(splitter, 128, before);
  // 1280 grains under way, of which drive 1 has 640 and would now have 128: 512 too many.
  splitter.shares_changed(before, after, 1280);
  std::int64_t given = 0, splits = 0;
  for (; given == 0 && splits < 1000; ++splits) given = split(splitter, 128, after)[1];
  // Each split makes up for 12.8 of them.
  EXPECT_NEAR(static_cast<double>(splits), 512 / 12.8, 2);
}

}  // namespace
}  // namespace zg::io::test
