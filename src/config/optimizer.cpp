// The section "optimizer".
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::config {
namespace {

constexpr const char* kOneUpdate = "there is one update of each kind, fused and vectorised";

// Sets of optimizers, as bits: which optimizers a key of "params" belongs to.
constexpr unsigned bit_of(OptimizerKind kind) {
  return 1u << static_cast<unsigned>(kind);
}
constexpr unsigned kAdam = bit_of(OptimizerKind::kAdam), kSgd = bit_of(OptimizerKind::kSgd),
                   kLion = bit_of(OptimizerKind::kLion);

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

// Lion's defaults come from its paper; DeepSpeed's are different.
constexpr double kLionLr = 1e-4, kLionBeta2 = 0.99;

const Keys& params_keys() {
  using C = OptimizerConfig;
  using Form = RefusedSpec::Form;
  static const OptimizerConfig d;
  static const Keys keys = [] {
    std::vector<Key> rows = {
        {"lr", NumberSpec{.range = kRate, .autos = Auto::kTakesFallback}, "Learning rate.",
         fmt::format("`{}`; Lion: `{}`", d.lr, kLionLr)},
        {"betas", FormSpec{}, "Adam, AdamW, Lion: the decay of the moments.",
         fmt::format("`[{}, {}]`; Lion: `[{}, {}]`", d.beta1, d.beta2, d.beta1, kLionBeta2),
         "two numbers from 0 to below 1, or `\"auto\"`"},
        {"eps", &C::eps, NumberSpec{.range = kSmall, .autos = Auto::kTakesFallback},
         "Adam, AdamW: what is added to the denominator."},
        {"weight_decay", &C::weight_decay, NumberSpec{.range = kRate, .autos = Auto::kTakesFallback},
         "Weight decay: decoupled with AdamW and Lion, else added to the gradient."},
        {"decay", &C::decay_all, ChoiceSpec(false, {{"matrices", false}, {"all", true}}),
         "Which parameters decay: matrices, or norms and biases too."},
        {"adam_w_mode", BoolSpec{d.decoupled},
         "Type Adam: `false` is plain Adam with L2. As in DeepSpeed, Adam is AdamW otherwise."},
        {"adamw_mode", AliasSpec{"adam_w_mode", "another name"}, "Another name of the same key."},
        {"bias_correction", &C::bias_correction, BoolSpec{},
         "Adam, AdamW: corrects the bias of the moments."},
        {"momentum", &C::momentum, NumberSpec{.range = kBelowOne},
         "SGD: momentum. With 0 there is no state but the master weight."},
        {"dampening", &C::dampening, NumberSpec{.range = kShare},
         "SGD: dampening of the momentum, as in torch."},
        {"nesterov", &C::nesterov, BoolSpec{},
         "SGD: Nesterov's momentum, which needs a momentum and no dampening."},
        {"fp32_optimizer_states", BoolSpec{true},
         "Adam, AdamW, Lion: `false` is DeepSpeed's form of `\"state\": \"bf16\"` in `optimizer`."},
        {"amsgrad", RefusedSpec{Form::kSwitch, "AMSGrad is not supported"},
         "remove the key: plain Adam is what is left"},
        {"maximize", RefusedSpec{Form::kSwitch, "the loss is minimised"}, "remove the key"},
        {"max_grad_norm", NumberSpec{.range = kRate}, "Older form of `gradient_clipping`."},
        {"torch_adam", kIgnoredFlag, "there is one Adam, with the same formula"},
    };
    for (const char* key : {"fused", "foreach", "capturable", "differentiable", "set_grad_none"}) {
      rows.push_back({key, kIgnoredFlag, kOneUpdate});
    }
    return Keys(std::move(rows));
  }();
  return keys;
}

const Keys& group_keys() {
  static const Keys keys({
      {"params", FormSpec{},
       "The group's parameters, by their names in the weight files: `*` matches any text, "
       "`?` one character. The first group that matches a parameter applies; a pattern that "
       "matches nothing is an error.",
       "required", "a pattern, or a list of them"},
      {"weight_decay", NumberSpec{.range = kRate},
       "Weight decay of all parameters of the group, norms and biases too.", "the optimizer's"},
      {"lr_factor", &GroupRule::lr_factor, NumberSpec{.range = kRate},
       "Multiplies the learning rate, along its whole schedule; above 0."},
      {"frozen", &ParamGroup::frozen, BoolSpec{}, "The parameters are never updated, and have no state."},
  });
  return keys;
}

const Keys& optimizer_keys() {
  static const Keys keys({
      {"type", TextSpec{}, "The optimizer; upper or lower case does not matter.",
       "required; AdamW without the section", "`\"AdamW\"`, `\"Adam\"`, `\"SGD\"` or `\"Lion\"`"},
      {"state", &OptimizerConfig::state,
       ChoiceSpec(StatePrecision::kFull, {{"fp32", StatePrecision::kFull},
                                          {"split", StatePrecision::kSplit},
                                          {"bf16", StatePrecision::kBf16},
                                          {"int8", StatePrecision::kInt8}}),
       "How the optimizer's state is kept. Beside the weight, Adam's takes 12, 10, 6 or 4 bytes per "
       "parameter."},
      {"overlap", FormSpec{},
       "Whether updates run beside forward or backward, or in a phase of their own after backward, with the "
       "same bits.",
       "`true`", "`true` or `\"on\"`, `false` or `\"off\"`, or `\"auto\"`, which is on"},
      {"params", SectionSpec{params_keys}, "Parameters of the optimizer."},
      {"param_groups", ListSpec{group_keys}, "What differs for some parameters, an object for each group.",
       "none"},
      {"legacy_fusion", kIgnoredFlag, kOneUpdate},
  });
  return keys;
}

// Refuses keys that belong to other optimizers. It reads the JSON object directly, since a key that is asked
// of the section becomes known, and would then be proposed for a misspelt key of this optimizer.
void refuse_keys_of_others(const Section& params, const std::string& type, OptimizerKind kind) {
  for (const ParamKey& known : kParamKeys) {
    const auto given = params.json().find(known.key);
    if ((known.owners & bit_of(kind)) != 0 || given == params.json().end() || given->is_null()) continue;
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

// Decides like DeepSpeed: "Adam" means AdamW too, unless adam_w_mode is false.
bool read_decoupled(Section& params, bool adamw) {
  const std::string key = params.spelled("adam_w_mode");
  const bool mode = params.boolean(key);
  if (adamw && !mode) {
    params.notice(key,
                  "has no effect: the type is AdamW; plain Adam is \"type\": \"Adam\" with this key false");
  }
  return adamw || mode;
}

void read_adam(Section& params, bool adamw, OptimizerConfig& out) {
  read_betas(params, out);
  out.decoupled = read_decoupled(params, adamw);
  params.read_into(out, {"eps", "bias_correction"});
}

// Uses torch's defaults, and torch's rule for Nesterov momentum.
void read_sgd(Section& params, OptimizerConfig& out) {
  params.read_into(out, {"momentum", "dampening", "nesterov"});
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

// Notices name the defaults used, since DeepSpeed's are different.
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

// Warns that a DeepSpeed file's weight decay applies here to fewer parameters: in DeepSpeed all parameters
// decay. The key counts as a DeepSpeed file's if it comes from another file than the model.
void warn_of_decay(Section& params, const OptimizerConfig& optimizer) {
  constexpr const char* kKey = "weight_decay";
  const std::string source = params.tree().origin(params.path_of(kKey));
  const bool theirs = source != params.tree().origin("model") && source != kOverrideOrigin;
  if (optimizer.weight_decay == 0 || params.has("decay") || !theirs) return;
  params.notice(kKey,
                fmt::format("{} is for matrices alone, norms and biases do not decay; in DeepSpeed all do: "
                            "\"decay\": \"all\" beside it does so here",
                            optimizer.weight_decay));
}

void read_params(Section& params, const std::string& type, OptimizerConfig& out) {
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
  out.lr = params.number("lr", out.lr);  // Lion's default differs from the row's
  params.read_into(out, {"weight_decay", "decay"});
  warn_of_decay(params, out);
}

// Older DeepSpeed files set gradient clipping by this key.
void read_max_grad_norm(Section& root, Section& params, RunConfig& run) {
  constexpr const char *kKey = "max_grad_norm", *kClip = "gradient_clipping";
  const double norm = params.number(kKey);
  if (norm == 0 || norm == run.gradient_clipping) return;
  if (root.has(kClip)) {
    params.fail(kKey, fmt::format("is {}, and {} is {}", norm, kClip, run.gradient_clipping),
                "both are the largest norm of the gradient: remove this one");
  }
  params.notice(kKey, fmt::format("is no parameter of an optimizer: took {}: {}", kClip, norm));
  run.gradient_clipping = norm;
}

// Returns the name of the optimizer as messages write it. Upper or lower case does not matter here; DeepSpeed
// takes its own names in any case, but torch's "SGD" only as written.
std::string read_type(Section& section, OptimizerConfig& out) {
  struct Type {
    const char* name;
    OptimizerKind kind;
  };
  static const std::vector<Type> kTypes = {{"AdamW", OptimizerKind::kAdam},
                                           {"Adam", OptimizerKind::kAdam},
                                           {"SGD", OptimizerKind::kSgd},
                                           {"Lion", OptimizerKind::kLion}};
  section.require("type", "\"type\": \"AdamW\"");
  const std::string given = section.text("type");
  for (const Type& type : kTypes) {
    if (lower(type.name) != lower(given)) continue;
    out.kind = type.kind;
    return type.name;
  }
  constexpr const char* kExpected = "\"AdamW\", \"Adam\", \"SGD\" or \"Lion\"";
  // Class names of DeepSpeed and torch, which DeepSpeed does not accept in its files either.
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
  const auto nearest = nearest_name(std::string_view(given).substr(0, 100), names);
  section.wrong("type", kExpected,
                nearest && given.size() <= 6 ? "did you mean \"" + *nearest + "\"?"
                                             : "use \"AdamW\"; its learning rate is another one");
}

// ---- keys next to "params", which DeepSpeed lacks

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
  ParamGroup out;
  out.patterns = read_patterns(group);
  group.read_into(out);
  group.read_into(out.rule);
  if (group.has("weight_decay")) out.rule.weight_decay = group.number("weight_decay");
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

// Keeps the moments in bf16, as `key` of `section`, one of DeepSpeed's keys, requests. The "state" of
// `optimizer` may contradict it.
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
  if (params != nullptr && params->json().contains(kStates) && !params->boolean(kStates)) {
    // With this key, DeepSpeed's moments have the type of the weights.
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
  auto bf16 = root.section(root.spelled("bf16"));
  if (bf16 && run.dtype == DType::kBF16 && bf16->boolean("bf16_optimizer_states")) {
    take_bf16_state(*bf16, "bf16_optimizer_states", optimizer, run);
  }
}

// Warns if a low-precision state is configured for an optimizer without moments.
void warn_of_state_without_moments(Section& section, const OptimizerConfig& optimizer) {
  const bool small = optimizer.state == StatePrecision::kBf16 || optimizer.state == StatePrecision::kInt8;
  if (!small || optimizer.kind != OptimizerKind::kSgd || optimizer.momentum > 0) return;
  section.notice("state", "counts for moments, and SGD without momentum has none");
}

}  // namespace

std::vector<Key> optimizer_root_keys() {
  return {{"optimizer", SectionSpec{optimizer_keys}, "How gradients become steps."},
          {"scheduler", SectionSpec{schedule_keys}, "The learning rate over the steps."}};
}

void read_optimizer(Section& root, RunConfig& run) {
  OptimizerConfig& out = run.optimizer;
  auto section = root.section("optimizer");
  if (!section) {
    read_deepspeeds_state(root, nullptr, nullptr, run);
    return;
  }
  const std::string type = read_type(*section, out);
  if (out.kind == OptimizerKind::kLion) out.lr = kLionLr, out.beta2 = kLionBeta2;
  Section params = section->section_or_empty("params");
  read_params(params, type, out);
  read_max_grad_norm(root, params, run);
  out.overlap = read_overlap(*section, out.overlap);
  for (Section& group :
       section->sections("param_groups", "a list: [{\"params\": \"*.bias\", \"weight_decay\": 0}]")) {
    out.groups.push_back(read_group(group));
  }
  section->read_into(out);  // "state"
  read_deepspeeds_state(root, &*section, &params, run);
  warn_of_state_without_moments(*section, out);
  params.finish();
  section->finish();
}

}  // namespace zg::config
