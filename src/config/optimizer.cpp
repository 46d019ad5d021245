// "optimizer" and "scheduler".
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::config {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// The optimizers that a key of "params" belongs to.
enum Owner : unsigned { kAdam = 1, kSgd = 2, kLion = 4 };

struct ParamKey {
  const char* key;
  unsigned owners;
};
constexpr ParamKey kParamKeys[] = {
    {"betas", kAdam | kLion},   {"eps", kAdam},
    {"adam_w_mode", kAdam},     {"adamw_mode", kAdam},
    {"bias_correction", kAdam}, {"amsgrad", kAdam},
    {"torch_adam", kAdam},      {"fp32_optimizer_states", kAdam | kLion},
    {"momentum", kSgd},         {"dampening", kSgd},
    {"nesterov", kSgd},
};

Owner owner_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdam:
      return kAdam;
    case OptimizerKind::kSgd:
      return kSgd;
    case OptimizerKind::kLion:
      return kLion;
  }
  return kAdam;
}

// Asked of the object itself, so that a key of another optimizer is not proposed for one that is misspelt.
void refuse_keys_of_others(const Section& params, const std::string& type, OptimizerKind kind) {
  for (const ParamKey& known : kParamKeys) {
    const auto given = params.json().find(known.key);
    if ((known.owners & owner_of(kind)) != 0 || given == params.json().end() || given->is_null()) continue;
    std::vector<const char*> owners;
    if ((known.owners & kAdam) != 0) owners.insert(owners.end(), {"Adam", "AdamW"});
    if ((known.owners & kSgd) != 0) owners.push_back("SGD");
    if ((known.owners & kLion) != 0) owners.push_back("Lion");
    params.fail(known.key, fmt::format("belongs to {}; the type is {}", fmt::join(owners, ", "), type),
                "remove the key, or choose that type");
  }
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

bool read_decoupled(Section& params, bool adamw) {
  // As DeepSpeed decides: "Adam" means AdamW too, unless adam_w_mode says no.
  if (params.has("adam_w_mode") && params.has("adamw_mode")) {
    params.fail("adamw_mode", "is another name of adam_w_mode, which is given too", "remove one of the two");
  }
  const char* key = params.has("adamw_mode") ? "adamw_mode" : "adam_w_mode";
  const bool mode = params.boolean(key, true);
  if (adamw && !mode) {
    params.notice(key,
                  "has no effect: the type is AdamW; plain Adam is \"type\": \"Adam\" with this key false");
  }
  return adamw || mode;
}

void read_adam(Section& params, bool adamw, OptimizerConfig& out) {
  read_betas(params, out);
  out.eps = params.number(
      "eps", {.fallback = out.eps, .range = NumberSpec::Range::kPositive, .autos = Auto::kTakesFallback});
  out.decoupled = read_decoupled(params, adamw);
  out.bias_correction = params.boolean("bias_correction", out.bias_correction);
  params.must_be_off("amsgrad", "AMSGrad is not supported", "remove the key: plain Adam is what is left");
  params.ignored("torch_adam", Shape::kBool, "there is one Adam, with the same formula");
}

// With torch's defaults, and its rule for Nesterov's momentum.
void read_sgd(Section& params, OptimizerConfig& out) {
  using Range = NumberSpec::Range;
  out.momentum = params.number("momentum", {.fallback = out.momentum, .range = Range::kBelowOne});
  out.dampening = params.number("dampening", {.fallback = out.dampening, .range = Range::kShare});
  out.nesterov = params.boolean("nesterov", out.nesterov);
  if (out.nesterov && (out.momentum == 0 || out.dampening != 0)) {
    params.fail("nesterov",
                fmt::format("needs a momentum above 0 and no dampening; momentum is {}, dampening {}",
                            out.momentum, out.dampening),
                "e.g. \"momentum\": 0.9, \"nesterov\": true");
  }
  if (out.dampening != 0 && out.momentum == 0) {
    params.notice("dampening", "has no effect: there is no momentum to dampen");
  }
}

// With the defaults of Lion's paper, which are not DeepSpeed's: a line says so.
void read_lion(Section& params, OptimizerConfig& out) {
  if (!params.has("lr")) {
    params.notice("lr",
                  fmt::format("is not given: took {}, as Lion's paper does (DeepSpeed: 0.001)", out.lr));
  }
  if (!params.has("betas")) {
    params.notice("betas",
                  fmt::format("is not given: took [{}, {}], as Lion's paper does (DeepSpeed: [0.9, 0.999])",
                              out.beta1, out.beta2));
  }
  read_betas(params, out);
}

void read_params(Section& params, const std::string& type, OptimizerConfig& out) {
  using Range = NumberSpec::Range;
  refuse_keys_of_others(params, type, out.kind);
  switch (out.kind) {
    case OptimizerKind::kAdam:
      read_adam(params, type == "AdamW", out);
      break;
    case OptimizerKind::kSgd:
      read_sgd(params, out);
      break;
    case OptimizerKind::kLion:
      read_lion(params, out);
      break;
  }
  constexpr Auto kAuto = Auto::kTakesFallback;
  out.lr = params.number("lr", {.fallback = out.lr, .range = Range::kNotNegative, .autos = kAuto});
  out.weight_decay = params.number(
      "weight_decay", {.fallback = out.weight_decay, .range = Range::kNotNegative, .autos = kAuto});
  enum class Decay { kMatrices, kAll };
  out.decay_all = params.choice("decay", Decay::kMatrices,
                                {{"matrices", Decay::kMatrices}, {"all", Decay::kAll}}) == Decay::kAll;
  params.must_be_off("maximize", "the loss is minimised", "remove the key");
  if (params.number("max_grad_norm", {.fallback = 0}) > 0) {
    params.fail("max_grad_norm", "is not a parameter of the optimizer",
                "use the key gradient_clipping at the top");
  }
  for (const char* key : {"fused", "foreach", "capturable", "differentiable", "set_grad_none"}) {
    params.ignored(key, Shape::kBool, "there is one update of each kind, fused and vectorised");
  }
}

// The name as we write it. DeepSpeed takes its own in any case, torch's "SGD" only so; here any case does.
std::string read_type(Section& section, OptimizerConfig& out) {
  struct Type {
    const char* name;
    OptimizerKind kind;
  };
  static const std::vector<Type> kTypes = {{"AdamW", OptimizerKind::kAdam},
                                           {"Adam", OptimizerKind::kAdam},
                                           {"SGD", OptimizerKind::kSgd},
                                           {"Lion", OptimizerKind::kLion}};
  if (!section.has("type")) section.fail("type", "is missing", "\"type\": \"AdamW\"");
  const std::string given = section.text("type", "");
  for (const Type& type : kTypes) {
    if (lower(type.name) != lower(given)) continue;
    out.kind = type.kind;
    return type.name;
  }
  constexpr const char* kExpected = "\"AdamW\", \"Adam\", \"SGD\" or \"Lion\"";
  // Classes of DeepSpeed and torch, which its files do not take either.
  for (const char* part : {"adam", "sgd", "lion"}) {
    const std::string name = lower(given);
    if (name == std::string("deepspeedcpu") + part || name == std::string("cpu") + part ||
        name == std::string("fused") + part || name == std::string("fused") + part + "w") {
      section.wrong("type", kExpected,
                    "that is the name of a class: a configuration names the method, and there is one "
                    "implementation of each");
    }
  }
  std::vector<std::string> names;
  for (const Type& type : kTypes) names.emplace_back(type.name);
  const auto nearest = nearest_name(given, names);
  section.wrong("type", kExpected,
                nearest && given.size() <= 6 ? "did you mean \"" + *nearest + "\"?"
                                             : "use \"AdamW\"; its learning rate is another one");
}

// ---- our keys beside "params"

bool read_overlap(Section& section, bool fallback) {
  constexpr const char* kKey = "overlap";
  const Json* value = section.find(kKey);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  const std::string text = value->is_string() ? value->get<std::string>() : "";
  if (text == "auto") section.notice(kKey, fmt::format("\"auto\": took {}", fallback ? "on" : "off"));
  if (text == "auto") return fallback;
  if (text == "on" || text == "off") return text == "on";
  section.wrong(kKey, "true or \"on\", false or \"off\", or \"auto\"",
                "off: the updates are a phase of their own after backward, with the same results");
}

std::vector<std::string> read_patterns(Section& group) {
  constexpr const char* kExpected =
      "a pattern of parameter names or a list of them, e.g. \"*.bias\" (* matches any text, ? one letter)";
  const Json* value = group.find("params");
  if (value == nullptr) group.fail("params", "is missing", std::string("it is ") + kExpected);
  const auto text = [&](const Json& pattern) {
    if (!pattern.is_string() || pattern.get_ref<const std::string&>().empty()) {
      group.wrong("params", kExpected);
    }
    return pattern.get<std::string>();
  };
  if (!value->is_array()) return {text(*value)};
  if (value->empty()) group.wrong("params", kExpected);
  std::vector<std::string> patterns;
  for (const Json& pattern : *value) patterns.push_back(text(pattern));
  return patterns;
}

ParamGroup read_group(Section& group) {
  using Range = NumberSpec::Range;
  ParamGroup out;
  out.patterns = read_patterns(group);
  out.frozen = group.boolean("frozen", false);
  if (group.has("weight_decay")) {
    out.rule.weight_decay = group.number("weight_decay", {.range = Range::kNotNegative});
  }
  out.rule.lr_factor = group.number("lr_factor", {.fallback = 1, .range = Range::kNotNegative});
  if (group.json().contains("lr")) {
    group.fail("lr", "is not a key of a group",
               "\"lr_factor\" multiplies the learning rate of the others, along its whole schedule");
  }
  group.finish();
  for (const char* key : {"lr_factor", "weight_decay"}) {
    if (out.frozen && group.has(key)) {
      group.fail(key, "cannot be combined with \"frozen\": true: what is frozen is never updated",
                 "remove one of the two");
    }
  }
  if (out.rule.lr_factor == 0) {
    group.wrong("lr_factor", "a number above 0",
                "\"frozen\": true leaves the parameters as they are, without state");
  }
  if (!out.frozen && !group.has("lr_factor") && !group.has("weight_decay")) {
    group.fail("", "says nothing about its parameters",
               "give it \"weight_decay\", \"lr_factor\" or \"frozen\": true");
  }
  return out;
}

std::vector<ParamGroup> read_groups(Section& section) {
  constexpr const char* kKey = "param_groups";
  constexpr const char* kExpected = "a list: [{\"params\": \"*.bias\", \"weight_decay\": 0}]";
  std::vector<ParamGroup> groups;
  const Json* list = section.find(kKey);
  if (list == nullptr) return groups;
  if (!list->is_array()) section.wrong(kKey, kExpected);
  for (std::size_t i = 0; i < list->size(); ++i) {
    const std::string key = fmt::format("{}.{}", kKey, i);
    if (!(*list)[i].is_object()) {
      section.fail(key, "found " + describe((*list)[i]) + ", expected an object in " + kExpected);
    }
    Section group = section.child(key, (*list)[i]);
    groups.push_back(read_group(group));
  }
  return groups;
}

void read_state(Section& section, RunConfig& run) {
  constexpr const char* kKey = "state";
  StatePrecision& state = run.optimizer.state;
  state = section.choice(kKey, state,
                         {{"fp32", StatePrecision::kFull},
                          {"split", StatePrecision::kSplit},
                          {"bf16", StatePrecision::kBf16},
                          {"int8", StatePrecision::kInt8}});
  if (run.dtype == DType::kF64 && state != StatePrecision::kFull) {
    section.wrong(kKey, "\"fp32\", the default",
                  "with fp64 all of the state is fp64: remove the key, or disable fp64");
  }
  if (state == StatePrecision::kSplit && run.dtype != DType::kBF16) {
    section.wrong(
        kKey, "\"fp32\", \"bf16\" or \"int8\"",
        fmt::format("\"split\" makes the bf16 weight one half of the master weight, and the weights "
                    "are {}: enable bf16, or choose another state",
                    name_of(run.dtype)));
  }
}

// DeepSpeed's forms of "state": "bf16". `section` and `key` say where the one that is asked for stands.
void take_bf16_state(Section& section, const char* key, Section* optimizer, RunConfig& run) {
  StatePrecision& state = run.optimizer.state;
  if (optimizer != nullptr && optimizer->has("state")) {
    if (state == StatePrecision::kBf16) return;
    section.fail(key,
                 fmt::format("asks for moments in bf16, but optimizer.state is {}",
                             describe(*optimizer->find("state"))),
                 "remove one of the two");
  }
  state = StatePrecision::kBf16;
}

void read_deepspeeds_state(Section& root, Section* optimizer, Section* params, RunConfig& run) {
  constexpr const char* kStates = "fp32_optimizer_states";
  if (params != nullptr && params->json().contains(kStates) && !params->boolean(kStates, true)) {
    // In DeepSpeed they take the type of the weights then.
    if (run.dtype == DType::kF32 || run.dtype == DType::kF64) {
      params->notice(kStates,
                     fmt::format("has no effect: the moments take the type of the weights, which are {}; "
                                 "\"state\": \"bf16\" beside params keeps them in bf16",
                                 name_of(run.dtype)));
    } else {
      take_bf16_state(*params, kStates, optimizer, run);
      if (run.dtype == DType::kF16)
        params->notice(kStates, "false: the moments are bf16, which has fp32's range");
    }
  }
  auto bf16 = root.section(root.has("bfloat16") ? "bfloat16" : "bf16");
  if (bf16 && run.dtype == DType::kBF16 && bf16->boolean("bf16_optimizer_states", false)) {
    take_bf16_state(*bf16, "bf16_optimizer_states", optimizer, run);
  }
}

// Nothing of the optimizer's is kept in the way that is asked for.
void warn_of_state_without_moments(Section& section, const OptimizerConfig& optimizer) {
  const bool small = optimizer.state == StatePrecision::kBf16 || optimizer.state == StatePrecision::kInt8;
  if (!small || optimizer.kind != OptimizerKind::kSgd || optimizer.momentum > 0) return;
  section.notice("state", "counts for moments, and SGD without momentum has none");
}

}  // namespace

