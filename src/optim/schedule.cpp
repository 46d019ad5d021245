// The schedules of DeepSpeed's runtime/lr_schedules.py, as functions of the step.
//
// Which value a step uses. DeepSpeed's engine calls scheduler.step() after each optimizer step that was not
// skipped for overflow, and the scheduler counts from last_batch_iteration = -1. So optimizer step k (k = 0,
// 1, ...; skipped steps not counted) uses the value for i = k - 1, and step 0 uses the values that the
// scheduler's constructor set:
//
//   WarmupLR        k = 0  min_lr;  else min_lr + (max_lr - min_lr) * gamma(i), W = max(2, warmup_num_steps):
//                   i < W  gamma = log(i + 1) / log(W), or i / W when linear;  i >= W  1
//                   The warm-up thus starts with two steps at min_lr, and max_lr is reached at step W ("log")
//                   or W + 1 ("linear").
//   WarmupDecayLR   as WarmupLR for i < W, then gamma = max(0, (T - i) / max(1, T - W)), T = total_num_steps;
//                   it ends at min_lr and not at 0. In a run of T steps the last one has i = T - 2.
//   WarmupCosineLR  base_lr * ratio: k = 0  ratio 0 (not warmup_min_ratio: DeepSpeed's source says "before it
//                   has started");  i < W  warmup_min + (1 - warmup_min) * gamma(i);  i >= W  with
//                   p = min(1, (i - W + 1) / max(1, T - W)):  cos_min + (1 - cos_min) * (1 + cos(pi p)) / 2
//   OneCycle        the cycle of S = first + second steps counts k itself (DeepSpeed adds the 1 back):
//                   scale = k / first up to k = first, (S - k) / second after it, 0 at k = S; a stair count n
//                   > 0 makes it floor(scale * n) / n. lr = min + (max - min) * scale, beta1 = max_mom -
//                   (max_mom - min_mom) * scale. After the cycle, with d = k - S and decay_step_size > 0: lr
//                   = min / (1 + rate * d / size), beta1 = max_mom * (1 + mom_rate * d / size). Only step 0
//                   has beta1 = min_mom: the constructor sets that value, although the formula gives max_mom.
//
// Differences from DeepSpeed: its OneCycle also forces beta2 to 0.99 when it cycles the momentum; here beta2
// keeps the optimizer's value. A beta1 that the momentum decay has raised to 1 or beyond, which would break
// Adam, is an error here. Counts below zero mean "not given" (second = first).
//
// How DeepSpeed differs from others: in step k, nanoGPT and torch.optim.lr_scheduler use the value for k, not
// for k - 1, and nanoGPT's linear warm-up never has a step of zero learning rate.
#include "ziggurat/optim/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

[[noreturn]] void refuse(const char* key, const std::string& found, const char* expected) {
  throw Error(Errc::kUsage, std::string("scheduler.params.") + key,
              found + " found, " + expected + " expected");
}

void require_positive(std::int64_t value, const char* key) {
  if (value <= 0) refuse(key, std::to_string(value), "a number of steps above 0");
}

// The rising factor gamma(i) of a warm-up, for i < W.
double warmup_gamma(const ScheduleConfig& config, std::int64_t i, std::int64_t warmup) {
  if (config.warmup_linear) return static_cast<double>(i) / static_cast<double>(warmup);
  return std::log(static_cast<double>(i + 1)) / std::log(static_cast<double>(warmup));
}

std::int64_t warmup_steps(const ScheduleConfig& config) {
  require_positive(config.warmup_num_steps, "warmup_num_steps");
  return std::max<std::int64_t>(2, config.warmup_num_steps);
}

double warmup_lr(const ScheduleConfig& config, std::int64_t step) {
  const std::int64_t warmup = warmup_steps(config), i = step - 1, total = config.total_num_steps;
  const bool decays = config.kind == ScheduleConfig::Kind::kWarmupDecay;
  if (decays) require_positive(total, "total_num_steps");
  if (step == 0) return config.warmup_min_lr;
  double gamma = 1;
  if (i < warmup) {
    gamma = warmup_gamma(config, i, warmup);
  } else if (decays) {
    const double left = static_cast<double>(total - i);
    gamma = std::max(0.0, left / static_cast<double>(std::max<std::int64_t>(1, total - warmup)));
  }
  return config.warmup_min_lr + (config.warmup_max_lr - config.warmup_min_lr) * gamma;
}

