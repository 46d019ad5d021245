// Finds the settings at which drives give most: the search behind `ziggurat io-tune`, over a function that
// measures one point. Knows no files and no clock, so that it can be tried on surfaces whose best is known.
//
//   back ends  each at a few points that tell them apart
//   grid       block size x depth in steps of four, on the best back end and on another that is near it
//   refine     steps of two uphill from the best, then down to smaller depths while nothing is lost
//   queues     two, four, .. at the best
//   repeat     the best few again and again, each round in an order of its own, until it is clear which is
//              ahead, or time is up
//
// Threads: one; the meter is called from the thread that called tune().
// Invariant: outside the repeats no point is measured twice, those of TuneOptions::known included. Given the
// same samples, a search that was cut off and goes on takes the same way as one that was not.
#pragma once
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

struct TunePoint {
  Backend backend = Backend::kUring;
  std::int64_t block_size = 1 << 20;
  int queue_depth = 32;
  int queues = 1;
  auto operator<=>(const TunePoint&) const = default;
};
// "io_uring 1 MiB x 32", with ", 2 queues" where there are several.
std::string text_of(const TunePoint& point);
// "64 KiB"
std::string block_text(std::int64_t block_size);

struct TuneSide {  // one direction
  double bytes_per_second = 0, cpu_seconds_per_gb = 0;
  double p50 = 0, p99 = 0;  // seconds
};
struct TuneSample {
  TuneSide read, write;
};

// What is to be fast. Both: the harmonic mean, since state is read and written equally.
enum class TuneGoal : std::uint8_t { kBoth, kRead, kWrite };
const char* name_of(TuneGoal goal);  // "both", "read", "write"
double score_of(TuneGoal goal, const TuneSample& sample);
double cpu_of(TuneGoal goal, const TuneSample& sample);  // seconds per GB

// Where to search. Lists ascend; the first of each is the cheapest.
struct TuneSpace {
  std::vector<Backend> backends;
  std::vector<std::int64_t> block_sizes;
  std::vector<int> depths;
  std::vector<int> queues = {1};
  int paths = 1;
  std::int64_t memory_bytes = 1 << 30;  // buffers of all paths together
  std::int64_t file_bytes = 0;          // of each path; 0: no matter
  int max_threads = 64;                 // a thread pool has one thread per request in flight
  double max_drain_seconds = 1;         // what is in flight must be done in so long, at the best rate seen
  // Powers of two: 64 KiB to 16 MiB, depth 1 to 256, queues up to `cores`.
  static TuneSpace usual(std::vector<Backend> backends, int cores);
};
// Why a point is not measured; empty if it is. `best_rate`: bytes per second, 0 while nothing is known.
std::string skip_reason(const TuneSpace& space, const TunePoint& point, double best_rate);

struct TuneRecord {
  TunePoint point;
  int round = -1;  // of the repeats; -1: of the search
  TuneSample sample = {};
  std::string error = {};  // why there is no sample
};

struct TuneProgress {
  const char* phase = "";
  TunePoint point;
  int measured = 0, round = -1;
  double best_score = 0;
};

struct TuneMeter {
  // Nothing: the search shall stop. Throws Error where the point cannot be measured.
  std::function<std::optional<TuneSample>(const TunePoint& point, int round)> measure;
  std::function<double()> seconds;                         // since the start
  std::function<void(const TuneProgress&)> progress = {};  // before each measurement; may be null
};

struct TuneOptions {
  TuneSpace space;
  TuneGoal goal = TuneGoal::kBoth;
  double seconds = 120;                // when to end, by the meter's clock
  double expected_seconds = 0.7;       // of one measurement, until some have been made
  std::uint64_t seed = 1;              // of the order within a round
  std::vector<TuneRecord> known = {};  // measured by an earlier run
};

struct TuneCandidate {
  TunePoint point;
  std::vector<TuneSample> samples;  // one a round; the search's if there was no round
  TuneSample typical;               // medians
  double median = 0, mad = 0;       // of the score
};
enum class TuneOrder : std::uint8_t { kAhead, kEqual, kUnclear };
// The candidate with the best median against another, by rounds.
struct TuneDuel {
  int wins = 0, losses = 0, rounds = 0;
  double p = 1;  // two-sided sign test
  double ratio = 1, low = 0,
         high = 0;  // median of the rounds' ratios, its 95% interval (0, 0: too few rounds)
  TuneOrder order = TuneOrder::kUnclear;
};

enum class TuneEnd : std::uint8_t { kStable, kTime, kStopped };

struct TuneOutcome {
  bool found = false;                     // false: nothing could be measured
  int chosen = 0;                         // index of the candidate: the cheapest within 1% of the fastest
  std::vector<TuneCandidate> candidates;  // best median first
  std::vector<TuneDuel> duels;            // of the first against candidates[i + 1]
  int rounds = 0;
  bool sure = false;    // every duel is decided
  std::string verdict;  // says so, in a sentence or two
  TuneEnd end = TuneEnd::kTime;
  bool search_complete = false;     // false: time ran out, or it was stopped, before the repeats
  std::vector<TuneRecord> records;  // all, in order
  std::vector<std::pair<TunePoint, std::string>> skipped;  // with one queue, and why
  int taken_over = 0;                                      // of the records, from `known`
};

// Throws what the meter throws when nothing can be measured, or three points in a row cannot.
TuneOutcome tune(const TuneOptions& options, const TuneMeter& meter);

// Probability that fair coins fall at least as unevenly as wins : losses.
double sign_test(int wins, int losses);

}  // namespace zg::io
