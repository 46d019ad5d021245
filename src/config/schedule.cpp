// "scheduler".
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::config {
namespace {

using Kind = ScheduleConfig::Kind;
enum class WarmupType { kLog, kLinear };

const Keys& params_keys() {
  using Range = NumberSpec::Range;
  constexpr Auto kAuto = Auto::kTakesFallback;
  constexpr const char* kAsTheFirst = "as the first";
  static const ScheduleConfig d;
  static const Keys keys({
      {"warmup_num_steps",
       IntSpec{.fallback = d.warmup_num_steps,
               .min = 1,
               .autos = kAuto,
               .note = "a tenth of the steps, at most 1000"},
       "Warmup*: steps of the warm-up. `\"auto\"` is a tenth of `steps`, at most 1000."},
      {"warmup_type",
       ChoiceSpec(d.warmup_linear ? WarmupType::kLinear : WarmupType::kLog,
                  {{"log", WarmupType::kLog}, {"linear", WarmupType::kLinear}}),
       "Warmup*: how the learning rate rises."},
      {"warmup_min_lr", NumberSpec{.fallback = d.warmup_min_lr, .autos = kAuto},
       "WarmupLR, WarmupDecayLR: learning rate at the beginning."},
      {"warmup_max_lr", NumberSpec{.autos = kAuto, .note = "optimizer.params.lr"},
       "WarmupLR, WarmupDecayLR: learning rate at the end of the warm-up.", "`optimizer.params.lr`"},
      {"total_num_steps", IntSpec{.min = 1, .autos = kAuto, .note = "steps"},
       "WarmupDecayLR, WarmupCosineLR: steps until the learning rate is at its end.", "`steps`"},
      {"warmup_min_ratio", NumberSpec{.fallback = d.warmup_min_ratio},
       "WarmupCosineLR: share of the optimizer's `lr` at the beginning."},
      {"cos_min_ratio", NumberSpec{.fallback = d.cos_min_ratio},
       "WarmupCosineLR: share of the optimizer's `lr` at the end."},
      {"cycle_min_lr", NumberSpec{}, "OneCycle: lowest learning rate of the cycle.", "required"},
      {"cycle_max_lr", NumberSpec{}, "OneCycle: highest learning rate of the cycle.", "required"},
      {"cycle_first_step_size", IntSpec{.fallback = d.cycle_first_step_size, .min = 1},
       "OneCycle: steps of the first half."},
      {"cycle_second_step_size", IntSpec{.min = 1}, "OneCycle: steps of the second half.", kAsTheFirst},
      {"cycle_first_stair_count", IntSpec{.fallback = d.cycle_first_stair_count},
       "OneCycle: stairs of the first half; 0: none."},
      {"cycle_second_stair_count", IntSpec{}, "OneCycle: stairs of the second half; 0: none.", kAsTheFirst},
      {"decay_step_size", IntSpec{.fallback = d.decay_step_size},
       "OneCycle: after the cycle, steps between decays; 0: no decay."},
      {"decay_lr_rate", NumberSpec{.fallback = d.decay_lr_rate},
       "OneCycle: decay of the learning rate after the cycle."},
      {"cycle_momentum", BoolSpec{d.cycle_momentum},
       "OneCycle: beta1 moves against the learning rate. Beta2 stays, which is 0.99 in DeepSpeed."},
      {"cycle_min_mom", NumberSpec{.fallback = d.cycle_min_mom, .range = Range::kBelowOne},
       "OneCycle: lowest beta1 of the cycle."},
      {"cycle_max_mom", NumberSpec{.fallback = d.cycle_max_mom, .range = Range::kBelowOne},
       "OneCycle: highest beta1 of the cycle."},
      {"decay_mom_rate", NumberSpec{.fallback = d.decay_mom_rate},
       "OneCycle: decay of beta1 after the cycle."},
      {"last_batch_iteration", IntSpec{.fallback = -1, .min = -1},
       "The step that a run goes on from: there are no checkpoints yet, so it is -1."},
  });
  return keys;
}

// What "auto" stands for: a tenth of the run, as a warm-up of 1000 steps would be longer than many a run.
std::int64_t warmup_fallback(Section& params, const RunConfig& run, std::int64_t otherwise) {
  if (!params.is_auto("warmup_num_steps")) return otherwise;
  return std::clamp<std::int64_t>(run.steps / 10, 1, 1000);
}

void read_warmup(Section& params, const RunConfig& run, ScheduleConfig& out) {
  IntSpec steps = params.spec_of<IntSpec>("warmup_num_steps");
  steps.fallback = warmup_fallback(params, run, steps.fallback);
  out.warmup_num_steps = params.integer("warmup_num_steps", steps);
  out.warmup_linear = params.choice<WarmupType>("warmup_type") == WarmupType::kLinear;
}

void read_warmup_rates(Section& params, const RunConfig& run, ScheduleConfig& out) {
  out.warmup_min_lr = params.number("warmup_min_lr");
  NumberSpec most = params.spec_of<NumberSpec>("warmup_max_lr");
  most.fallback = run.optimizer.lr;
  out.warmup_max_lr = params.number("warmup_max_lr", most);
}

void read_total_steps(Section& params, const RunConfig& run, ScheduleConfig& out) {
  constexpr const char* kTotal = "total_num_steps";
  IntSpec total = params.spec_of<IntSpec>(kTotal);
  total.fallback = run.steps;
  out.total_num_steps = params.integer(kTotal, total);
  if (out.total_num_steps < out.warmup_num_steps) {
    params.notice(kTotal, fmt::format("{} steps are less than the {} of the warm-up, which will not end",
                                      out.total_num_steps, out.warmup_num_steps));
  }
}

void read_one_cycle(Section& params, const RunConfig& run, ScheduleConfig& out) {
  for (const char* key : {"cycle_min_lr", "cycle_max_lr"}) {
    if (!params.has(key)) params.fail(key, "is missing", "OneCycle needs cycle_min_lr and cycle_max_lr");
  }
  out.cycle_min_lr = params.number("cycle_min_lr");
  out.cycle_max_lr = params.number("cycle_max_lr");
  out.decay_lr_rate = params.number("decay_lr_rate");
  out.cycle_first_step_size = params.integer("cycle_first_step_size");
  if (params.has("cycle_second_step_size")) {
    out.cycle_second_step_size = params.integer("cycle_second_step_size");
  }
  out.decay_step_size = params.integer("decay_step_size");
  out.cycle_first_stair_count = params.integer("cycle_first_stair_count");
  if (params.has("cycle_second_stair_count")) {
    out.cycle_second_stair_count = params.integer("cycle_second_stair_count");
  }
  out.cycle_momentum = params.boolean("cycle_momentum");
  out.cycle_min_mom = params.number("cycle_min_mom");
  out.cycle_max_mom = params.number("cycle_max_mom");
  out.decay_mom_rate = params.number("decay_mom_rate");
  constexpr double kDeepSpeedBeta2 = 0.99;
  if (out.cycle_momentum && run.optimizer.kind == OptimizerKind::kSgd) {
    params.notice("", "cycle_momentum moves beta1, which SGD has not; its momentum stays, as in DeepSpeed");
  } else if (out.cycle_momentum && run.optimizer.beta2 != kDeepSpeedBeta2) {
    params.notice("", fmt::format("DeepSpeed's OneCycle also sets beta2 to 0.99; here it stays {}",
                                  run.optimizer.beta2));
  }
}

void read_schedule_params(Section& params, const RunConfig& run, ScheduleConfig& out) {
  switch (out.kind) {
    case Kind::kConstant:
      break;
    case Kind::kWarmup:
      read_warmup(params, run, out);
      read_warmup_rates(params, run, out);
      break;
    case Kind::kWarmupDecay:
      read_warmup(params, run, out);
      read_warmup_rates(params, run, out);
      read_total_steps(params, run, out);
      break;
    case Kind::kWarmupCosine:
      read_warmup(params, run, out);
      out.warmup_min_ratio = params.number("warmup_min_ratio");
      out.cos_min_ratio = params.number("cos_min_ratio");
      read_total_steps(params, run, out);
      break;
    case Kind::kOneCycle:
      read_one_cycle(params, run, out);
      break;
  }
  // There are no checkpoints yet that a run could be resumed from.
  if (params.integer("last_batch_iteration") != -1) {
    params.wrong("last_batch_iteration", "-1", "remove the key: every run begins with its first step");
  }
  params.finish();
}

Kind schedule_kind(Section& section) {
  if (!section.has("type")) section.fail("type", "is missing", "e.g. \"type\": \"WarmupCosineLR\"");
  if (section.text("type", "") == "LRRangeTest") {
    section.wrong("type", "a schedule to train with",
                  "LRRangeTest is not supported: try a few runs with --set");
  }
  return section.choice<Kind>("type");
}

}  // namespace

const Keys& schedule_keys() {
  static const Keys keys({
      {"type",
       ChoiceSpec(Kind::kConstant, {{"WarmupLR", Kind::kWarmup},
                                    {"WarmupDecayLR", Kind::kWarmupDecay},
                                    {"WarmupCosineLR", Kind::kWarmupCosine},
                                    {"OneCycle", Kind::kOneCycle},
                                    {"Constant", Kind::kConstant}}),
       "The schedule of the learning rate, as in DeepSpeed.", "required; Constant without the section"},
      {"params", SectionSpec{params_keys}, "Parameters of the schedule."},
  });
  return keys;
}

void read_scheduler(Section& root, RunConfig& run) {
  auto section = root.section("scheduler");
  if (!section) return;
  run.schedule.kind = schedule_kind(*section);
  Section params = section->section_or_empty("params");
  read_schedule_params(params, run, run.schedule);
  section->finish();
  // The schedule has rules of its own; better now than in the last step.
  try {
    for (const std::int64_t step : {std::int64_t{0}, run.steps - 1}) {
      (void)schedule_at(run.schedule, step, run.optimizer.lr, run.optimizer.beta1);
    }
  } catch (const Error& error) {
    root.fail(error.where(), error.message());
  }
}

}  // namespace zg::config
