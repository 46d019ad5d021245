// Statistics and reports of a store.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/store/table.hpp"

namespace zg {

class Stream;

// The ways that bytes move. The last two do not pass the host.
enum Link : std::uint8_t { kToDevice, kToHost, kNvmeRead, kNvmeWrite, kDirectRead, kDirectWrite };
inline constexpr int kLinks = 6;
const char* name_of(Link link);  // "host->device", ...
constexpr Link link_between(Tier from, Tier to) {
  if (from == Tier::kNvme) return to == Tier::kDevice ? kDirectRead : kNvmeRead;
  if (to == Tier::kNvme) return from == Tier::kDevice ? kDirectWrite : kNvmeWrite;
  return to == Tier::kDevice ? kToDevice : kToHost;
}

// Bytes over each link.
struct LinkBytes {
  std::array<std::int64_t, kLinks> of{};  // by Link

  std::int64_t& operator[](Link link) { return of[link]; }
  std::int64_t operator[](Link link) const { return of[link]; }
  // Bytes that the drives read or write, on both of their links (to the host and to the device).
  std::int64_t nvme_read() const { return of[kNvmeRead] + of[kDirectRead]; }
  std::int64_t nvme_write() const { return of[kNvmeWrite] + of[kDirectWrite]; }
  LinkBytes& operator+=(const LinkBytes& o) {
    for (std::size_t i = 0; i < of.size(); ++i) of[i] += o.of[i];
    return *this;
  }
  LinkBytes operator-(LinkBytes o) const {
    for (std::size_t i = 0; i < of.size(); ++i) o.of[i] = of[i] - o.of[i];
    return o;
  }
  bool operator==(const LinkBytes&) const = default;
};

struct LinkStatistics {
  std::int64_t bytes = 0;
  std::int64_t transfers = 0;  // segments
  double busy_seconds = 0;     // with at least one transfer under way
  int moving = 0, waiting = 0;
};

struct TierStatistics {
  std::int64_t budget = 0, used = 0, peak = 0;  // bytes that decisions have charged to it (device, host)
  std::int64_t segments = 0;                    // with a copy at the tier
  std::int64_t bytes = 0;                       // of these segments
  std::int64_t hits = 0, misses = 0;            // acquires that found the segment at the tier, or not
  std::int64_t evictions = 0;                   // to make room
};

// Why an acquire waits, as far as the store can tell during the wait.
enum class WaitCause : std::uint8_t {
  kReads,       // reads from the drives, under way or queued
  kWriteBacks,  // writes to the drives that make room for the segment, or that must end before it may be used
  kMemory,      // room in memory that leases or moves other than writes to the drives still take
  kCopies,      // copies between host and device, under way or queued
  kLeases,      // leases of the segment itself
  kOther,       // nothing any more: the waiting thread has not run yet
};
inline constexpr int kWaitCauses = 6;
const char* name_of(WaitCause cause);  // "reads", ...

// Is notified of the waits of the thread that runs a program, while they last. Called under the store's
// mutex, also by threads that move data: its functions must be short, and must not call the store.
class WaitObserver {
 public:
  // From now on the thread waits because of `cause`. `user`: the stream whose lease is in the way; null: no
  // lease is.
  virtual void awaits(WaitCause cause, const Stream* user) = 0;
  virtual void awaits_nothing() = 0;  // the wait is over

 protected:
  ~WaitObserver() = default;
};

struct StoreStatistics {
  std::array<TierStatistics, kTiers> tiers;      // by Tier
  std::array<LinkStatistics, kLinks> links;      // by Link
  std::int64_t waits = 0;                        // acquires that waited
  double waited_seconds = 0;                     // the sum of waited_for
  std::array<double, kWaitCauses> waited_for{};  // by WaitCause
  std::int64_t prefetches = 0;                   // segments fetched ahead, without a program
  std::int64_t prefetched_in_vain = 0;           // of them, evicted without having been used
  std::int64_t left_record = 0;                  // acquires in a recorded step that deviated from the record
};

struct TensorStatistics {
  std::int64_t hits = 0, misses = 0;  // acquires
  std::int64_t waits = 0;
  double waited_seconds = 0;
  LinkBytes bytes;
  std::int64_t evictions = 0;
  std::int64_t prefetches = 0;
};

struct SegmentReport {
  std::string name;
  std::array<bool, kTiers> present{};       // a current copy is, or will be, at the tier
  std::array<int, 2> readers{}, writers{};  // leases at device, host
  std::array<bool, 2> pinned{};
  int passed = 0;                  // of these leases, those that were passed to a stream and have not ended
  std::int64_t next_use = -1;      // accesses from now; -1: none is known
  std::vector<std::string> moves;  // queued and running, in order
  std::string waits_for;           // what an acquire of it waits for; empty: none waits
};

}  // namespace zg
