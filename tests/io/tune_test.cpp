// The search of io-tune on surfaces whose best point is known, with a clock of its own.
#include "ziggurat/io/tune.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "io/tune_order.hpp"
#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

using Surface = std::function<double(const TunePoint&)>;  // bytes per second

constexpr double kCost = 0.7;  // seconds of one measurement

// A machine that is a formula: each measurement takes its time and has its noise, a function of the seed, the
// point and the round alone.
struct FakeDrives {
  Surface surface;
  double noise = 0;
  std::uint64_t seed = 1;
  double cost = kCost;
  int stop_after = -1;  // measurements, as if Ctrl-C came then

  double now = 0;
  std::vector<TuneRecord> measured = {};

  TuneSample sample(const TunePoint& point, int round) const {
    const NamedRandom random(seed, fmt::format("{} round {}", text_of(point), round));
    const double base = surface(point);
    TuneSample s;
    s.read.bytes_per_second = base * std::exp(noise * random.normal(0));
    s.write.bytes_per_second = base * std::exp(noise * random.normal(1));
    s.read.cpu_seconds_per_gb = s.write.cpu_seconds_per_gb = 0.1 * point.queues;
    return s;
  }
  TuneMeter meter() {
    return {.measure = [this](const TunePoint& point, int round) -> std::optional<TuneSample> {
              if (static_cast<int>(measured.size()) == stop_after) return std::nullopt;
              now += cost;
              measured.push_back({.point = point, .round = round, .sample = sample(point, round)});
              return measured.back().sample;
            },
            .seconds = [this] { return now; }};
  }
};

TuneOptions options_for(std::vector<Backend> backends, int cores = 4) {
  TuneOptions options;
  options.space = TuneSpace::usual(std::move(backends), cores);
  options.space.file_bytes = 4 * kGiB;
  options.expected_seconds = kCost;
  return options;
}

double mib(const TunePoint& p) {
  return static_cast<double>(p.block_size) / kMiB;
}

// The best of all points that may be measured, by looking at each.
double best_of(const TuneSpace& space, const Surface& surface) {
  double best = 0;
  for (const Backend backend : space.backends)
    for (const std::int64_t block_size : space.block_sizes)
      for (const int depth : space.depths)
        for (const int queues : space.queues) {
          const TunePoint point{backend, block_size, depth, queues};
          if (skip_reason(space, point, 0).empty()) best = std::max(best, surface(point));
        }
  return best;
}

const TuneCandidate& chosen_of(const TuneOutcome& outcome) {
  EXPECT_TRUE(outcome.found);
  return outcome.candidates.at(static_cast<std::size_t>(outcome.chosen));
}

void expect_none_twice(const std::vector<TuneRecord>& measured) {
  std::set<std::pair<int, TunePoint>> seen;
  for (const TuneRecord& r : measured) {
    EXPECT_TRUE(seen.emplace(r.round, r.point).second) << text_of(r.point) << " in round " << r.round;
  }
}

struct Shape {
  const char* name;
  std::vector<Backend> backends;
  Surface surface;
};

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> kShapes{
      {"needs depth",
       {Backend::kUring},
       [](const TunePoint& p) { return 3e9 * p.queue_depth / (p.queue_depth + 24.0) * (1 - 0.01 * mib(p)); }},
      {"needs big blocks",
       {Backend::kUring},
       [](const TunePoint& p) {
         return 3e9 * mib(p) / (mib(p) + 1.5) * p.queue_depth / (p.queue_depth + 0.2);
       }},
      {"congested beyond depth 8",
       {Backend::kUring, Backend::kThreads},
       [](const TunePoint& p) {
         return 2.5e9 * std::min(1.0, p.queue_depth / 8.0) / (1 + 0.03 * std::max(0, p.queue_depth - 8)) *
                mib(p) / (mib(p) + 0.1);
       }},
      {"flat", {Backend::kUring, Backend::kLibaio}, [](const TunePoint&) { return 2e9; }},
      {"ridge of 16 MiB in flight",
       {Backend::kUring},
       [](const TunePoint& p) {
         const double off = std::log2(mib(p) * p.queue_depth / 16), along = std::log2(mib(p) / 0.25);
         return 5e9 * std::exp(-off * off / 6) * std::exp(-along * along / 60);
       }},
      {"back ends that differ",
       {Backend::kUring, Backend::kLibaio, Backend::kThreads},
       [](const TunePoint& p) {
         const double d = p.queue_depth;
         if (p.backend == Backend::kThreads) return 2.6e9 * d / (d + 1) / (1 + d / 200);
         return (p.backend == Backend::kLibaio ? 3.2e9 : 2.8e9) * d / (d + 8) * mib(p) / (mib(p) + 0.2);
       }},
      {"queues help",
       {Backend::kUring},
       [](const TunePoint& p) {
         return 4e9 * (1 - 0.5 / p.queues) * p.queue_depth / (p.queue_depth + 4.0 * p.queues) * mib(p) /
                (mib(p) + 0.1);
       }},
      {"two hills",
       {Backend::kUring},
       [](const TunePoint& p) {
         const double x = std::log2(mib(p)), y = std::log2(p.queue_depth);
         const auto hill = [&](double bx, double dy) {
           return std::exp(-((x - bx) * (x - bx) + (y - dy) * (y - dy)) / 8);
         };
         return 3e9 * (0.2 + 0.8 * hill(-3, 7) + 0.75 * hill(4, 2));
       }},
  };
  return kShapes;
}

