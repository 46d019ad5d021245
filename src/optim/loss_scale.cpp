// The rules of DeepSpeed's two scalers (deepspeed/runtime/fp16/loss_scaler.py):
//
//   overflow      Overflows are counted. The overflow of number `hysteresis`, and each after it, halves the
//                 scale, but not below the minimum; at the minimum it is an error. The step of the overflow
//                 is remembered.
//   no overflow   When the number of steps since the last overflow (at first: since step -1) is a multiple of
//                 the window, the scale doubles, and the count of overflows is reset. With
//                 consecutive_hysteresis every step without overflow resets the count.
#include "ziggurat/optim/loss_scale.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

void check(bool good, const char* key, double value, const std::string& expected) {
  if (good) return;
  throw Error(Errc::kUsage, std::string("fp16.") + key, fmt::format("{} is not {}", value, expected));
}

bool is_positive(double x) {
  return std::isfinite(x) && x > 0;
}

double first_scale(const LossScaleConfig& c) {
  return c.loss_scale != 0 ? c.loss_scale : std::ldexp(1.0, c.initial_scale_power);
}

}  // namespace

LossScaler::LossScaler(const LossScaleConfig& config) : config_(config) {
  const LossScaleConfig& c = config;
  check(c.loss_scale == 0 || is_positive(c.loss_scale), "loss_scale", c.loss_scale,
        "0 (dynamic) or a positive number");
  check(is_positive(c.min_loss_scale), "min_loss_scale", c.min_loss_scale, "a positive number");
  check(c.loss_scale_window >= 1, "loss_scale_window", static_cast<double>(c.loss_scale_window), "1 or more");
  check(c.hysteresis >= 1, "hysteresis", c.hysteresis, "1 or more");
  if (dynamic()) {
    // With a larger scale the fp32 gradient itself would overflow.
    constexpr int kMostPower = 127;
    check(c.initial_scale_power <= kMostPower && first_scale(c) >= c.min_loss_scale, "initial_scale_power",
          c.initial_scale_power,
          fmt::format("at most {}, with 2 to its power at least min_loss_scale ({})", kMostPower,
                      c.min_loss_scale));
  }
  state_ = {.scale = first_scale(c), .steps = 0, .last_overflow = -1, .hysteresis = c.hysteresis};
}

bool LossScaler::worth_a_warning() const {
  std::int64_t next = 10;
  while (next < in_a_row_ && next < std::numeric_limits<std::int64_t>::max() / 10) next *= 10;
  return in_a_row_ == next;
}

void LossScaler::update(bool overflow) {
  State& s = state_;
  in_a_row_ = overflow ? in_a_row_ + 1 : 0;
  in_vain_ = in_vain_ && overflow;
  if (!dynamic() && in_vain_ && in_a_row_ >= kMostInVain) {
    throw Error(
        Errc::kNumeric, "fp16.loss_scale",
        fmt::format("gradients overflow in fp16 with the constant loss scale {} in each of the first {} "
                    "steps, so nothing was learned",
                    s.scale, in_a_row_),
        "make it smaller, or 0, for one that follows the overflows; bf16 needs none");
  }
  if (dynamic() && overflow) {
    if (s.hysteresis > 1) {
      --s.hysteresis;
    } else if (s.scale == config_.min_loss_scale) {
      throw Error(Errc::kNumeric, "loss scale",
                  fmt::format("gradients overflow in fp16 with the smallest loss scale, {}", s.scale),
                  "the training diverges (a lower learning rate, a longer warm-up or clipping may help), or "
                  "needs a smaller fp16.min_loss_scale, or bf16");
    } else {
      s.scale = std::max(s.scale / 2, config_.min_loss_scale);
    }
    s.last_overflow = s.steps;
  } else if (dynamic()) {
    const bool window_ends = (s.steps - s.last_overflow) % config_.loss_scale_window == 0;
    if (window_ends) s.scale *= 2;
    if (window_ends || config_.consecutive_hysteresis) s.hysteresis = config_.hysteresis;
  }
  ++s.steps;
}

void LossScaler::restore(const State& state) {
  if (!is_positive(state.scale) || state.steps < 0 || state.last_overflow < -1 ||
      state.last_overflow >= state.steps || state.hysteresis < 1) {
    throw Error(
        Errc::kUsage, "loss scale",
        fmt::format("no run has a scale of {} after {} steps, with the last overflow in step {} and {} "
                    "until the next that halves it",
                    state.scale, state.steps, state.last_overflow, state.hysteresis));
  }
  in_a_row_ = 0;
  in_vain_ = state.steps == 0;  // after any step the state does not tell, so assume no
  state_ = state;
  state_.scale = dynamic() ? std::max(state.scale, config_.min_loss_scale) : config_.loss_scale;
  state_.hysteresis = std::min(state.hysteresis, config_.hysteresis);
}

}  // namespace zg
