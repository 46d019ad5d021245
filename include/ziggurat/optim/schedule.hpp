// Learning-rate schedules with DeepSpeed's names, keys and values: WarmupLR, WarmupDecayLR, WarmupCosineLR,
// OneCycle; and "Constant". Pure functions of the step, so a resumed run needs no state.
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
  // WarmupCosineLR: ratios of the optimizer's lr
  double warmup_min_ratio = 0, cos_min_ratio = 0.0001;
  // OneCycle
  double cycle_min_lr = 0, cycle_max_lr = 0, decay_lr_rate = 0;
  std::int64_t cycle_first_step_size = 2000, cycle_second_step_size = -1, decay_step_size = 0;
  std::int64_t cycle_first_stair_count = 0, cycle_second_stair_count = -1;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9, decay_mom_rate = 0;
};

struct ScheduleValue {
  double lr;
  double beta1;  // OneCycle moves it, the others leave it
};

// For step 0, 1, ...: what DeepSpeed's scheduler has set when that optimizer step runs. `base_lr`, `beta1`:
// the optimizer's. The header's .cpp states the formula of each and where it differs from other trainers.
ScheduleValue schedule_at(const ScheduleConfig& config, std::int64_t step, double base_lr, double beta1);

}  // namespace zg