double cosine_ratio(const ScheduleConfig& config, std::int64_t step) {
  const std::int64_t warmup = warmup_steps(config), i = step - 1;
  require_positive(config.total_num_steps, "total_num_steps");
  if (step == 0) return 0;
  if (i < warmup) {
    return config.warmup_min_ratio + (1 - config.warmup_min_ratio) * warmup_gamma(config, i, warmup);
  }
  const double done = static_cast<double>(i - warmup + 1);
  const double all = static_cast<double>(std::max<std::int64_t>(1, config.total_num_steps - warmup));
  const double share = (1 + std::cos(std::numbers::pi * std::min(1.0, done / all))) / 2;
  return std::max(0.0, config.cos_min_ratio + (1 - config.cos_min_ratio) * share);
}

// Height in the cycle: 0 at its ends, 1 at its peak. step <= first + second. Multiplies before it divides, so
// that rounding never misses a whole stair.
double cycle_scale(const ScheduleConfig& config, std::int64_t step, std::int64_t second) {
  const std::int64_t first = config.cycle_first_step_size;
  const bool rising = step <= first;
  const std::int64_t second_stairs =
      config.cycle_second_stair_count < 0 ? config.cycle_first_stair_count : config.cycle_second_stair_count;
  const double part = static_cast<double>(rising ? step : first + second - step);
  const double whole = static_cast<double>(rising ? first : second);
  const double stairs = static_cast<double>(rising ? config.cycle_first_stair_count : second_stairs);
  return stairs > 0 ? std::floor(part * stairs / whole) / stairs : part / whole;
}

ScheduleValue one_cycle(const ScheduleConfig& config, std::int64_t step, double beta1) {
  require_positive(config.cycle_first_step_size, "cycle_first_step_size");
  if (config.cycle_second_step_size == 0) refuse("cycle_second_step_size", "0", "a number of steps above 0");
  const std::int64_t second =
      config.cycle_second_step_size < 0 ? config.cycle_first_step_size : config.cycle_second_step_size;
  const std::int64_t total = config.cycle_first_step_size + second;
  double lr = config.cycle_min_lr, momentum = config.cycle_max_mom;
  if (step <= total) {
    const double scale = cycle_scale(config, step, second);
    lr += (config.cycle_max_lr - config.cycle_min_lr) * scale;
    momentum -= (config.cycle_max_mom - config.cycle_min_mom) * scale;
    if (step == 0) momentum = config.cycle_min_mom;
  } else if (config.decay_step_size > 0) {
    const double intervals = static_cast<double>(step - total) / static_cast<double>(config.decay_step_size);
    lr /= 1 + config.decay_lr_rate * intervals;
    momentum *= 1 + config.decay_mom_rate * intervals;
  }
  if (!config.cycle_momentum) return {lr, beta1};
  if (!(momentum >= 0 && momentum < 1)) {
    refuse("decay_mom_rate",
           fmt::format("{} (a momentum of {} at step {})", config.decay_mom_rate, momentum, step),
           "a momentum in [0, 1) throughout the run");
  }
  return {lr, momentum};
}

}  // namespace

ScheduleValue schedule_at(const ScheduleConfig& config, std::int64_t step, double base_lr, double beta1) {
  ZG_ASSERT_GE(step, 0);
  switch (config.kind) {
    case ScheduleConfig::Kind::kConstant:
      return {base_lr, beta1};
    case ScheduleConfig::Kind::kWarmup:
    case ScheduleConfig::Kind::kWarmupDecay:
      return {warmup_lr(config, step), beta1};
    case ScheduleConfig::Kind::kWarmupCosine:
      return {base_lr * cosine_ratio(config, step), beta1};
    case ScheduleConfig::Kind::kOneCycle:
      return one_cycle(config, step, beta1);
  }
  ZG_ASSERT(false, "schedule kind {}", static_cast<int>(config.kind));
}

}  // namespace zg
