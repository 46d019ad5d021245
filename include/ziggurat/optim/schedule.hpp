// Learning-rate schedules with DeepSpeed's names, keys and values (WarmupLR, WarmupDecayLR, WarmupCosineLR,
// OneCycle), and "Constant". They are pure functions of the step, so a resumed run needs no saved state.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

struct ScheduleConfig {
  enum class Kind { kConstant, kWarmup, kWarmupDecay, kWarmupCosine, kOneCycle };
  Kind kind = Kind::kConstant;
  // WarmupLR, WarmupDecayLR
  double warmup_min_lr = 0, warmup_max_lr = 0.001;
  std::int64_t warmup_num_steps = 1000;
  bool warmup_linear = false;  // warmup_type: "log" (DeepSpeed's default) or "linear"
  std::int64_t total_num_steps = 0;
  // WarmupCosineLR: shares of the optimizer's lr
  double warmup_min_ratio = 0, cos_min_ratio = 0.0001;
  // OneCycle. Size and stair count of the second half: -1 means the same as the first half.
  double cycle_min_lr = 0, cycle_max_lr = 0, decay_lr_rate = 0;
  std::int64_t cycle_first_step_size = 2000, cycle_second_step_size = -1, decay_step_size = 0;
  std::int64_t cycle_first_stair_count = 0, cycle_second_stair_count = -1;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9, decay_mom_rate = 0;
};

struct ScheduleValue {
  double lr;
  double beta1;  // only OneCycle changes it
};

// The values that DeepSpeed's scheduler has set when optimizer step `step` (0, 1, ...) runs. `base_lr` and
// `beta1` are the optimizer's. schedule.cpp states the formula of each schedule and where it differs from
// other trainers. Throws Error(kUsage), which names the key, for values that make no sense.
ScheduleValue schedule_at(const ScheduleConfig& config, std::int64_t step, double base_lr, double beta1);

}  // namespace zg
