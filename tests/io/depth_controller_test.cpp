// The controller against simulated drives, in virtual time.
#include "io/depth_controller.hpp"

#include <algorithm>
#include <cmath>
#include <queue>
#include <vector>

#include "support.hpp"

namespace zg::io::test {
namespace {

constexpr double kKiB = 1024, kMiB = 1024 * kKiB;
constexpr int kCap = 256;

std::uint64_t seed() {
  static const std::uint64_t once = printed_seed();
  return once;
}

struct Simulated {
  double latency = 100e-6;  // behind the link, in parallel
  double bytes_per_second = 2e9;
  double block = 1 * kMiB;
  // Servers that share the bandwidth. A block waits for the first free one or, `striped`, for the one where
  // its bytes lie (random): then the more blocks the more servers have work, without an end.
  int channels = 1;
  bool striped = false;
  int congested_depth = 1 << 20;
  double congestion = 0;
  double noise = 0;                   // service times vary by this, evenly
  double stall_every = 0, stall = 0;  // mean seconds: the host does not look, and begins nothing
  double small_share = 0;             // so many of the blocks are an eighth as large

  double service() const { return block / bytes_per_second; }
  double knee() const { return channels + latency / service(); }
};

// The caller offers `on` blocks, waits until they are done and sleeps `off` seconds, or offers without end
// (0).
struct Load {
  int on = 0;
  double off = 0;
  int parallel = 1 << 20;  // never has more outstanding than this
};

enum class Depth { kFound, kFixed };

class Simulation {
 public:
  Simulation(const Simulated& drive, int initial, const Load& load = {}, Depth depth = Depth::kFound,
             int cap = kCap)
      : drive_(drive),
        load_(load),
        fixed_(depth == Depth::kFixed),
        free_at_(static_cast<std::size_t>(drive.channels)),
        controller_(initial, cap) {
    to_offer_ = load_.on;
    fill();
  }

  // Changes what blocks begun from now on meet.
  Simulated& drive() { return drive_; }
  const DepthController& controller() const { return controller_; }

  struct Span {
    double bytes_per_second = 0;
    double mean_depth = 0, deviation = 0;  // of the depth, in time; the deviation as a share of the mean
    int least_depth = 1 << 20, most_depth = 0;
  };
  Span run(double seconds) {
    Span span;
    const double begin = now_, end = now_ + seconds;
    double bytes = 0, sum = 0, squares = 0;
    while (!flying_.empty() && flying_.top().due < end) {
      const Flight flight = flying_.top();
      flying_.pop();
      const double depth = controller_.depth(), at = seen(flight.due);
      sum += depth * (at - now_);
      squares += depth * depth * (at - now_);
      now_ = at;
      bytes += flight.bytes;
      hand_over(flight);
      if (load_.on > 0 && to_offer_ == 0 && flying_.empty()) {
        now_ += load_.off;
        to_offer_ = load_.on;
      }
      fill();
      span.least_depth = std::min(span.least_depth, controller_.depth());
      span.most_depth = std::max(span.most_depth, controller_.depth());
    }
    span.bytes_per_second = bytes / (std::max(now_, end) - begin);
    span.mean_depth = sum / (now_ - begin);
    span.deviation = std::sqrt(std::max(0.0, squares / (now_ - begin) - span.mean_depth * span.mean_depth)) /
                     span.mean_depth;
    now_ = std::max(now_, end);
    return span;
  }

 private:
  struct Flight {
    double due, begun, bytes;
    bool operator<(const Flight& other) const { return due > other.due; }
  };

