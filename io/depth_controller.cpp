#include "io/depth_controller.hpp"

#include <algorithm>
#include <cmath>

#include "io/clock.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

using std::chrono::milliseconds;

// A window has at least kWindowBlocks, and either two generations and kWindowTime, or one generation and
// kOneGenerationTime. A very long generation (256 large blocks on a slow drive) is cut off after kLongBlocks
// and kLongTime; its blocks complete one by one, not in convoys, so that adds no error.
constexpr int kWindowBlocks = 12;
constexpr auto kWindowTime = milliseconds(12), kOneGenerationTime = milliseconds(50);
constexpr int kLongBlocks = 16;
constexpr auto kLongTime = milliseconds(100);

// Shares of the bandwidth.
constexpr double kWorth = 0.045;     // gain that a doubling of the depth needs to be accepted
constexpr double kWorthMost = 0.12;  // the largest gain that any step needs
constexpr double kKeep = 0.03;       // a halving that loses less than this is accepted
constexpr double kMostLost = 0.06;   // most that all steps down may lose together
constexpr int kPairs = 10;           // windows at each of the two depths, at most
// By how many standard errors the measured gain must differ from the needed one. In doubt the shallower depth
// wins: a step too far down shows soon, and costs less than staying deep for nothing.
constexpr double kSureToDeepen = 2, kSureNotToDeepen = 0.5, kSureToKeep = 1, kSureNotToKeep = 0.5;
constexpr double kAlmost = 0.93;  // depths above this share of the base are not worth a trial
constexpr double kMargin = 1.1;   // how far above the estimated knee a trial goes
constexpr int kLevels = 3;
constexpr double kUp[kLevels] = {1.25, 1.5, 2};
constexpr double kDown[kLevels] = {0.8, 0.5, 0.25};

// From this initial depth on the first trial goes down, which only lets the queue drain; a trial upwards
// would make a long queue longer.
constexpr int kDeep = 8;

constexpr auto kRest = milliseconds(300);
// Least length of a rest; it doubles, up to the second value, each time that no trial has changed the depth.
constexpr int kRestWindows = 12, kMostRestWindows = 48;
// The drive has changed when the bandwidth differs from the usual by this share, and by this many standard
// deviations, in this many windows in a row.
constexpr double kUnusual = 0.15;
constexpr double kUnusualDeviations = 4;
constexpr int kUnusualWindows = 2;

// When the bandwidth varies from window to window by more than kBusyDeviation, plus what the variation of
// single blocks (kOwnDeviation) explains, the host is busy and windows must be longer, until it varies by
// less than kCalmDeviation.
constexpr double kBusyDeviation = 0.06, kOwnDeviation = 0.3, kCalmDeviation = 0.015;
constexpr auto kBusyWindowTime = milliseconds(80);
// How long a busy host may be absent.
constexpr auto kFar = milliseconds(16);

constexpr auto kNever = Clock::time_point::min();

// Relative standard deviation of a window's rate: initial, least and greatest value.
constexpr double kFirstDeviation = 0.03, kLeastDeviation = 0.003, kMostDeviation = 0.2;

}  // namespace

DepthController::DepthController(int initial, int cap)
    : cap_(cap),
      depth_(initial),
      base_(initial),
      direction_(initial < kDeep ? Direction::kUp : Direction::kDown),
      variance_(kFirstDeviation * kFirstDeviation) {
  ZG_ASSERT(initial >= 1 && initial <= cap, "depth {} of at most {}", initial, cap);
}

void DepthController::done(Clock::time_point now, std::int64_t bytes, double latency_seconds, bool limited) {
  if (!limited) return starved(now, bytes);
  if (settling_) {
    if (from_ == kNever) from_ = now;  // the very first block, when the queue is not full yet
    if (now - duration_of(latency_seconds) < from_) return;
    settling_ = false;
    generation_begin_ = now;
    return;
  }
  generation_bytes_ += bytes;
  ++generation_blocks_;
  if (generation_blocks_ < depth_ &&
      (generation_blocks_ < kLongBlocks || now - generation_begin_ < kLongTime)) {
    return;
  }
  bytes_ += generation_bytes_;
  blocks_ += generation_blocks_;
  time_ += now - generation_begin_;
  generation_bytes_ = 0;
  generation_blocks_ = 0;
  generation_begin_ = now;
  slow_ = blocks_ < 2 * depth_;
  if (blocks_ < kWindowBlocks || time_ < window_time()) return;
  const double rate = static_cast<double>(bytes_) / seconds_of(time_);
  blocks_per_second_ = blocks_ / seconds_of(time_);
  reset_window();
  on_window(now, rate);
}