TEST(IoTune, FindsTheBestOfEveryShapeWithinItsTime) {
  const std::uint64_t seed = printed_seed();
  for (const Shape& shape : shapes()) {
    for (const double noise : {0.0, 0.005, 0.02}) {
      for (std::uint64_t s = 0; s < (noise > 0 ? 12u : 1u); ++s) {
        SCOPED_TRACE(fmt::format("{}, noise {}, seed {}", shape.name, noise, seed + s));
        const TuneOptions options = options_for(shape.backends);
        FakeDrives drives{.surface = shape.surface, .noise = noise, .seed = seed + s};
        const TuneOutcome outcome = tune(options, drives.meter());
        const TuneCandidate& chosen = chosen_of(outcome);
        EXPECT_GE(shape.surface(chosen.point), 0.97 * best_of(options.space, shape.surface))
            << text_of(chosen.point) << "; " << outcome.verdict;
        EXPECT_LE(drives.now, options.seconds + kCost);
        EXPECT_TRUE(outcome.search_complete) << drives.measured.size();
        EXPECT_GE(outcome.rounds, kTuneMinRounds);
        expect_none_twice(drives.measured);
        if (noise == 0) {
          EXPECT_TRUE(outcome.sure) << outcome.verdict;
          EXPECT_EQ(outcome.end, TuneEnd::kStable);
        }
      }
    }
  }
}

TEST(IoTune, TiesGoToTheCheaper) {
  TuneOptions options = options_for({Backend::kUring});
  FakeDrives flat{.surface = [](const TunePoint&) { return 2e9; }};
  const TuneOutcome outcome = tune(options, flat.meter());
  EXPECT_EQ(chosen_of(outcome).point, (TunePoint{Backend::kUring, 64 * kKiB, 1, 1}));
  EXPECT_TRUE(outcome.sure);

  // 0.5% more at ten times the depth is not worth it; 3% is.
  for (const double gain : {0.005, 0.03}) {
    FakeDrives drives{.surface = [&](const TunePoint& p) {
      return p.block_size == kMiB ? (p.queue_depth >= 64  ? 2e9 * (1 + gain)
                                     : p.queue_depth >= 4 ? 2e9
                                                          : 1e9)
                                  : 1e9;
    }};
    EXPECT_EQ(chosen_of(tune(options, drives.meter())).point.queue_depth, gain > 0.01 ? 64 : 4);
  }
}

TEST(IoTune, SaysThatItIsNotSureOfTwoThatAreEqual) {
  const std::uint64_t seed = printed_seed();
  TuneOptions options = options_for({Backend::kUring}, 1);
  options.space.block_sizes = {kMiB};
  options.space.depths = {8, 16};
  int unsure = 0;
  for (std::uint64_t s = 0; s < 20; ++s) {
    FakeDrives drives{.surface = [](const TunePoint&) { return 2e9; }, .noise = 0.05, .seed = seed + s};
    const TuneOutcome outcome = tune(options, drives.meter());
    ASSERT_EQ(outcome.comparisons.size(), 1u);
    unsure += !outcome.sure;
    EXPECT_EQ(outcome.verdict.rfind(outcome.sure ? "sure" : "not sure", 0), 0u) << outcome.verdict;
    EXPECT_EQ(outcome.sure, outcome.comparisons[0].order != TuneOrder::kUnclear);
  }
  EXPECT_GE(unsure,
            15);  // of 20, with at most 5% of wrong certainty for each by the test, and some by peeking
}

TEST(IoTune, IsSureOfTheFasterOfTwo) {
  const std::uint64_t seed = printed_seed();
  TuneOptions options = options_for({Backend::kUring}, 1);
  options.space.block_sizes = {kMiB};
  options.space.depths = {8, 16};
  for (std::uint64_t s = 0; s < 20; ++s) {
    FakeDrives drives{.surface = [](const TunePoint& p) { return p.queue_depth == 16 ? 2e9 : 1.8e9; },
                      .noise = 0.03,
                      .seed = seed + s};
    const TuneOutcome outcome = tune(options, drives.meter());
    EXPECT_TRUE(outcome.sure) << outcome.verdict;
    EXPECT_EQ(chosen_of(outcome).point.queue_depth, 16);
    EXPECT_EQ(outcome.comparisons[0].order, TuneOrder::kAhead);
    EXPECT_LT(outcome.comparisons[0].p, 0.05);
    EXPECT_EQ(outcome.end, TuneEnd::kStable);
    EXPECT_LT(outcome.rounds, kTuneMaxRounds);
  }
}