  static Clock::time_point at(double seconds) {
    return Clock::time_point(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(1 + seconds)));
  }
  double seen(double due) {
    if (drive_.stall_every == 0) return std::max(due, now_);
    while (due > stall_end_) {
      stall_begin_ = stall_end_ + 2 * uniform() * drive_.stall_every;
      stall_end_ = stall_begin_ + 2 * uniform() * drive_.stall;
    }
    return std::max(now_, due < stall_begin_ ? due : stall_end_);
  }
  double uniform() { return random_.uniform(count_++); }
  double varied(double seconds) {
    return drive_.noise == 0 ? seconds : seconds * (1 + drive_.noise * (2 * uniform() - 1));
  }
  void hand_over(const Flight& flight) {
    if (fixed_) return;
    const int in_flight = static_cast<int>(flying_.size()) + 1;
    const bool more = load_.on > 0 ? to_offer_ > 0 : in_flight < load_.parallel;
    controller_.done(at(now_), static_cast<std::int64_t>(flight.bytes), now_ - flight.begun, more);
  }
  void fill() {
    while (static_cast<int>(flying_.size()) < std::min(controller_.depth(), load_.parallel) &&
           (load_.on == 0 || to_offer_ > 0)) {
      if (load_.on > 0) --to_offer_;
      begin();
    }
  }
  void begin() {
    const double bytes =
        drive_.small_share > 0 && uniform() < drive_.small_share ? drive_.block / 8 : drive_.block;
    const double over = std::max(0, static_cast<int>(flying_.size()) + 1 - drive_.congested_depth);
    const double slower = 1 + drive_.congestion * over;
    auto server = drive_.striped
                      ? free_at_.begin() + static_cast<int>(uniform() * static_cast<double>(free_at_.size()))
                      : std::min_element(free_at_.begin(), free_at_.end());
    *server = std::max(*server, now_) +
              varied(bytes / drive_.bytes_per_second * static_cast<double>(free_at_.size()) * slower);
    flying_.push({*server + varied(drive_.latency * slower), now_, bytes});
  }

