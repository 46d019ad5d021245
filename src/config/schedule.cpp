// The section "scheduler".
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::config {
namespace {

using Kind = ScheduleConfig::Kind;

constexpr std::int64_t kMostSteps = 1'000'000'000'000;  // sums of a few such values do not overflow

const Keys& params_keys() {
  using C = ScheduleConfig;
  constexpr Auto kAuto = Auto::kTakesFallback;
  constexpr const char* kAsTheFirst = "as the first";
  static const Keys keys({
      {"warmup_num_steps",
       IntSpec{.fallback = C{}.warmup_num_steps,
               .min = 1,
               .max = kMostSteps,
               .autos = kAuto,
               .note = "a tenth of the steps, at most 1000"},
       "Warmup*: steps of the warm-up. `\"auto\"` is a tenth of `steps`, at most 1000."},
      {"warmup_type", &C::warmup_linear, ChoiceSpec(false, {{"log", false}, {"linear", true}}),
       "Warmup*: how the learning rate rises."},
      {"warmup_min_lr", &C::warmup_min_lr, NumberSpec{.range = kRate, .autos = kAuto},
       "WarmupLR, WarmupDecayLR: learning rate at the beginning."},
      {"warmup_max_lr", NumberSpec{.range = kRate, .autos = kAuto, .note = "optimizer.params.lr"},
       "WarmupLR, WarmupDecayLR: learning rate at the end of the warm-up.", "`optimizer.params.lr`"},
      {"total_num_steps", IntSpec{.min = 1, .max = kMostSteps, .autos = kAuto, .note = "steps"},
       "WarmupDecayLR, WarmupCosineLR: steps until the learning rate is at its end.", "`steps`"},
      {"warmup_min_ratio", &C::warmup_min_ratio, NumberSpec{.range = kRate},
       "WarmupCosineLR: share of the optimizer's `lr` at the beginning."},
      {"cos_min_ratio", &C::cos_min_ratio, NumberSpec{.range = kRate},
       "WarmupCosineLR: share of the optimizer's `lr` at the end."},
      {"cycle_min_lr", &C::cycle_min_lr, NumberSpec{.range = kRate},
       "OneCycle: lowest learning rate of the cycle.", "required"},
      {"cycle_max_lr", &C::cycle_max_lr, NumberSpec{.range = kRate},
       "OneCycle: highest learning rate of the cycle.", "required"},
      {"cycle_first_step_size", &C::cycle_first_step_size, IntSpec{.min = 1, .max = kMostSteps},
       "OneCycle: steps of the first half."},
      {"cycle_second_step_size", IntSpec{.min = 1, .max = kMostSteps}, "OneCycle: steps of the second half.",
       kAsTheFirst},
      {"cycle_first_stair_count", &C::cycle_first_stair_count, IntSpec{.max = kMostSteps},
       "OneCycle: stairs of the first half; 0: none."},
      {"cycle_second_stair_count", IntSpec{.max = kMostSteps},
       "OneCycle: stairs of the second half; 0: none.", kAsTheFirst},
      {"decay_step_size", &C::decay_step_size, IntSpec{.max = kMostSteps},
       "OneCycle: after the cycle, steps between decays; 0: no decay."},
      {"decay_lr_rate", &C::decay_lr_rate, NumberSpec{.range = kRate},
       "OneCycle: decay of the learning rate after the cycle."},
      {"cycle_momentum", &C::cycle_momentum, BoolSpec{},
       "OneCycle: beta1 moves against the learning rate. Beta2 stays as it is; DeepSpeed "
       "sets it to 0.99."},
      {"cycle_min_mom", &C::cycle_min_mom, NumberSpec{.range = kBelowOne},
       "OneCycle: lowest beta1 of the cycle."},
      {"cycle_max_mom", &C::cycle_max_mom, NumberSpec{.range = kBelowOne},
       "OneCycle: highest beta1 of the cycle."},
      {"decay_mom_rate", &C::decay_mom_rate, NumberSpec{.range = kRate},
       "OneCycle: decay of beta1 after the cycle."},
      {"last_batch_iteration", IntSpec{.fallback = -1, .min = -1},
       "The step that a run goes on from. Here a checkpoint says it (`--resume`), so only "
       "-1 is taken."},
  });
  return keys;
}

void read_warmup(Section& params, const RunConfig& run, ScheduleConfig& out) {
  // "auto" means a tenth of the run, since a warm-up of 1000 steps would be longer than many runs.
  constexpr const char* kSteps = "warmup_num_steps";
  out.warmup_num_steps = params.is_auto(kSteps)
                             ? params.integer(kSteps, std::clamp<std::int64_t>(run.steps / 10, 1, 1000))
                             : params.integer(kSteps);
  params.read_into(out, {"warmup_type"});
  if (out.kind == Kind::kWarmup && out.warmup_num_steps > run.steps)
    params.notice(kSteps,
                  fmt::format("{} steps are more than the {} of the run, which ends before its learning "
                              "rate is reached",
                              out.warmup_num_steps, run.steps));
}

void read_warmup_rates(Section& params, const RunConfig& run, ScheduleConfig& out) {
  params.read_into(out, {"warmup_min_lr"});
  out.warmup_max_lr = params.number("warmup_max_lr", run.optimizer.lr);
  if (out.warmup_max_lr != run.optimizer.lr)
    params.notice("warmup_max_lr", fmt::format("{} takes the place of optimizer.params.lr, which is {}",
                                               out.warmup_max_lr, run.optimizer.lr));
}

void read_total_steps(Section& params, const RunConfig& run, ScheduleConfig& out) {
  constexpr const char* kTotal = "total_num_steps";
  out.total_num_steps = params.integer(kTotal, run.steps);
  if (out.total_num_steps < out.warmup_num_steps) {
    params.notice(kTotal, fmt::format("{} steps are less than the {} of the warm-up, which will not end",
                                      out.total_num_steps, out.warmup_num_steps));
  }
}

void read_one_cycle(Section& params, const RunConfig& run, ScheduleConfig& out) {
  for (const char* key : {"cycle_min_lr", "cycle_max_lr"}) {
    params.require(key, "OneCycle needs cycle_min_lr and cycle_max_lr");
  }
  params.read_into(
      out, {"cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "decay_step_size",
            "cycle_first_stair_count", "cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"});
  // A negative value, which no file can contain, means "the same as the first half".
  out.cycle_second_step_size = params.integer("cycle_second_step_size", out.cycle_second_step_size);
  out.cycle_second_stair_count = params.integer("cycle_second_stair_count", out.cycle_second_stair_count);
  constexpr double kDeepSpeedBeta2 = 0.99;
  if (out.cycle_momentum && run.optimizer.kind == OptimizerKind::kSgd) {
    params.notice("", "cycle_momentum moves beta1, which SGD has not; its momentum stays, as in DeepSpeed");
  } else if (out.cycle_momentum && run.optimizer.beta2 != kDeepSpeedBeta2) {
    params.notice("", fmt::format("DeepSpeed's OneCycle also sets beta2 to 0.99; here it stays {}",
                                  run.optimizer.beta2));
  }
}

void read_schedule_params(Section& params, const RunConfig& run, ScheduleConfig& out) {
  const bool plain = out.kind == Kind::kWarmup, decays = out.kind == Kind::kWarmupDecay;
  const bool cosine = out.kind == Kind::kWarmupCosine;
  if (plain || decays || cosine) read_warmup(params, run, out);
  if (plain || decays) read_warmup_rates(params, run, out);
  if (cosine) params.read_into(out, {"warmup_min_ratio", "cos_min_ratio"});
  if (decays || cosine) read_total_steps(params, run, out);
  if (out.kind == Kind::kOneCycle) read_one_cycle(params, run, out);
  // The checkpoint determines the step from which a run continues, so only the default is accepted.
  if (params.integer("last_batch_iteration") != -1) {
    params.wrong("last_batch_iteration", "-1", "remove the key: train --resume goes on from a checkpoint");
  }
  params.finish();
}

Kind schedule_kind(Section& section) {
  section.require("type", "e.g. \"type\": \"WarmupCosineLR\"");
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
  // The schedule checks rules of its own, and some fail only at the last step, so the first and the last step
  // are tried before the run.
  try {
    for (const std::int64_t step : {std::int64_t{0}, run.steps - 1}) {
      (void)schedule_at(run.schedule, step, run.optimizer.lr, run.optimizer.beta1);
    }
  } catch (const Error& error) {
    root.fail(error.where(), error.message());
  }
}

}  // namespace zg::config
