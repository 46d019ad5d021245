// The counters of a store's parts, which StoreReport adds up. The store's mutex guards all but the atomics.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>

#include "store/copy_word.hpp"
#include "store/stable_array.hpp"
#include "ziggurat/store/statistics.hpp"

namespace zg {

struct Counters {
  StableArray<TensorStatistics> segments;  // the hits are in CopyWord
  std::array<TierStatistics, 2> tiers;     // device, host: misses and evictions
  std::int64_t waits = 0;
  std::array<double, kWaitCauses> waited_for{};  // by WaitCause
  std::int64_t prefetches = 0, prefetched_in_vain = 0, left_record = 0;
  std::atomic<std::uint64_t> progress{0};  // moves, and uses of a program, that have ended
  std::atomic<int> waiting{0};             // threads that wait inside an acquire

  void missed(SegmentId segment, Tier tier) {
    ++segments[segment].misses;
    ++tiers[index_of(tier)].misses;
  }
  void waited(SegmentId segment, double seconds) {
    ++waits;
    ++segments[segment].waits;
    segments[segment].waited_seconds += seconds;
  }
};

}  // namespace zg