TEST(IoTune, RoundsAreInterleavedInOrdersOfTheirOwn) {
  FakeDrives drives{.surface = shapes()[0].surface};  // without noise the candidates keep their places
  const TuneOutcome outcome = tune(options_for({Backend::kUring}), drives.meter());
  std::map<int, std::vector<TunePoint>> rounds;
  for (const TuneRecord& r : drives.measured)
    if (r.round >= 0) rounds[r.round].push_back(r.point);
  ASSERT_GE(rounds.size(), 6u);
  std::set<std::vector<TunePoint>> orders;
  for (const auto& [round, points] : rounds) {
    EXPECT_EQ(points.size(), outcome.candidates.size());
    orders.insert(points);
  }
  EXPECT_GT(orders.size(), 2u);
  for (const TuneCandidate& c : outcome.candidates) EXPECT_EQ(std::ssize(c.samples), outcome.rounds);
}

TEST(IoTune, GoesOnWhereItWasStopped) {
  for (const Shape& shape : shapes()) {
    TuneOptions options = options_for(shape.backends);
    options.seconds = 1e5;  // so that stability, not the clock, ends it
    FakeDrives whole{.surface = shape.surface, .noise = 0.004, .seed = 7};
    const TuneOutcome expected = tune(options, whole.meter());
    const int total = static_cast<int>(whole.measured.size());
    for (const int stop : {0, 1, 13, total / 2, total - 12, total - 1}) {
      SCOPED_TRACE(fmt::format("{}, stopped after {} of {}", shape.name, stop, total));
      FakeDrives first = {.surface = shape.surface, .noise = 0.004, .seed = 7, .stop_after = stop};
      const TuneOutcome stopped = tune(options, first.meter());
      EXPECT_EQ(stopped.end, TuneEnd::kStopped);
      EXPECT_EQ(stopped.found, stop > 0);
      EXPECT_EQ(std::ssize(stopped.records), stop);
      FakeDrives second{.surface = shape.surface, .noise = 0.004, .seed = 7};
      TuneOptions again = options;
      again.known = first.measured;
      const TuneOutcome resumed = tune(again, second.meter());
      EXPECT_EQ(std::ssize(second.measured), total - stop);  // nothing lost, nothing twice
      EXPECT_EQ(resumed.taken_over, stop);
      EXPECT_EQ(chosen_of(resumed).point, chosen_of(expected).point);
      EXPECT_EQ(resumed.verdict, expected.verdict);
      EXPECT_EQ(resumed.rounds, expected.rounds);
    }
  }
}

TEST(IoTune, RoundsOfOtherCandidatesAreNotTakenOver) {
  TuneOptions options = options_for({Backend::kUring}, 1);
  options.space.block_sizes = {kMiB};
  options.space.depths = {8, 16};
  FakeDrives drives{.surface = [](const TunePoint& p) { return p.queue_depth == 16 ? 2e9 : 1e9; }};
  for (const int depth : {8, 64}) {
    const TunePoint other{Backend::kUring, kMiB, depth, 1};
    options.known.push_back({.point = other, .round = 0, .sample = drives.sample(other, 0)});
  }
  const TuneOutcome outcome = tune(options, drives.meter());
  EXPECT_EQ(outcome.taken_over, 0);
  EXPECT_EQ(drives.measured.at(2).round, 1);  // number 0 is taken
}

TEST(IoTune, KeepsToItsTimeHoweverSlowTheDrive) {
  const TuneOptions options = options_for({Backend::kUring, Backend::kLibaio, Backend::kThreads});
  for (const double cost : {0.1, 0.5, 5.0, 30.0, 130.0}) {
    FakeDrives drives{.surface = shapes()[0].surface, .noise = 0.02, .cost = cost};
    const TuneOutcome outcome = tune(options, drives.meter());
    EXPECT_LE(drives.now, options.seconds + cost) << cost;
    EXPECT_TRUE(outcome.found);
    EXPECT_EQ(outcome.rounds > 0, cost < 100) << cost;
    if (outcome.rounds == 0) {
      EXPECT_FALSE(outcome.sure);
      EXPECT_HAS(outcome.verdict, "no time to repeat");
    }
    EXPECT_EQ(outcome.verdict.find("cut short") != std::string::npos, cost >= 5) << outcome.verdict;
  }
}