// A block completed while nothing waited. Its generation is dropped; those before it count.
void DepthController::starved(Clock::time_point now, std::int64_t bytes) {
  generation_bytes_ = 0;
  generation_blocks_ = 0;
  settling_ = true;
  from_ = now;
  if (!trying_) return;
  if (starved_blocks_++ == 0) {
    starved_begin_ = now;
    starved_bytes_ = 0;
    return;
  }
  starved_bytes_ += bytes;
  if (starved_blocks_ < 16 * (depth_ + 1) + 2 * blocks_ || now - starved_begin_ < kWindowTime) return;
  // The caller does not offer enough load to fill the depth on trial. That depth may still be worth it, since
  // the bandwidth reached now is a lower bound of what it gives.
  if (depth_ <= base_) return rest(now);
  const double rate = static_cast<double>(starved_bytes_) / seconds_between(starved_begin_, now);
  if (rate / at_base_.value() - 1 <= needed()) return try_other_direction(now);
  base_ = depth_;
  rest(now);
}

void DepthController::reset_window() {
  bytes_ = 0;
  blocks_ = 0;
  time_ = {};
  starved_blocks_ = 0;
}

// A queue that must shrink begins no block until it has, so every block begun from now on sees the new depth.
void DepthController::set_depth(Clock::time_point now, int depth) {
  if (depth == depth_) return;
  depth_ = depth;
  reset_window();
  generation_bytes_ = 0;
  generation_blocks_ = 0;
  settling_ = true;
  from_ = now;
}

void DepthController::on_window(Clock::time_point now, double rate) {
  if (!trying_) return watch(now, rate);
  if (depth_ == base_) {
    at_base_.add(rate);
    set_depth(now, other_);
  } else {
    at_other_.add(rate);
    judge(now);
  }
}

Clock::duration DepthController::window_time() const {
  if (busy_host_) return kBusyWindowTime;
  return slow_ ? kOneGenerationTime : kWindowTime;
}

double DepthController::deviation() const {
  return std::clamp(std::sqrt(variance_), kLeastDeviation, kMostDeviation);
}

// A window at rest: follows the usual bandwidth, and decides when to try another depth.
void DepthController::watch(Clock::time_point now, double rate) {
  if (last_rate_ > 0) {
    const double change = std::clamp(rate / last_rate_ - 1, -kMostDeviation, kMostDeviation);
    variance_ += (change * change / 2 - variance_) / 8;
    // Single blocks vary too, which the drive causes and not the host.
    const double own =
        kOwnDeviation / std::sqrt(std::max(1.0, blocks_per_second_ * seconds_of(window_time())));
    if (deviation() > kBusyDeviation + own) busy_host_ = true;
    if (deviation() < kCalmDeviation) busy_host_ = false;
  }
  const bool first = usual_rate_ == 0;
  if (first) usual_rate_ = rate;
  last_rate_ = rate;
  ++rest_windows_;
  const double off = rate / usual_rate_ - 1;
  if (std::abs(off) > std::max(kUnusual, kUnusualDeviations * deviation())) {
    if (++unusual_windows_ < kUnusualWindows) return;
    usual_rate_ = rate;
    first_level_ = 1;
    lost_ = 0;
    return try_step(now, off > 0 ? Direction::kUp : Direction::kDown, first_level_);
  }
  unusual_windows_ = 0;
  usual_rate_ += (rate - usual_rate_) / 4;
  if (!first && (rest_windows_ < rest_windows_needed_ || now < rest_until_)) return;
  if (!first && busy_host_ && try_far(now)) return;
  // A window this slow means that the latency comes from the queue: do not try to make it longer.
  try_step(now, slow_ ? Direction::kDown : direction_, first_level_);
}

