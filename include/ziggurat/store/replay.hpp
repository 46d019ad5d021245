// Replays a recorded sequence of programs without moving bytes: what would move under other budgets and
// policies, and a lower bound of what must move under any policy.
//
// Any thread may call these functions; each call has a state of its own.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/store/policy.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg {

struct ReplayOptions {
  int rounds = 32;                   // of the sequence, at most
  std::vector<SegmentId> keep = {};  // pinned to the host from their first use on (placement.hpp)
  // Called from time to time with the share that is done; if it returns false, Error(kInterrupted) is thrown.
  std::function<bool(double)> progress = {};
};

// Hits and misses of the accesses that need content; those that overwrite do not count.
struct ReplayCounts {
  std::int64_t accesses = 0;
  std::int64_t hits = 0;                                  // found the segment at their tier
  std::int64_t host_hits = 0;                             // of accesses at the device: found it at the host
  std::int64_t device_evictions = 0, host_evictions = 0;  // to make room
  bool operator==(const ReplayCounts&) const = default;
};

struct ReplayResult {
  // Set when the budgets are too small: what found no room, in which run of a program (counted from 0, over
  // all rounds), and in which operation of it. The other members then describe what happened before.
  std::optional<NoRoom> obstacle;
  std::int64_t obstacle_run = 0;
  std::int32_t obstacle_op = 0;

  std::vector<LinkBytes> runs;       // of each program that ran, over all rounds
  std::vector<LinkBytes> rounds;     // of each round of the sequence
  std::vector<ReplayCounts> counts;  // of each round
  // The last `cycle` rounds move the same bytes over and over again. 0: no repetition was found, and the
  // means below are over the second half of all rounds.
  int cycle = 0;
  LinkBytes per_round;  // mean over the cycle, rounded to bytes
  ReplayCounts counts_per_round;
  Budgets peak;  // bytes used of each budget
};

// Replays the sequence, round after round, until a round ends with copies at the same places as an earlier
// one: from there on everything repeats. That conclusion assumes that a policy that uses the future decides
// by nothing else. With other policies all rounds are replayed, and the cycle is what their second half does
// at least twice. Content that is read before it was written is assumed to be at the lowest tier that its
// tensor may be demoted to: before the first run or, if a program declared it dead, before the operation that
// reads it.
ReplayResult replay(const AccessTrace& trace, const Budgets& budgets, const PolicyFactory& policy,
                    const ReplayOptions& options = {});

// The smallest budgets under which two rounds of the sequence fit, with the default policy (see dry_run.hpp).
// Takes some thirty replays for each tier.
std::optional<Budgets> smallest_budgets(const AccessTrace& trace, std::int64_t device,
                                        const std::function<bool(double)>& progress = {},
                                        bool direct = false);

// A lower bound of the NVMe traffic of one round, in bytes, when the sequence repeats for ever;
// replay_bound.cpp has the proof.
struct NvmeBound {
  std::int64_t read = 0, write = 0;
  // Bounds for the first rounds, one by one: for any placement of copies at their start, and not counting
  // write-backs that only later rounds need.
  std::vector<std::int64_t> round_reads, round_writes;
};
NvmeBound nvme_bound(const AccessTrace& trace, const Budgets& budgets, int rounds = 64);

// LRU stack distances in bytes, by position in the concatenated accesses of the sequence, when it repeats for
// ever: the bytes of all other segments used since the last use of the same segment. An LRU cache that holds
// these bytes and the segment itself has a hit.
std::vector<std::int64_t> reuse_distances(const TensorTable& table, std::span<const Program* const> sequence);

}  // namespace zg
