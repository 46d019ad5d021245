// Times are nanoseconds since the clock's epoch. A stall is the first part of its period; a change's period
// begins with the half that has full speed.
#include "io/ram_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "io/clock.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

// The shortest period, in seconds. Shorter ones would be latency, and would cut a long time into too many
// pieces.
constexpr double kShortest = 0.01;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

[[noreturn]] void refuse(const char* what, double value, const char* hint) {
  throw Error(Errc::kUsage, "ram drive", fmt::format("{} of {}", what, value), hint);
}

std::int64_t period_of(const char* what, double seconds) {
  const bool ok = seconds == 0 || (seconds >= kShortest && seconds <= RamSchedule::kLongest);
  if (!ok) refuse(what, seconds, "0.01 to 1000000 seconds, or 0: never");
  return std::llround(seconds * 1e9);
}

Clock::time_point time_of(std::int64_t ns) {
  return Clock::time_point(std::chrono::nanoseconds(ns));
}

// The time since the last multiple of `period`; also for times before the epoch.
std::int64_t phase_of(std::int64_t t, std::int64_t period) {
  const std::int64_t rest = t % period;
  return rest < 0 ? rest + period : rest;
}

}  // namespace

RamSchedule::RamSchedule(const RamModel& m)
    : stall_every_ns_(period_of("a time between stalls", m.stall_every_seconds)),
      change_ns_(period_of("a time between changes", m.change_every_seconds)),
      change_factor_(m.change_factor) {
  const bool stall_ok =
      m.stall_seconds == 0 || (m.stall_seconds > 0 && m.stall_seconds <= 0.99 * m.stall_every_seconds);
  if (!stall_ok)
    refuse("a stall", m.stall_seconds, "at most 0.99 of stall_every_seconds, which it comes with");
  stall_ns_ = std::llround(m.stall_seconds * 1e9);
  if (!(change_factor_ >= 1 && std::isfinite(change_factor_)))
    refuse("a change factor", change_factor_, "1 or more: full speed, divided by it");
}

RamSchedule::Piece RamSchedule::piece_at(std::int64_t t) const {
  Piece piece{Speed::kFull, kNever};
  if (change_ns_ > 0) {
    const std::int64_t phase = phase_of(t, 2 * change_ns_);
    piece.speed = phase < change_ns_ ? Speed::kFull : Speed::kSlow;
    piece.end = t - phase + (phase < change_ns_ ? change_ns_ : 2 * change_ns_);
  }
  if (stall_ns_ > 0) {
    const std::int64_t phase = phase_of(t, stall_every_ns_);
    if (phase < stall_ns_) return {Speed::kNone, t - phase + stall_ns_};
    piece.end = std::min(piece.end, t - phase + stall_every_ns_);
  }
  return piece;
}

double RamSchedule::offered(Clock::time_point from, Clock::time_point to) const {
  std::int64_t full = 0, slow = 0;
  const std::int64_t end = ns_of(to);
  for (std::int64_t t = ns_of(from); t < end;) {
    const Piece piece = piece_at(t);
    const std::int64_t until = std::min(piece.end, end);
    if (piece.speed == Speed::kFull) full += until - t;
    if (piece.speed == Speed::kSlow) slow += until - t;
    t = until;
  }
  return (static_cast<double>(full) + static_cast<double>(slow) / change_factor_) * 1e-9;
}

Clock::time_point RamSchedule::done(Clock::time_point start, double work) const {
  const std::int64_t begin = ns_of(start), last = begin + static_cast<std::int64_t>(kLongest * 1e9);
  double left = std::min(work, kLongest) * 1e9;
  for (std::int64_t t = begin; t < last;) {
    const Piece piece = piece_at(t);
    if (piece.speed != Speed::kNone) {
      const double factor = piece.speed == Speed::kSlow ? change_factor_ : 1;
      const auto room = static_cast<double>(std::min(piece.end, last) - t);
      if (left * factor <= room) return time_of(t + static_cast<std::int64_t>(left * factor));
      left -= room / factor;
    }
    t = piece.end;
  }
  return time_of(last);
}

// The share of time that is in a stall while the speed would otherwise be full. A phase is the time since the
// beginning of a period. Two phases, one of each period, can meet if they are equal modulo g, the greatest
// common divisor of the periods; over a long time all such pairs meet equally often. So for every x in [0, g)
// this multiplies the number of phases congruent to x in a stall (m, or m + 1 below r) by the number of those
// in the half of full speed (n, or n + 1 below q), and sums the products over x.
double RamSchedule::share_stalled_at_full_speed() const {
  const std::int64_t period = 2 * change_ns_, g = std::gcd(stall_every_ns_, period);
  const auto m = static_cast<double>(stall_ns_ / g), r = static_cast<double>(stall_ns_ % g);
  const auto n = static_cast<double>(change_ns_ / g), q = static_cast<double>(change_ns_ % g);
  const auto width = static_cast<double>(g);
  const double pairs = m * n * width + m * q + n * r + std::min(r, q);
  return pairs / static_cast<double>(stall_every_ns_) * width / static_cast<double>(period);
}

double RamSchedule::mean_speed() const {
  const double stalled =
      stall_ns_ > 0 ? static_cast<double>(stall_ns_) / static_cast<double>(stall_every_ns_) : 0;
  if (change_ns_ == 0) return 1 - stalled;
  const double full = 0.5 - (stall_ns_ > 0 ? share_stalled_at_full_speed() : 0);
  return full + (1 - stalled - full) / change_factor_;
}

double full_speed_seconds(const RamModel& model, Clock::time_point from, Clock::time_point to) {
  return RamSchedule(model).offered(from, to);
}

double mean_bytes_per_second(const RamModel& model) {
  return model.bytes_per_second * RamSchedule(model).mean_speed();
}

}  // namespace zg::io
