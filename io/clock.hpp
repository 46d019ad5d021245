// Conversions between the steady clock, seconds, and the times that system calls take.
#pragma once
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "ziggurat/base/trace.hpp"

namespace zg::io {

inline Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
inline double seconds_of(Clock::duration d) {
  return std::chrono::duration<double>(d).count();
}
inline std::int64_t ns_of(Clock::duration d) {
  return std::chrono::nanoseconds(d).count();
}
inline std::int64_t ns_of(Clock::time_point t) {  // since the clock's epoch
  return ns_of(t.time_since_epoch());
}

// Zero for a negative duration.
template <class Timespec = timespec>
Timespec timespec_of(Clock::duration d) {
  const std::int64_t ns = std::max<std::int64_t>(ns_of(d), 0);
  return {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
}

}  // namespace zg::io
