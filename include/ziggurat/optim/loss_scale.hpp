// The loss scale of training in fp16. Keys ("fp16": {...}) and resulting scales are the same as DeepSpeed's.
//
// Gradients are computed for the loss times scale(), so that small ones do not vanish in fp16. When they
// overflow, the step is skipped, and update(true) may lower the scale for the next; after many steps without
// overflow, update(false) raises it. One call per step, from one thread at a time.
#pragma once
#include <cstdint>

namespace zg {

struct LossScaleConfig {
  double loss_scale = 0;                  // 0: dynamic, by the keys below; else a fixed scale
  int initial_scale_power = 16;           // the first scale is 2 to the power of this
  std::int64_t loss_scale_window = 1000;  // steps without overflow after which the scale doubles
  int hysteresis = 2;                     // the scale halves at this many overflows, and at each later one
  bool consecutive_hysteresis = false;    // whether a step without overflow resets the count of overflows
  double min_loss_scale = 1;
};

class LossScaler {
 public:
  // The state that a resumed run needs to continue as if it had not stopped.
  struct State {
    double scale = 1;
    std::int64_t steps = 0;           // number of calls of update()
    std::int64_t last_overflow = -1;  // the step of the last overflow, counted from 0; -1: none
    int hysteresis = 1;               // overflows until the scale halves, including the one that halves it
    bool operator==(const State&) const = default;
  };

  // Throws Error(kUsage), which names the key, for values that make no sense.
  explicit LossScaler(const LossScaleConfig& config);

  bool dynamic() const { return config_.loss_scale == 0; }
  double scale() const { return state_.scale; }
  // Call after each step; `overflow`: whether a gradient overflowed. Throws Error(kNumeric), and changes
  // nothing, when the scale should halve but is at its minimum. A static scale never changes. If every step
  // from the first on overflows, a static scale would skip all steps for ever, so it also throws
  // Error(kNumeric) after kMostInVain steps.
  void update(bool overflow);
  static constexpr std::int64_t kMostInVain = 100;
  // The number of latest consecutive steps that overflowed, counted since this scaler was made or restored.
  std::int64_t overflows_in_a_row() const { return in_a_row_; }
  // Whether to warn the user of them now: after 10, 100, 1000, ... such steps.
  bool worth_a_warning() const;

  const State& state() const { return state_; }
  // Continues from `state`. If the configuration has changed since, the configuration wins: its static scale
  // applies, a dynamic scale is raised to its minimum, and the count of overflows is limited to its
  // hysteresis. Throws Error(kUsage) for a state that no run can have saved.
  void restore(const State& state);

 private:
  LossScaleConfig config_;
  State state_;
  std::int64_t in_a_row_ = 0;
  bool in_vain_ = true;  // every step so far overflowed, steps of earlier runs included
};

}  // namespace zg