void read_optimizer(Section& root, RunConfig& run) {
  OptimizerConfig& out = run.optimizer;
  auto section = root.section("optimizer");
  if (!section) {
    read_deepspeeds_state(root, nullptr, nullptr, run);
    return;
  }
  const std::string type = read_type(*section, out);
  if (out.kind == OptimizerKind::kLion) out.lr = 1e-4, out.beta2 = 0.99;
  const Json none = Json::object();
  auto params = section->section("params");
  if (!params) params = section->child("params", none);
  read_params(*params, type, out);
  out.overlap = read_overlap(*section, out.overlap);
  out.groups = read_groups(*section);
  read_state(*section, run);
  read_deepspeeds_state(root, &*section, &*params, run);
  warn_of_state_without_moments(*section, out);
  params->finish();
  section->ignored("legacy_fusion", Shape::kBool, "there is one update of each kind, fused and vectorised");
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
      out.warmup_min_ratio = params.number("warmup_min_ratio", {.fallback = out.warmup_min_ratio});
      out.cos_min_ratio = params.number("cos_min_ratio", {.fallback = out.cos_min_ratio});
      read_total_steps(params, run, out);
      break;
    case Kind::kOneCycle:
      read_one_cycle(params, run, out);
      break;
  }
  // There are no checkpoints yet that a run could be resumed from.
  if (params.integer("last_batch_iteration", {.fallback = -1, .min = -1}) != -1) {
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
