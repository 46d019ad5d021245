// The counters of a store's parts, which StoreReport adds up. The store's mutex guards all but the atomics.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

#include "store/segment_state.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

// The part of a wait that is not in the statistics yet, and its cause.
struct Uncounted {
  WaitCause cause = WaitCause::kOther;
  Clock::time_point since{};
};

struct Counters {
  std::array<TierStatistics, 2> tiers;  // device, host: misses and evictions
  std::int64_t waits = 0;
  std::array<double, kWaitCauses> waited_for{};  // by WaitCause
  std::int64_t prefetches = 0, prefetched_in_vain = 0, left_record = 0;
  std::atomic<std::uint64_t> progress{0};  // moves, and uses of a program, that have ended
  std::atomic<int> waiting{0};             // threads that wait inside an acquire

  void missed(SegmentState& segment, Tier tier) {
    ++segment.counts.misses;
    ++tiers[index_of(tier)].misses;
  }
  void waited(SegmentState& segment, double seconds) {
    ++waits;
    ++segment.counts.waits;
    segment.counts.waited_seconds += seconds;
  }
  // Counts the wait so far for its cause; from now on it is for `next`.
  void count(Uncounted& wait, WaitCause next) {
    const auto now = Clock::now();
    waited_for[static_cast<std::size_t>(wait.cause)] += seconds_between(wait.since, now);
    wait = {next, now};
  }
};

}  // namespace zg
