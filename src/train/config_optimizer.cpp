// "optimizer" and "scheduler".
#include <algorithm>

#include "config_sections.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::config {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

void read_betas(Section& params, OptimizerConfig& out) {
  if (params.is_auto("betas")) {
    params.notice("betas", fmt::format("\"auto\": took [{}, {}]", out.beta1, out.beta2));
    return;
  }
  const Json* betas = params.find("betas");
  if (betas == nullptr) return;
  const auto valid = [](const Json& b) {
    return b.is_number() && b.get<double>() >= 0 && b.get<double>() < 1;
  };
  if (!betas->is_array() || betas->size() != 2 || !valid((*betas)[0]) || !valid((*betas)[1])) {
    params.wrong("betas", "two numbers from 0 to below 1, e.g. [0.9, 0.999]");
  }
  out.beta1 = (*betas)[0].get<double>();
  out.beta2 = (*betas)[1].get<double>();
}

bool read_decoupled(Section& params, const std::string& type) {
  // As DeepSpeed decides: "Adam" means AdamW too, unless adam_w_mode says no.
  if (params.has("adam_w_mode") && params.has("adamw_mode")) {
    params.fail("adamw_mode", "is another name of adam_w_mode, which is given too", "remove one of the two");
  }
  const char* key = params.has("adamw_mode") ? "adamw_mode" : "adam_w_mode";
  const bool mode = params.boolean(key, true);
  if (type == "adamw" && !mode) {
    params.notice(key,
                  "has no effect: the type is AdamW; plain Adam is \"type\": \"Adam\" with this key false");
  }
  return type == "adamw" || mode;
}

void read_adam_params(Section& params, const std::string& type, OptimizerConfig& out) {
  using Range = NumberSpec::Range;
  constexpr Auto kAuto = Auto::kTakesFallback;
  out.lr = params.number("lr", {.fallback = out.lr, .range = Range::kNotNegative, .autos = kAuto});
  out.eps = params.number("eps", {.fallback = out.eps, .range = Range::kPositive, .autos = kAuto});
  out.weight_decay = params.number(
      "weight_decay", {.fallback = out.weight_decay, .range = Range::kNotNegative, .autos = kAuto});
  read_betas(params, out);
  out.decoupled = read_decoupled(params, type);
  out.bias_correction = params.boolean("bias_correction", out.bias_correction);
  enum class Decay { kMatrices, kAll };
  out.decay_all = params.choice("decay", Decay::kMatrices,
                                {{"matrices", Decay::kMatrices}, {"all", Decay::kAll}}) == Decay::kAll;
  params.must_be_off("amsgrad", "AMSGrad is not supported", "remove the key: plain Adam is what is left");
  params.must_be_off("maximize", "the loss is minimised", "remove the key");
  if (!params.boolean("fp32_optimizer_states", true)) {
    params.wrong("fp32_optimizer_states", "true: Adam's moments are fp32 always", "remove the key");
  }
  if (params.number("max_grad_norm", {.fallback = 0}) > 0) {
    params.fail("max_grad_norm", "is not a parameter of Adam", "use the key gradient_clipping at the top");
  }
  params.ignored("torch_adam", Shape::kBool, "there is one Adam, with the same formula");
  for (const char* key : {"fused", "foreach", "capturable", "differentiable"}) {
    params.ignored(key, Shape::kBool, "there is one Adam, fused and vectorised");
  }
  params.finish();
}

[[noreturn]] void refuse_optimizer(Section& section, const std::string& type) {
  static const std::vector<std::string> kKnown = {"Adam", "AdamW"};
  const auto nearest = nearest_name(type, kKnown);
  const std::string hint = nearest && lower(type).size() <= 6
                               ? "did you mean \"" + *nearest + "\"?"
                               : "use \"AdamW\"; its learning rate is another one";
  section.wrong("type", "\"Adam\" or \"AdamW\"", hint);
}

}  // namespace

void read_optimizer(Section& root, RunConfig& run) {
  auto section = root.section("optimizer");
  if (!section) return;
  if (!section->has("type")) section->fail("type", "is missing", "\"type\": \"AdamW\"");
  const std::string type = section->text("type", "");
  if (lower(type) != "adam" && lower(type) != "adamw") refuse_optimizer(*section, type);
  if (auto params = section->section("params")) read_adam_params(*params, lower(type), run.optimizer);
  section->ignored("legacy_fusion", Shape::kBool, "it belongs to fp16");
  section->finish();
}

