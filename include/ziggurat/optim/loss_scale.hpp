// The loss scale of training in fp16, with DeepSpeed's keys ("fp16": {...}) and the values that it gives.
//
// Gradients are computed times scale(), so that small ones do not vanish in fp16. Where they overflow, the
// step is left out and update(true) lowers the scale for the next one; after many without, update(false)
// raises it. One call per step, of one thread at a time; owns nothing.
#pragma once
#include <cstdint>

namespace zg {

struct LossScaleConfig {
  double loss_scale = 0;                  // 0: dynamic; else this one, for ever
  int initial_scale_power = 16;           // dynamic: the first scale is 2 to this
  std::int64_t loss_scale_window = 1000;  // steps without overflow after which the scale doubles
  int hysteresis = 2;                     // the scale halves at this overflow, not at those before
  bool consecutive_hysteresis = false;    // a step without overflow lets the count of them begin anew
  double min_loss_scale = 1;
};

class LossScaler {
 public:
  // What a resumed run needs to go on as if it had not stopped.
  struct State {
    double scale = 1;
    std::int64_t steps = 0;           // update() was called so often
    std::int64_t last_overflow = -1;  // the step, from 0, of the last one
    int hysteresis = 1;               // the scale halves at this overflow from now
    bool operator==(const State&) const = default;
  };

  // Throws Error(kUsage), whose place is the key, for what makes no sense.
  explicit LossScaler(const LossScaleConfig& config);

  bool dynamic() const { return config_.loss_scale == 0; }
  double scale() const { return state_.scale; }
  // After each step: whether a gradient overflowed. Throws Error(kNumeric) when it did and the scale should
  // halve, but is at its minimum; nothing has changed then. A static scale stays, whatever happens.
  void update(bool overflow);

  const State& state() const { return state_; }
  // Goes on from there. Should the configuration have changed since, it holds: a static scale is the one it
  // names, a dynamic one is at least its minimum, and its count of overflows at most its hysteresis. Throws
  // Error(kUsage) for what no run can have left behind.
  void restore(const State& state);

 private:
  LossScaleConfig config_;
  State state_;
};

}  // namespace zg