  Simulated drive_;
  const Load load_;
  const bool fixed_;
  int to_offer_ = 0;
  std::vector<double> free_at_;
  std::priority_queue<Flight> flying_;
  double now_ = 0, stall_begin_ = 0, stall_end_ = 0;
  const NamedRandom random_{seed(), "drive"};
  std::uint64_t count_ = 0;
  DepthController controller_;
};

// What the drive gives at a fixed depth, and at the best of them.
double bandwidth_at(const Simulated& drive, int depth) {
  const double seconds = std::max(0.1, 300 * drive.service());
  Simulation simulation(drive, depth, {}, Depth::kFixed);
  simulation.run(seconds / 4);
  return simulation.run(seconds).bytes_per_second;
}
double best_bandwidth(const Simulated& drive) {
  double best = 0;
  for (int depth = 1; depth <= kCap; depth = std::max(depth + 1, depth * 5 / 4))
    best = std::max(best, bandwidth_at(drive, depth));
  return best;
}

std::string text_of(const Simulated& d, int initial) {
  return fmt::format(
      "latency {:.0f} us, {:.1f} GB/s, {:.0f} KiB, {}{} channels, congested by {} from {}, noise {}, knee "
      "{:.1f}, begun at {}",
      d.latency * 1e6, d.bytes_per_second / 1e9, d.block / kKiB, d.channels, d.striped ? " striped" : "",
      d.congestion, d.congested_depth, d.noise, d.knee(), initial);
}

// Two seconds to find its depth, then it has to be right. True if it also kept still, which under noise is a
// matter of chance.
bool expect_finds(const Simulated& drive, int initial, double best) {
  SCOPED_TRACE(text_of(drive, initial));
  Simulation simulation(drive, initial);
  simulation.run(1);
  const auto first = simulation.run(1), then = simulation.run(3);
  EXPECT_GE(first.bytes_per_second, 0.9 * best);
  EXPECT_GE(then.bytes_per_second, 0.95 * best);
  EXPECT_GE(then.least_depth, 1);
  EXPECT_LE(then.most_depth, kCap);
  // A queue too deep has to drain, as fast as the drive goes.
  if (initial * drive.service() > 0.1) return true;
  EXPECT_LE(then.mean_depth, 2.5 * drive.knee() + 4);
  // Where one block is much, so is a question about one block more.
  return then.deviation < (then.mean_depth < 8 ? 0.5 : 0.3);
}

class DepthTest : public testing::TestWithParam<double> {};  // noise

TEST_P(DepthTest, FindsTheKneeOfALink) {
  int cases = 0, still = 0;
  for (const double latency : {50e-6, 500e-6, 5e-3}) {
    for (const double rate : {0.5e9, 2e9, 7e9}) {
      for (const double block : {128 * kKiB, kMiB, 8 * kMiB}) {
        const Simulated drive{
            .latency = latency, .bytes_per_second = rate, .block = block, .noise = GetParam()};
        const double best = std::min(rate, kCap * block / (latency + drive.service()));
        for (const int initial : {1, 32, kCap}) {
          ++cases;
          still += expect_finds(drive, initial, best) ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GE(still, cases - 6);
}

// A step down that went too far is not answered with small ones from where it began.
TEST_P(DepthTest, GoesStraightToTheKneeThatItHasSeen) {
  const Simulated drive{.latency = 5e-3, .bytes_per_second = 2e9, .block = 128 * kKiB, .noise = GetParam()};
  Simulation simulation(drive, kCap);
  simulation.run(0.3);
  const auto then = simulation.run(0.3);
  EXPECT_LE(then.mean_depth, 1.6 * drive.knee());
}

TEST_P(DepthTest, FindsTheNumberOfChannels) {
  for (const int channels : {2, 4, 16, 64}) {
    const Simulated drive{.latency = 80e-6,
                          .bytes_per_second = 3e9,
                          .block = 128 * kKiB,
                          .channels = channels,
                          .noise = GetParam()};
    const double best = best_bandwidth(drive);
    for (const int initial : {1, 32, kCap}) expect_finds(drive, initial, best);
  }
}

// No knee at all: each block more brings less than the one before.
TEST_P(DepthTest, GetsNearTheEndOfASoftKnee) {
  const Simulated drive{.latency = 80e-6,
                        .bytes_per_second = 3e9,
                        .block = 128 * kKiB,
                        .channels = 4,
                        .striped = true,
                        .noise = GetParam()};
  const double best = best_bandwidth(drive);
  for (const int initial : {1, 32, kCap}) {
    SCOPED_TRACE(text_of(drive, initial));
    Simulation simulation(drive, initial);
    simulation.run(2);
    EXPECT_GE(simulation.run(3).bytes_per_second, 0.85 * best);
  }
}

TEST_P(DepthTest, ComesDownFromCongestion) {
  for (const int congested : {4, 16, 64}) {
    for (const double congestion : {0.005, 0.02}) {
      for (const double latency : {100e-6, 1e-3}) {
        const Simulated drive{.latency = latency,
                              .bytes_per_second = 3e9,
                              .block = 256 * kKiB,
                              .congested_depth = congested,
                              .congestion = congestion,
                              .noise = GetParam()};
        const double best = best_bandwidth(drive);
        for (const int initial : {1, 32, kCap}) {
          SCOPED_TRACE(text_of(drive, initial));
          Simulation simulation(drive, initial);
          simulation.run(2);
          const auto then = simulation.run(3);
          EXPECT_GE(then.bytes_per_second, 0.95 * best);
          EXPECT_LE(then.mean_depth, 2 * drive.knee() + 1);
        }
      }
    }
  }
}

// A host that is busy with other things looks late, so that the drive runs dry: depth is what helps.
TEST_P(DepthTest, GoesDeeperOnABusyHost) {
  Simulated drive{.latency = 100e-6, .bytes_per_second = 2e9, .block = 128 * kKiB, .noise = GetParam()};
  drive.stall_every = 8e-3;
  double share = 0;
  int cases = 0;
  for (const double stall : {0.5e-3, 2e-3, 6e-3}) {
    drive.stall = stall;
    const double best = best_bandwidth(drive);
    for (const int initial : {1, 32, kCap}) {
      Simulation simulation(drive, initial);
      simulation.run(3);
      share += simulation.run(3).bytes_per_second / best;
      ++cases;
    }
  }
  EXPECT_GE(share / cases, 0.85);  // at the depth of a host that always looks: 0.72
}

TEST_P(DepthTest, FollowsADriveThatChanges) {
  const Simulated before{
      .latency = 300e-6, .bytes_per_second = 3e9, .block = 256 * kKiB, .noise = GetParam()};
  std::vector<Simulated> changed(6, before);
  changed[0].bytes_per_second /= 10;
  changed[1].latency *= 10;
  changed[2].latency *= 10;
  changed[2].bytes_per_second /= 10;
  changed[3].congested_depth = 3;
  changed[3].congestion = 0.1;
  changed[4].bytes_per_second *= 3;
  changed[5].latency /= 4;
  for (const Simulated& after : changed) {
    SCOPED_TRACE(text_of(after, 32));
    const double best[] = {best_bandwidth(after), best_bandwidth(before)};
    Simulation simulation(before, 32);
    simulation.run(2);
    for (const double top : best) {  // there, and back
      simulation.drive() = top == best[0] ? after : before;
      simulation.run(1);
      const auto then = simulation.run(1.5);
      EXPECT_GE(then.bytes_per_second, 0.95 * top);
      EXPECT_LE(then.mean_depth, 2 * simulation.drive().knee() + 2);
    }
  }
}

TEST_P(DepthTest, BlocksOfSeveralSizesPassThroughOne) {
  for (const double share : {0.2, 0.8}) {
    const Simulated drive{.latency = 300e-6,
                          .bytes_per_second = 3e9,
                          .block = 1 * kMiB,
                          .noise = GetParam(),
                          .small_share = share};
    const double best = best_bandwidth(drive);
    for (const int initial : {1, 32, kCap}) {
      SCOPED_TRACE(text_of(drive, initial));
      Simulation simulation(drive, initial);
      simulation.run(2);
      const auto then = simulation.run(3);
      EXPECT_GE(then.bytes_per_second, 0.95 * best);
      EXPECT_LE(then.mean_depth, 12);  // the small ones alone would want 8
    }
  }
}

// Bursts that are longer than the depth say enough about the drive, also when each is shorter than a window.
TEST_P(DepthTest, LearnsFromBursts) {
  const Simulated drive{.latency = 300e-6, .bytes_per_second = 3e9, .block = 128 * kKiB, .noise = GetParam()};
  for (const int initial : {1, 32}) {
    for (const double off : {1e-3, 20e-3}) {
      SCOPED_TRACE(text_of(drive, initial));
      Simulation simulation(drive, initial, {.on = 100, .off = off}),
          deep(drive, kCap, {.on = 100, .off = off}, Depth::kFixed);
      simulation.run(4);
      const auto then = simulation.run(2);
      EXPECT_GE(then.bytes_per_second, 0.95 * deep.run(2).bytes_per_second);
      EXPECT_LE(then.mean_depth, 2 * drive.knee() + 1);
    }
  }
}

TEST_P(DepthTest, KeepsItsDepthWhenTheCallerOffersTooLittle) {
  const Simulated drive{.latency = 500e-6, .bytes_per_second = 3e9, .block = 128 * kKiB, .noise = GetParam()};
  for (const int initial : {32, 100, kCap}) {
    for (const Load& load :
         {Load{.parallel = 1}, Load{.parallel = 20}, Load{.on = 30, .off = 1e-3}, Load{.on = 5}}) {
      SCOPED_TRACE(
          fmt::format("{}, {} at once, bursts of {}", text_of(drive, initial), load.parallel, load.on));
      Simulation simulation(drive, initial, load);
      const auto all = simulation.run(2);
      EXPECT_EQ(all.least_depth, initial);
      EXPECT_EQ(all.most_depth, initial);
    }
  }
}

// From below, what is offered is also what can be told apart: all of it may be in flight.
TEST_P(DepthTest, RisesToWhatTheCallerOffers) {
  const Simulated drive{.latency = 500e-6, .bytes_per_second = 3e9, .block = 128 * kKiB, .noise = GetParam()};
  for (const int offered : {3, 5, 8}) {
    SCOPED_TRACE(fmt::format("{} at once", offered));
    Simulation simulation(drive, 1, {.parallel = offered});
    simulation.run(2);
    EXPECT_GE(simulation.run(1).bytes_per_second, 0.95 * bandwidth_at(drive, offered));
  }
}

INSTANTIATE_TEST_SUITE_P(Noise, DepthTest, testing::Values(0.0, 0.2),
                         [](const auto& p) { return p.param == 0 ? "none" : "20_percent"; });

TEST(DepthLimits, StaysWithinItsCap) {
  const Simulated drive{.latency = 20e-3, .bytes_per_second = 7e9, .block = 128 * kKiB};
  for (const int cap : {1, 2, 7, 32}) {
    Simulation simulation(drive, 1, {}, Depth::kFound, cap);
    simulation.run(3);
    const auto then = simulation.run(1);
    EXPECT_LE(then.most_depth, cap);
    EXPECT_GE(then.bytes_per_second, 0.95 * bandwidth_at(drive, cap));
  }
}

TEST(DepthDeathTest, RefusesAnImpossibleDepth) {
  EXPECT_DEATH(DepthController(0, 8), "depth 0 of at most 8");
  EXPECT_DEATH(DepthController(9, 8), "depth 9 of at most 8");
}

}  // namespace
}  // namespace zg::io::test
