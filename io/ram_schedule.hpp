// How fast a drive made of memory is at any moment: a pure function of the steady clock. It is made of pieces
// in which the speed stays the same, and sums whole nanoseconds of them, so that what it says is exact.
#pragma once
#include <cstdint>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

class RamSchedule {
 public:
  // Throws Error(kUsage) when the model's stalls or changes have no meaning.
  explicit RamSchedule(const RamModel& model);

  bool is_constant() const { return stall_ns_ == 0 && (change_ns_ == 0 || change_factor_ == 1); }
  bool has_stalls() const { return stall_ns_ > 0; }
  // Seconds at full speed that are offered from `from` to `to`; 0 when `to` is not later.
  double offered(Clock::time_point from, Clock::time_point to) const;
  // When `work` seconds at full speed are done that are begun at `start`, in whole nanoseconds, rounded down.
  // No work at all is done at once, but not in a stall. At most kLongest seconds later.
  Clock::time_point done(Clock::time_point start, double work) const;
  // Of full speed, over a time without end.
  double mean_speed() const;

  static constexpr double kLongest = 1e6;  // 11 days: keeps what takes forever from overflowing the clock

 private:
  enum class Speed : std::uint8_t { kNone, kFull, kSlow };
  struct Piece {
    Speed speed;
    std::int64_t end;  // in nanoseconds of the clock, not of it
  };
  Piece piece_at(std::int64_t t) const;
  double share_stalled_at_full_speed() const;

  std::int64_t stall_every_ns_ = 0, stall_ns_ = 0, change_ns_ = 0;  // 0: never
  double change_factor_ = 1;
};

}  // namespace zg::io