TEST(IoTune, WhatTakesTooMuchIsSkippedAndSaid) {
  TuneOptions options = options_for({Backend::kUring, Backend::kThreads});
  options.space.memory_bytes = 256 * kMiB;
  options.space.paths = 2;
  FakeDrives drives{.surface = shapes()[0].surface};
  const TuneOutcome outcome = tune(options, drives.meter());
  for (const TuneRecord& r : drives.measured) {
    EXPECT_LE(2 * r.point.block_size * r.point.queue_depth, 256 * kMiB) << text_of(r.point);
    EXPECT_TRUE(r.point.backend != Backend::kThreads || r.point.queue_depth <= 64);
  }
  const auto why = [&](const TunePoint& point) {
    for (const auto& [skipped, reason] : outcome.skipped)
      if (skipped == point) return reason;
    return std::string();
  };
  EXPECT_HAS(why({Backend::kUring, 16 * kMiB, 16, 1}), "512.0 MiB of buffers");
  EXPECT_HAS(why({Backend::kThreads, 64 * kKiB, 128, 1}), "64 threads");
  EXPECT_EQ(why({Backend::kUring, kMiB, 4, 1}), "");

  // A slow drive is not asked for more than it moves in a second.
  FakeDrives slow{.surface = [](const TunePoint&) { return 50e6; }};
  options.space.memory_bytes = kGiB;
  EXPECT_NE(skip_reason(options.space, {Backend::kUring, 16 * kMiB, 16, 1}, 50e6), "");
  tune(options, slow.meter());
  for (std::size_t i = 1; i < slow.measured.size(); ++i)
    EXPECT_LE(mib(slow.measured[i].point) * slow.measured[i].point.queue_depth * 2, 48);
}

TEST(IoTune, OnePointThatFailsIsNotTheEndButThreeAre) {
  TuneOptions options = options_for({Backend::kUring});
  const TunePoint bad{Backend::kUring, kMiB, 64, 1};
  FakeDrives drives{.surface = shapes()[0].surface};
  TuneMeter meter = drives.meter();
  const auto measure = meter.measure;
  meter.measure = [&](const TunePoint& point, int round) {
    if (point == bad) throw Error(Errc::kIo, "drive", "no such queue");
    return measure(point, round);
  };
  const TuneOutcome outcome = tune(options, meter);
  EXPECT_TRUE(outcome.search_complete);
  const auto failed = std::count_if(outcome.records.begin(), outcome.records.end(),
                                    [](const TuneRecord& r) { return !r.error.empty(); });
  EXPECT_EQ(failed, 1);  // and not tried again

  meter.measure = [&](const TunePoint& point, int round) {
    if (drives.measured.size() > 30) throw Error(Errc::kIo, "drive", "is gone");
    return measure(point, round);
  };
  drives.measured.clear();
  drives.now = 0;
  EXPECT_THROW(tune(options, meter), Error);

  // A candidate that fails in the repeats is no longer one.
  FakeDrives late{.surface = shapes()[0].surface};
  meter = late.meter();
  std::optional<TunePoint> first;
  meter.measure = [&, plain = late.meter().measure](const TunePoint& point, int round) {
    if (round == 2 && !first) first = point;
    if (round >= 2 && point == *first) throw Error(Errc::kIo, "drive", "no such queue");
    return plain(point, round);
  };
  const TuneOutcome fewer = tune(options, meter);
  EXPECT_EQ(fewer.candidates.size(), 4u);
  for (const TuneCandidate& c : fewer.candidates) {
    EXPECT_NE(c.point, *first);
    EXPECT_EQ(std::ssize(c.samples), fewer.rounds);
  }
}

TEST(IoTune, TheGoalDecidesWhatIsFast) {
  TuneSample s;
  s.read.bytes_per_second = 3e9;
  s.write.bytes_per_second = 1e9;
  EXPECT_DOUBLE_EQ(score_of(TuneGoal::kBoth, s), 1.5e9);
  EXPECT_DOUBLE_EQ(score_of(TuneGoal::kRead, s), 3e9);
  EXPECT_DOUBLE_EQ(score_of(TuneGoal::kWrite, s), 1e9);
  EXPECT_EQ(score_of(TuneGoal::kBoth, {}), 0);
}

TEST(IoTune, SignTest) {
  EXPECT_DOUBLE_EQ(sign_test(0, 0), 1);
  EXPECT_NEAR(sign_test(9, 1), 2 * 11 / 1024.0, 1e-12);
  EXPECT_NEAR(sign_test(0, 6), 2 / 64.0, 1e-12);
  EXPECT_DOUBLE_EQ(sign_test(5, 5), 1);
  EXPECT_EQ(median_of({3, 1, 2, 10}), 2.5);
  EXPECT_EQ(mad_of({1, 2, 3, 4, 100}), 1);
}

}  // namespace
}  // namespace zg::io::test
