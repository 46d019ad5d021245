// The speed of a simulated drive at any moment: a pure function of the steady clock. Time consists of pieces
// of constant speed; results are sums of whole nanoseconds of them, and so exact.
#pragma once
#include <cstdint>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

class RamSchedule {
 public:
  // Throws Error(kUsage) when the model's stalls or changes are invalid.
  explicit RamSchedule(const RamModel& model);

  bool is_constant() const { return stall_ns_ == 0 && (change_ns_ == 0 || change_factor_ == 1); }
  bool has_stalls() const { return stall_ns_ > 0; }
  // The seconds of full speed that the time from `from` to `to` is worth; 0 when `to` is not later.
  double offered(Clock::time_point from, Clock::time_point to) const;
  // When work that begins at `start` and takes `work` seconds at full speed is done, rounded down to
  // nanoseconds and capped at kLongest seconds. Even work of 0 seconds is not done before the end of a stall.
  Clock::time_point done(Clock::time_point start, double work) const;
  // The mean over unlimited time, as a share of full speed.
  double mean_speed() const;

  static constexpr double kLongest = 1e6;  // 11 days; so that an endless wait does not overflow the clock

 private:
  enum class Speed : std::uint8_t { kNone, kFull, kSlow };
  struct Piece {
    Speed speed;
    std::int64_t end;  // its first nanosecond that no longer belongs to it
  };
  Piece piece_at(std::int64_t t) const;
  double share_stalled_at_full_speed() const;

  std::int64_t stall_every_ns_ = 0, stall_ns_ = 0, change_ns_ = 0;  // 0: never
  double change_factor_ = 1;
};

}  // namespace zg::io
