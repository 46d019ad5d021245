// A recorded sequence of programs, carried out on paper: what would move under other budgets and policies,
// and what no policy can avoid.
//
// Each call works on a state of its own: any thread.
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
  // Told the share that is done, now and then; false: Error(kInterrupted) is thrown.
  std::function<bool(double)> progress = {};
};

// What was asked for, and how much of it was there. Accesses that overwrite need no content and do not count.
struct ReplayCounts {
  std::int64_t accesses = 0;                              // that needed content
  std::int64_t hits = 0;                                  // found it at their tier
  std::int64_t host_hits = 0;                             // at the device, found it at the host
  std::int64_t device_evictions = 0, host_evictions = 0;  // copies that left to make room
  bool operator==(const ReplayCounts&) const = default;
};

struct ReplayResult {
  // Set when it does not fit: what was in the way, in which run of the sequence (from 0, over all rounds) and
  // in which operation of it. The rest says what happened before.
  std::optional<NoRoom> obstacle;
  std::int64_t obstacle_run = 0;
  std::int32_t obstacle_op = 0;

  std::vector<Traffic> runs;         // of each program that ran, over all rounds
  std::vector<Traffic> rounds;       // of each round of the sequence
  std::vector<ReplayCounts> counts;  // of each round
  // The last `cycle` rounds move the same bytes over and over again. 0: no repetition was found; then the
  // means below are those of the second half of all rounds.
  int cycle = 0;
  Traffic per_round;  // mean over the cycle, rounded to bytes
  ReplayCounts counts_per_round;
  Budgets peak;  // bytes used of each budget
};

// Carries the sequence out, round after round, until one ends with copies at the same places as an earlier
// one: from there on it repeats itself (a policy that uses the future is taken to use nothing else). With
// other policies all rounds are carried out, and the cycle is what the second half of them does at least
// twice. Content that is read before it was written is taken to lie as low as it may: before the first run,
// or, if it was said to be dead, before that operation.
ReplayResult replay(const AccessTrace& trace, const Budgets& budgets, const PolicyFactory& policy,
                    const ReplayOptions& options = {});

// The smallest budgets under which two rounds of the sequence fit, with the default policy (dry_run.hpp): some
// thirty replays a tier.
std::optional<Budgets> smallest_budgets(const AccessTrace& trace, std::int64_t device,
                                        const std::function<bool(double)>& progress = {},
                                        bool direct = false);

// Bytes of NVMe traffic in a round of the endlessly repeated sequence that no decisions can avoid; see
// replay_bound.cpp for what they rest on.
struct NvmeBound {
  std::int64_t read = 0, write = 0;
  // Of the first rounds alone, whatever lies where at their start, and if nothing is written for those after.
  std::vector<std::int64_t> round_reads, round_writes;
};
NvmeBound nvme_bound(const AccessTrace& trace, const Budgets& budgets, int rounds = 64);

// By position in the concatenated accesses of the sequence: bytes of other segments that were used since the
// last use of the same segment, in the endlessly repeated sequence. A cache of that much and the segment
// itself has it under LRU.
std::vector<std::int64_t> reuse_distances(const TensorTable& table, std::span<const Program* const> sequence);

}  // namespace zg
