// Searches for the settings at which drives are fastest: the core of `ziggurat io-tune`. It calls a function
// that measures one point, and knows neither files nor the clock; so tests can run it on surfaces of known
// optimum.
//
//   back ends  each is measured at a few points that tell them apart
//   grid       block size x depth in steps of four, on the best back end and on a second one if it is close
//   refine     climbs from the best point in steps of two, then lowers the depth while nothing is lost
//   queues     two, four, .. queues at the best point
//   repeat     measures the best few candidates in rounds, each in random order, until it is clear which is
//              ahead, or the time is up
//
// Threads: one; the meter is called on the thread that called tune().
// Invariant: outside the repeats no point is measured twice, not even one of TuneOptions::known. With the
// same samples, a search that was interrupted and continues takes the same steps as one that was not.
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

struct TuneSide {  // of one point, in one direction: reads or writes
  double bytes_per_second = 0, cpu_seconds_per_gb = 0;
  double p50 = 0, p99 = 0;  // seconds
};
struct TuneSample {
  TuneSide read, write;
};

// What to maximise. kBoth: the harmonic mean of the read and write bandwidth, since training reads as much
// state as it writes.
enum class TuneGoal : std::uint8_t { kBoth, kRead, kWrite };
const char* name_of(TuneGoal goal);                        // "both", "read", "write"
double score_of(TuneGoal goal, const TuneSample& sample);  // bytes per second
double cpu_of(TuneGoal goal, const TuneSample& sample);    // seconds per GB; kBoth: the mean

// The points to search. Lists ascend; the first entry of each is the cheapest.
struct TuneSpace {
  std::vector<Backend> backends;
  std::vector<std::int64_t> block_sizes;
  std::vector<int> depths;
  std::vector<int> queues = {1};
  int paths = 1;
  std::int64_t memory_bytes = 1 << 30;  // limit of the buffers of all paths together
  std::int64_t file_bytes = 0;          // size of each path's file; 0: no limit follows from it
  int max_threads = 64;                 // a thread pool has one thread per request in flight
  double max_drain_seconds = 1;         // at the best rate seen, what is in flight must complete within this
  // Powers of two: 64 KiB to 16 MiB, depth 1 to 256, queues up to `cores`.
  static TuneSpace usual(std::vector<Backend> backends, int cores);
};
// Why a point is not measured; empty if it is. `best_rate`: the best bytes per second so far; 0: none yet.
std::string skip_reason(const TuneSpace& space, const TunePoint& point, double best_rate);

struct TuneRecord {
  TunePoint point;
  int round = -1;  // of the repeats; -1: before them
  TuneSample sample = {};
  std::string error = {};  // why there is no sample; empty: there is one
};

struct TuneProgress {
  const char* phase = "";
  TunePoint point;
  int measured = 0, round = -1;
  double best_score = 0;
};

struct TuneMeter {
  // Measures a point; none stops the search. Throws Error when the point cannot be measured.
  std::function<std::optional<TuneSample>(const TunePoint& point, int round)> measure;
  std::function<double()> seconds;                         // since the start of the run
  std::function<void(const TuneProgress&)> progress = {};  // before each measurement; may be null
};

struct TuneOptions {
  TuneSpace space;
  TuneGoal goal = TuneGoal::kBoth;
  double seconds = 120;                // when to end, by TuneMeter::seconds
  double expected_seconds = 0.7;       // length of one measurement; a guess until some have been made
  std::uint64_t seed = 1;              // of the order within each round
  std::vector<TuneRecord> known = {};  // samples of an earlier run, taken instead of new ones
};

struct TuneCandidate {
  TunePoint point;
  std::vector<TuneSample> samples;  // one per round; without rounds, the one of the search
  TuneSample typical;               // the median of each value
  double median = 0, mad = 0;       // of the score; mad: median absolute deviation
};
// How the candidate with the best median compares with another, round by round.
enum class TuneOrder : std::uint8_t { kAhead, kEqual, kUnclear };
struct TuneComparison {
  int wins = 0, losses = 0, rounds = 0;
  double p = 1;              // two-sided sign test
  double ratio = 1;          // best over other: the median of the rounds' ratios
  double low = 0, high = 0;  // its 95% interval; 0, 0: too few rounds
  TuneOrder order = TuneOrder::kUnclear;
};

enum class TuneEnd : std::uint8_t { kStable, kTime, kStopped };

struct TuneOutcome {
  bool found = false;                       // false: nothing could be measured
  int chosen = 0;                           // index of the candidate: the cheapest within 1% of the fastest
  std::vector<TuneCandidate> candidates;    // best median first
  std::vector<TuneComparison> comparisons;  // of candidates[0] with candidates[i + 1]
  int rounds = 0;
  bool sure = false;    // no comparison is kUnclear
  std::string verdict;  // says so, in a sentence or two
  TuneEnd end = TuneEnd::kTime;
  bool search_complete = false;     // false: time ran out, or the user stopped it, before the repeats
  std::vector<TuneRecord> records;  // all samples and failures, in order
  std::vector<std::pair<TunePoint, std::string>> skipped;  // points with one queue that were skipped, and why
  int taken_over = 0;                                      // how many of the records come from `known`
};

// Throws what the meter threw when no point, or none of three in a row, could be measured.
TuneOutcome tune(const TuneOptions& options, const TuneMeter& meter);

// The probability that wins + losses tosses of a fair coin fall at least as unevenly as wins : losses.
double sign_test(int wins, int losses);

}  // namespace zg::io