namespace {

using Kind = ScheduleConfig::Kind;

// What "auto" stands for: a tenth of the run, as a warm-up of 1000 steps would be longer than many a run.
std::int64_t warmup_fallback(Section& params, const RunConfig& run) {
  if (!params.is_auto("warmup_num_steps")) return 1000;
  return std::clamp<std::int64_t>(run.steps / 10, 1, 1000);
}

void read_warmup(Section& params, const RunConfig& run, ScheduleConfig& out) {
  out.warmup_num_steps = params.integer("warmup_num_steps", {.fallback = warmup_fallback(params, run),
                                                             .min = 1,
                                                             .autos = Auto::kTakesFallback,
                                                             .note = "a tenth of the steps, at most 1000"});
  enum class Type { kLog, kLinear };
  out.warmup_linear = params.choice("warmup_type", Type::kLog,
                                    {{"log", Type::kLog}, {"linear", Type::kLinear}}) == Type::kLinear;
}

void read_warmup_rates(Section& params, const RunConfig& run, ScheduleConfig& out) {
  out.warmup_min_lr = params.number("warmup_min_lr", {.fallback = 0, .autos = Auto::kTakesFallback});
  out.warmup_max_lr = params.number(
      "warmup_max_lr",
      {.fallback = run.optimizer.lr, .autos = Auto::kTakesFallback, .note = "optimizer.params.lr"});
}

void read_total_steps(Section& params, const RunConfig& run, ScheduleConfig& out) {
  constexpr const char* kTotal = "total_num_steps";
  out.total_num_steps = params.integer(
      kTotal, {.fallback = run.steps, .min = 1, .autos = Auto::kTakesFallback, .note = "steps"});
  if (out.total_num_steps < out.warmup_num_steps) {
    params.notice(kTotal, fmt::format("{} steps are less than the {} of the warm-up, which will not end",
                                      out.total_num_steps, out.warmup_num_steps));
  }
}

void read_one_cycle(Section& params, const RunConfig& run, ScheduleConfig& out) {
  for (const char* key : {"cycle_min_lr", "cycle_max_lr"}) {
    if (!params.has(key)) params.fail(key, "is missing", "OneCycle needs cycle_min_lr and cycle_max_lr");
  }
  using Range = NumberSpec::Range;
  out.cycle_min_lr = params.number("cycle_min_lr", {});
  out.cycle_max_lr = params.number("cycle_max_lr", {});
  out.decay_lr_rate = params.number("decay_lr_rate", {.fallback = out.decay_lr_rate});
  out.cycle_first_step_size =
      params.integer("cycle_first_step_size", {.fallback = out.cycle_first_step_size, .min = 1});
  if (params.has("cycle_second_step_size")) {
    out.cycle_second_step_size = params.integer("cycle_second_step_size", {.min = 1});
  }
  out.decay_step_size = params.integer("decay_step_size", {.fallback = out.decay_step_size});
  out.cycle_first_stair_count =
      params.integer("cycle_first_stair_count", {.fallback = out.cycle_first_stair_count});
  if (params.has("cycle_second_stair_count")) {
    out.cycle_second_stair_count = params.integer("cycle_second_stair_count", {});
  }
  out.cycle_momentum = params.boolean("cycle_momentum", out.cycle_momentum);
  out.cycle_min_mom =
      params.number("cycle_min_mom", {.fallback = out.cycle_min_mom, .range = Range::kBelowOne});
  out.cycle_max_mom =
      params.number("cycle_max_mom", {.fallback = out.cycle_max_mom, .range = Range::kBelowOne});
  out.decay_mom_rate = params.number("decay_mom_rate", {.fallback = out.decay_mom_rate});
  constexpr double kDeepSpeedBeta2 = 0.99;
  if (out.cycle_momentum && run.optimizer.beta2 != kDeepSpeedBeta2) {
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
      out.warmup_min_ratio = params.number("warmup_min_ratio", {.fallback = out.warmup_min_ratio});
      out.cos_min_ratio = params.number("cos_min_ratio", {.fallback = out.cos_min_ratio});
      read_total_steps(params, run, out);
      break;
    case Kind::kOneCycle:
      read_one_cycle(params, run, out);
      break;
  }
  // Runs are resumed from their checkpoint, which knows its step.
  if (params.integer("last_batch_iteration", {.fallback = -1, .min = -1}) != -1) {
    params.wrong("last_batch_iteration", "-1", "remove the key: a resumed run knows its step");
  }
  params.finish();
}

Kind schedule_kind(Section& section) {
  if (!section.has("type")) section.fail("type", "is missing", "e.g. \"type\": \"WarmupCosineLR\"");
  if (section.text("type", "") == "LRRangeTest") {
    section.wrong("type", "a schedule to train with",
                  "LRRangeTest is not supported: try a few runs with --set");
  }
  return section.choice("type", Kind::kConstant,
                        {{"WarmupLR", Kind::kWarmup},
                         {"WarmupDecayLR", Kind::kWarmupDecay},
                         {"WarmupCosineLR", Kind::kWarmupCosine},
                         {"OneCycle", Kind::kOneCycle},
                         {"Constant", Kind::kConstant}});
}

}  // namespace

void read_scheduler(Section& root, RunConfig& run) {
  auto section = root.section("scheduler");
  if (!section) return;
  run.schedule.kind = schedule_kind(*section);
  auto params = section->section("params");
  const Json none = Json::object();
  if (!params) params = section->child("params", none);
  read_schedule_params(*params, run, run.schedule);
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
