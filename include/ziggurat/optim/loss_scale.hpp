// The loss scale of training in fp16, with the names of DeepSpeed's keys ("fp16": {...}) and with its values.
//
// Gradients are computed for the loss times scale(), so that small ones do not vanish in fp16. When they
// overflow, the step is skipped, and update(true) may lower the scale for the next; after many steps without
// overflow, update(false) raises it. One call per step, from one thread at a time.
#pragma once
#include <cstdint>

namespace zg {

struct LossScaleConfig {
  double loss_scale = 0;                  // 0: dynamic, by the following; else this scale throughout
  int initial_scale_power = 16;           // the first scale is 2 to the power of this
  std::int64_t loss_scale_window = 1000;  // steps without overflow after which the scale doubles
  int hysteresis = 2;                   // the scale halves at the overflow of this number, and at later ones
  bool consecutive_hysteresis = false;  // whether a step without overflow resets the count of overflows
  double min_loss_scale = 1;
};

class LossScaler {
 public:
  // What a resumed run needs to continue as if it had not stopped.
  struct State {
    double scale = 1;
    std::int64_t steps = 0;           // number of calls of update()
    std::int64_t last_overflow = -1;  // the step of the last overflow, counted from 0; -1: none
    int hysteresis = 1;               // overflows from now until the scale halves, that one included
    bool operator==(const State&) const = default;
  };

  // Throws Error(kUsage), whose place is the key, for values that make no sense.
  explicit LossScaler(const LossScaleConfig& config);

  bool dynamic() const { return config_.loss_scale == 0; }
  double scale() const { return state_.scale; }
  // Call after each step, with whether a gradient overflowed. Throws Error(kNumeric), and changes nothing,
  // when the scale should halve but is at its minimum. A static scale never changes.
  // A static scale that overflows in every step, from the first on, would change nothing for ever: after
  // kMostInVain steps that is an Error(kNumeric), too.
  void update(bool overflow);
  static constexpr std::int64_t kMostInVain = 100;
  // The steps up to now, one behind the other, that overflowed since this scaler was made or restored.
  std::int64_t overflows_in_a_row() const { return in_a_row_; }
  // Whether to tell the user of them now: after 10, 100, 1000, ...
  bool worth_a_warning() const;

  const State& state() const { return state_; }
  // Continues from `state`. Where the configuration has changed since, the configuration wins: a static scale
  // is the one that it names, a dynamic scale is raised to its minimum, and the count of overflows is limited
  // to its hysteresis. Throws Error(kUsage) for a state that no run can have left behind.
  void restore(const State& state);

 private:
  LossScaleConfig config_;
  State state_;
  std::int64_t in_a_row_ = 0;
  bool in_vain_ = true;  // no step yet, of the runs before either, was without overflow
};

}  // namespace zg