// Tries a depth that lasts through the absence of a busy host (kFar). Smaller steps would find no gain, since
// the drive would still run dry. False: the base is about as deep already.
bool DepthController::try_far(Clock::time_point now) {
  const int depth = std::min(cap_, static_cast<int>(blocks_per_second_ * seconds_of(kFar)));
  if (depth < 2 * base_) return false;
  trying_ = true;
  direction_ = Direction::kUp;
  level_ = first_level_ = kLevels - 1;
  try_depth(now, depth);
  return true;
}

void DepthController::rest(Clock::time_point now) {
  trying_ = false;
  first_level_ = 0;
  refused_ = 0;
  unusual_windows_ = 0;
  rest_windows_ = 0;
  rest_windows_needed_ =
      base_ == rested_at_ ? std::min(2 * rest_windows_needed_, kMostRestWindows) : kRestWindows;
  rested_at_ = base_;
  rest_until_ = now + kRest;
  below_ = {};
  reset_window();
  set_depth(now, base_);
}

int DepthController::step_from(int level) const {
  if (direction_ == Direction::kUp)
    return std::min(cap_, std::max(base_ + 1, static_cast<int>(base_ * kUp[level])));
  return std::max(1, std::min(base_ - 1, static_cast<int>(base_ * kDown[level])));
}

// The depth at which the line from the origin through below_ reaches the bandwidth of the base.
int DepthController::knee() const {
  return static_cast<int>(std::ceil(kMargin * usual_rate_ * below_.depth / below_.rate));
}

void DepthController::try_step(Clock::time_point now, Direction direction, int level) {
  direction_ = direction;
  level_ = level;
  trying_ = true;
  if (base_ == (direction == Direction::kUp ? cap_ : 1)) return try_other_direction(now);
  int depth = step_from(level);
  if (direction == Direction::kDown && below_.depth > 0) {
    // The knee is known: go there directly, if that is far enough to be worth a trial.
    depth = knee();
    if (depth > kAlmost * base_) return try_other_direction(now);
  }
  try_depth(now, depth);
}

void DepthController::try_depth(Clock::time_point now, int depth) {
  other_ = depth;
  at_base_ = {};
  at_base_.add(last_rate_);
  at_other_ = {};
  set_depth(now, depth);
}

void DepthController::try_other_direction(Clock::time_point now) {
  if (++refused_ >= 2) return rest(now);
  try_step(now, direction_ == Direction::kUp ? Direction::kDown : Direction::kUp, first_level_);
}

// The share of bandwidth that the other depth must gain over the base; negative: it may lose that much.
double DepthController::needed() const {
  const double doublings = std::log2(static_cast<double>(other_) / base_);
  if (doublings > 0) return std::min(kWorth * doublings, kWorthMost);
  return std::max(kKeep * doublings, lost_ - kMostLost);
}

void DepthController::judge(Clock::time_point now) {
  const double gain = at_other_.value() / at_base_.value() - 1;
  const double error = deviation() * std::sqrt(1.0 / at_base_.n + 1.0 / at_other_.n);
  const bool up = direction_ == Direction::kUp;
  if (gain > needed() + error * (up ? kSureToDeepen : kSureNotToKeep)) return accept(now);
  if (gain < needed() - error * (up ? kSureNotToDeepen : kSureToKeep)) return refuse(now);
  if (at_other_.n >= kPairs) return !up && gain > needed() ? accept(now) : refuse(now);
  set_depth(now, base_);
}

void DepthController::accept(Clock::time_point now) {
  lost_ = std::clamp(lost_ + 1 - at_other_.value() / at_base_.value(), 0.0, kMostLost);
  if (direction_ == Direction::kUp) below_ = {base_, at_base_.value()};
  base_ = other_;
  last_rate_ = usual_rate_ = at_other_.value();
  refused_ = 0;
  try_step(now, direction_, std::min(level_ + 1, kLevels - 1));
}

void DepthController::refuse(Clock::time_point now) {
  if (at_base_.n > 0) last_rate_ = usual_rate_ = at_base_.value();
  if (direction_ == Direction::kDown && at_other_.n > 0) below_ = {other_, at_other_.value()};
  // A large step up may have passed over a gain that a small one finds. (Steps down become shorter each time,
  // since below_ is now known.)
  const bool past = direction_ == Direction::kUp ? level_ > 0 : at_other_.n > 0;
  if (past) return try_step(now, direction_, 0);
  try_other_direction(now);
}

}  // namespace zg::io
