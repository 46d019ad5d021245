// The causes of stalls: why the compute stream had no work.
#pragma once
#include <array>
#include <cstdint>
#include <numeric>

namespace zg {

enum class StallCause : std::uint8_t {
  kReads,       // reads from the drives, under way or queued
  kWriteBacks,  // writes to the drives, under way or queued, that free the memory needed next
  kMemory,      // memory needed next that leases, or moves other than writes to the drives, still occupy
  kCopies,      // copies between host and device, under way or queued
  kOptimizer,   // an update whose result, or whose memory, the next operation needs
  kGathers,     // gathers of weights from the ranks' shards
  kRanks,       // sums of gradients over the ranks, and exchanges of scalars
  kStages,      // tensors that another stage of the pipeline passes on
  kParts,       // exchanges of tensor-parallel or context-parallel ranks that no work overlaps
  kOther,       // handover between threads; work of the host between operations
};
inline constexpr int kStallCauses = 10;
const char* name_of(StallCause cause);  // "reads", "write-backs", ...

struct StallTimes {
  std::array<double, kStallCauses> seconds{};  // indexed by StallCause

  double operator[](StallCause cause) const { return seconds[static_cast<std::size_t>(cause)]; }
  double total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
  StallTimes& operator+=(const StallTimes& other) {
    for (std::size_t i = 0; i < seconds.size(); ++i) seconds[i] += other.seconds[i];
    return *this;
  }
};

}  // namespace zg
