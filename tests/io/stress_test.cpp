// Random use of a volume by four threads, with every fault there is. ZG_STRESS_OPERATIONS says how long.
#include "stress_user.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

constexpr int kUsers = 4, kDrives = 3;
constexpr std::int64_t kDriveBytes = 512 * kKiB, kGrain = 4 * kKiB, kBlock = 16 * kKiB;

class VolumeStressTest : public testing::Test {
 protected:
  FaultModel faults(std::uint64_t seed) const {
    FaultModel m;
    m.seed = seed;
    m.error_rate = 0.004;
    m.interrupt_rate = 0.005;
    m.short_rate = 0.01;
    m.delay_rate = 0.001;
    if (dangers_.lies) m.torn_rate = m.flip_rate = 0.003;
    m.rules = {{.fault = Fault::kError,
                .error = ENOSPC,
                .drive = dangers_.full_drive,
                .op = Op::kWrite,
                .from = dangers_.full_from,
                .to = dangers_.full_to},
               {.fault = Fault::kError,
                .drive = 0,
                .op = Op::kRead,
                .from = 20 * kPage,
                .to = 21 * kPage,
                .count = 100},
               {.fault = Fault::kDelay, .drive = 1, .from = 5 * kPage, .to = 6 * kPage, .count = 500}};
    if (dangers_.lies) {
      m.rules.push_back(
          {.fault = Fault::kFlip, .drive = 0, .op = Op::kRead, .from = 9 * kPage, .to = 10 * kPage});
      m.rules.push_back({.fault = Fault::kTorn, .drive = 1, .from = 40 * kPage, .to = 42 * kPage});
    }
    return m;
  }

  void open(std::uint64_t seed) {
    EngineOptions options;
    options.backend = Backend::kRam;
    options.block_size = kBlock;
    options.queue_depth = 16;
    options.faults = faults(seed);
    std::vector<DriveOptions> drives;
    for (int d = 0; d < kDrives; ++d)
      drives.push_back({.path = fmt::format("/mnt/{}", d), .bytes = kDriveBytes});
    engine_ = make_engine(options, drives);
    volume_ = make_volume(*engine_, {.grain = kGrain, .stripe = 2 * kGrain});
  }

  Tally run(std::int64_t operations) {
    const std::uint64_t seed = printed_seed();
    open(seed);
    StallWatch watch(1, kPatienceSeconds, [&] { return engine_->state(); });
    std::vector<std::unique_ptr<VolumeUser>> users;
    for (int u = 0; u < kUsers; ++u)
      users.push_back(std::make_unique<VolumeUser>(*volume_, watch, dangers_, seed, u));
    const auto begin = Clock::now();
    on_threads(users, [&](VolumeUser& user) {
      for (std::int64_t i = 0; i < operations / kUsers && !testing::Test::HasFailure(); ++i) user.step();
      user.end();
    });
    const double seconds = seconds_between(begin, Clock::now());
    for (int d = 0; d < kDrives; ++d) {
      EXPECT_EQ(volume_->space(d).used, 0);
      EXPECT_EQ(volume_->space(d).largest, kDriveBytes);
    }
    // All completions come before the users are destroyed.
    volume_.reset();
    const std::int64_t resubmitted = engine_->counters(0).resubmitted;
    engine_.reset();
    Tally sum;
    for (const auto& user : users) sum.add(user->tally());
    EXPECT_EQ(sum.completed, sum.begun + sum.read_again);
    EXPECT_EQ(sum.created, sum.destroyed);
    printf("%lld operations in %.1f s, %.0f a second; %lld blocks continued\n%s\n",
           static_cast<long long>(operations), seconds, static_cast<double>(operations) / seconds,
           static_cast<long long>(resubmitted), sum.text().c_str());
    return sum;
  }

  // Every kind of operation was tried, and most succeeded.
  static void expect_variety(const Tally& t) {
    if (t.completed < 10'000) return;  // too few to have seen everything
    EXPECT_GT(t.refused, 0);
    EXPECT_GT(t.invalidated, 0);
    EXPECT_GT(t.promoted, 0);
    EXPECT_GT(t.write_eio, 0);
    EXPECT_GT(t.write_enospc, 0);
    EXPECT_GT(t.read_eio, 0);
    EXPECT_GT(t.read_again, 0);
    EXPECT_GT(t.found_empty, 0);
    EXPECT_GT(t.staged, 0);
    EXPECT_GT(t.abandoned, 0);
    EXPECT_GT(t.written, 20 * (t.write_eio + t.write_enospc));
    EXPECT_GT(t.read, 10 * (t.read_eio + t.bad_sum));
  }

  Dangers dangers_ = {.full_from = 100 * kPage, .full_to = 101 * kPage};
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Volume> volume_;
};

TEST_F(VolumeStressTest, EveryByteReadIsTheByteWrittenOrAnErrorThatNamesItsExtent) {
  dangers_.lies = true;
  const Tally t = run(stress_operations() * 3 / 4);
  expect_variety(t);
  EXPECT_GT(t.bad_sum, 0);
}

TEST_F(VolumeStressTest, WhereNoDriveLiesNothingIsLost) {
  const Tally t = run(stress_operations() / 4);
  expect_variety(t);
  EXPECT_EQ(t.bad_sum, 0);
}

}  // namespace
}  // namespace zg::io::test
