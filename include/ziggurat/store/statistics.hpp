// What a store counts and tells of itself.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/store/table.hpp"

namespace zg {

// The last two: past the host.
enum Link : std::uint8_t { kToDevice, kToHost, kNvmeRead, kNvmeWrite, kDirectRead, kDirectWrite };
inline constexpr int kLinks = 6;
const char* name_of(Link link);  // "host->device", ...

struct LinkStatistics {
  std::int64_t bytes = 0;
  std::int64_t transfers = 0;  // segments
  double busy_seconds = 0;     // with at least one under way
  int moving = 0, waiting = 0;
};

struct TierStatistics {
  std::int64_t budget = 0, used = 0, peak = 0;  // bytes decided for it (device, host)
  std::int64_t segments = 0;                    // that have a copy there
  std::int64_t bytes = 0;                       // of those
  std::int64_t hits = 0, misses = 0;            // acquires at this tier that found it there, or did not
  std::int64_t evictions = 0;                   // copies that left to make room
};

// For what an acquire waits, as far as can be seen while it does.
enum class WaitCause : std::uint8_t {
  kReads,       // reads from the drives, under way or queued
  kWriteBacks,  // writes to the drives that must make room, or end before the segment may be used
  kMemory,      // its turn for memory, while nothing is written for it: leases or other moves hold that up
  kCopies,      // copies between host and device, under way or queued
  kLeases,      // an earlier use of the segment
  kOther,       // it is there: the waiting thread has not run yet
};
inline constexpr int kWaitCauses = 6;
const char* name_of(WaitCause cause);  // "reads", ...

struct StoreStatistics {
  std::array<TierStatistics, kTiers> tiers;  // by Tier
  std::array<LinkStatistics, kLinks> links;  // by Link
  std::int64_t waits = 0;                    // acquires that waited
  double waited_seconds = 0;                 // the sum of the next
  std::array<double, kWaitCauses> waited_for{};  // by WaitCause
  std::int64_t prefetches = 0;         // fetched ahead, without a program
  std::int64_t prefetched_in_vain = 0;  // of them, left again without having been used
  std::int64_t left_record = 0;        // acquires within a known step that its record does not have there
};

struct TensorStatistics {
  std::int64_t hits = 0, misses = 0;      // acquires
  std::int64_t waits = 0;
  double waited_seconds = 0;
  std::array<std::int64_t, kLinks> bytes{};  // by Link
  std::int64_t evictions = 0;
  std::int64_t prefetches = 0;
};

struct SegmentReport {
  std::string name;
  std::array<bool, kTiers> present{};  // a current copy is, or will be, at the tier
  std::array<int, 2> readers{}, writers{};  // leases at device, host
  std::array<bool, 2> pinned{};
  int passed = 0;                   // of the leases: a stream still has them
  std::int64_t next_use = -1;       // accesses from now; -1: none is known
  std::vector<std::string> moves;   // queued and running, in order
  std::string waits_for;            // who wants it waits for this; empty: nobody waits
};

}  // namespace zg
