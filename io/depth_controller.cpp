#include "io/depth_controller.hpp"

#include <algorithm>
#include <cmath>

#include "ziggurat/base/error.hpp"

namespace zg::io {
namespace {

using std::chrono::milliseconds;

// A window has at least so many blocks, so much time and two generations, of which one will do that takes
// long ...
constexpr int kWindowBlocks = 12;
constexpr auto kWindowTime = milliseconds(12), kOneGenerationTime = milliseconds(50);
// ... except that one that takes very long (256 large blocks on a slow drive) is cut off here. Its blocks
// then come one after another, not in convoys, so nothing is lost.
constexpr int kLongBlocks = 16;
constexpr auto kLongTime = milliseconds(100);

constexpr double kWorth = 0.045;     // what a doubling must bring
constexpr double kWorthMost = 0.12;  // and any step
constexpr double kKeep = 0.03;       // what it must bring to be kept
constexpr double kMostLost = 0.06;   // by all steps down together
constexpr int kPairs = 10;           // windows at each of two depths, at most
// Standard errors between a difference and what is asked of it. In doubt the shallower one wins: to have gone
// too far down shows soon, and costs less than to stay deep for nothing.
constexpr double kSureToDeepen = 2, kSureNotToDeepen = 0.5, kSureToKeep = 1, kSureNotToKeep = 0.5;
constexpr double kAlmost = 0.93;  // of the base, and more: not worth asking about
constexpr double kMargin = 1.1;   // above where the knee is thought to be
constexpr int kLevels = 3;
constexpr double kUp[kLevels] = {1.25, 1.5, 2};
constexpr double kDown[kLevels] = {0.8, 0.5, 0.25};

// From here on it begins with a question downwards: that takes a drained queue, the other a longer one.
constexpr int kDeep = 8;

constexpr auto kRest = milliseconds(300);
constexpr int kRestWindows = 12, kMostRestWindows = 48;  // twice as many whenever nothing has changed
// So far from the usual bandwidth, and so many deviations, for so many windows: the drive has changed.
constexpr double kStrange = 0.15;
constexpr double kStrangeDeviations = 4;
constexpr int kStrangeWindows = 2;

// Bandwidth that varies by so much from window to window, and more than blocks that vary by themselves
// explain: the host is busy, and windows have to be longer; until it varies less.
constexpr double kBusyDeviation = 0.06, kOwnDeviation = 0.3, kCalmDeviation = 0.015;
constexpr auto kBusyWindowTime = milliseconds(80);
// What a busy host may be away for.
constexpr auto kFar = milliseconds(16);

constexpr auto kNever = Clock::time_point::min();

// Of the rate of a window: at first, least and most.
constexpr double kFirstDeviation = 0.03, kLeastDeviation = 0.003, kMostDeviation = 0.2;

double seconds_of(Clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

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
    const auto latency =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(latency_seconds));
    if (from_ == kNever) from_ = now;  // the first ever; the queue has only begun to fill
    if (now - latency < from_) return;
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

// Whole generations before it count; the one it was part of does not.
void DepthController::starved(Clock::time_point now, std::int64_t bytes) {
  generation_bytes_ = 0;
  generation_blocks_ = 0;
  settling_ = true;
  from_ = now;
  if (!asking_) return;
  if (starved_blocks_++ == 0) {
    starved_begin_ = now;
    starved_bytes_ = 0;
    return;
  }
  starved_bytes_ += bytes;
  if (starved_blocks_ < 16 * (depth_ + 1) + 2 * blocks_ || now - starved_begin_ < kWindowTime) return;
  // The caller does not offer what is asked about. All that it offers may still be worth having: what was
  // reached then is the least that this depth gives.
  if (depth_ <= base_) return rest(now);
  const double rate = static_cast<double>(starved_bytes_) / seconds_between(starved_begin_, now);
  if (rate / at_base_.value() - 1 <= needed()) return next_direction(now);
  base_ = depth_;
  rest(now);
}

void DepthController::reset_window() {
  bytes_ = 0;
  blocks_ = 0;
  time_ = {};
  starved_blocks_ = 0;
}

// A queue that is to shrink begins no block before it has, so the first one begun from now on sees it shrunk.
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
  if (!asking_) return watch(now, rate);
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

// At rest.
void DepthController::watch(Clock::time_point now, double rate) {
  if (last_rate_ > 0) {
    const double change = std::clamp(rate / last_rate_ - 1, -kMostDeviation, kMostDeviation);
    variance_ += (change * change / 2 - variance_) / 8;
    // Its own blocks vary as well, in a drive that is no host's fault.
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
  if (std::abs(off) > std::max(kStrange, kStrangeDeviations * deviation())) {
    if (++strange_windows_ < kStrangeWindows) return;
    usual_rate_ = rate;
    first_level_ = 1;
    lost_ = 0;
    return ask(now, off > 0 ? Direction::kUp : Direction::kDown, first_level_);
  }
  strange_windows_ = 0;
  usual_rate_ += (rate - usual_rate_) / 4;
  if (!first && (rest_windows_ < rest_windows_needed_ || now < rest_until_)) return;
  if (!first && busy_host_ && look_far(now)) return;
  // Latency that long is a queue, not a drive: do not make it longer to see whether that helps.
  ask(now, slow_ ? Direction::kDown : direction_, first_level_);
}

// A busy host looks late, and the drive runs dry in the meantime. Depth helps against that only once it lasts
// as long, so that steps from a small one find nothing. False: it is as deep already.
bool DepthController::look_far(Clock::time_point now) {
  const int depth = std::min(cap_, static_cast<int>(blocks_per_second_ * seconds_of(kFar)));
  if (depth < 2 * base_) return false;
  asking_ = true;
  direction_ = Direction::kUp;
  level_ = first_level_ = kLevels - 1;
  ask_at(now, depth);
  return true;
}

void DepthController::rest(Clock::time_point now) {
  asking_ = false;
  first_level_ = 0;
  refused_ = 0;
  strange_windows_ = 0;
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

// Where the line from the origin through the point below reaches the bandwidth of the base.
int DepthController::knee() const {
  return static_cast<int>(std::ceil(kMargin * usual_rate_ * below_.depth / below_.rate));
}

void DepthController::ask(Clock::time_point now, Direction direction, int level) {
  direction_ = direction;
  level_ = level;
  asking_ = true;
  if (base_ == (direction == Direction::kUp ? cap_ : 1)) return next_direction(now);
  int depth = step_from(level);
  if (direction == Direction::kDown && below_.depth > 0) {
    // Straight to the knee, if that is a step worth asking about.
    depth = knee();
    if (depth > kAlmost * base_) return next_direction(now);
  }
  ask_at(now, depth);
}

void DepthController::ask_at(Clock::time_point now, int depth) {
  other_ = depth;
  at_base_ = {};
  at_base_.add(last_rate_);
  at_other_ = {};
  set_depth(now, depth);
}

void DepthController::next_direction(Clock::time_point now) {
  if (++refused_ >= 2) return rest(now);
  ask(now, direction_ == Direction::kUp ? Direction::kDown : Direction::kUp, first_level_);
}

// What the other depth must give more than the base, as a share; negative where it may give less.
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
  ask(now, direction_, std::min(level_ + 1, kLevels - 1));
}

void DepthController::refuse(Clock::time_point now) {
  if (at_base_.n > 0) last_rate_ = usual_rate_ = at_base_.value();
  if (direction_ == Direction::kDown && at_other_.n > 0) below_ = {other_, at_other_.value()};
  // A large step may have gone past what a small one reaches. (Downwards each one is shorter than the last.)
  const bool past = direction_ == Direction::kUp ? level_ > 0 : at_other_.n > 0;
  if (past) return ask(now, direction_, 0);
  next_direction(now);
}

}  // namespace zg::io
