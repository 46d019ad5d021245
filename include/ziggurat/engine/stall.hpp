// For what the compute stream stood still.
#pragma once
#include <array>
#include <cstdint>
#include <numeric>

namespace zg {

enum class StallCause : std::uint8_t {
  kReads,       // data is on its way from the drives, or queued for it
  kWriteBacks,  // memory that is needed next is being written to the drives, or waits to be
  kMemory,      // memory that is needed next, whose turn has not come, with nothing being written for it
  kCopies,      // between host and device
  kOptimizer,   // an update that the next operation needs, or whose room it needs
  kOther,       // threads that hand over to each other, work of the host between operations
};
inline constexpr int kStallCauses = 6;
const char* name_of(StallCause cause);  // "reads", "write-backs", ...

struct StallTimes {
  std::array<double, kStallCauses> seconds{};  // by StallCause

  double operator[](StallCause cause) const { return seconds[static_cast<std::size_t>(cause)]; }
  double total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
  StallTimes& operator+=(const StallTimes& other) {
    for (std::size_t i = 0; i < seconds.size(); ++i) seconds[i] += other.seconds[i];
    return *this;
  }
};

}  // namespace zg
