// What configurations say of the optimizer, of the state it keeps, and of fp16 with its loss scale.
#include "config/config_fixture.hpp"

namespace zg {
namespace {

class OptimizerSection : public ConfigTest {
 protected:
  // The base with this "optimizer" section (and whatever follows it).
  RunConfig load(const std::string& section, const Strings& overrides = {}) const {
    return load_over("{\"optimizer\": " + section + "}", overrides);
  }
  OptimizerConfig optimizer(const std::string& section) const { return load(section).optimizer; }
};

TEST_F(OptimizerSection, TypesInAnyCase) {
  struct Case {
    const char* type;
    OptimizerKind kind;
  };
  for (const Case& c : {Case{"AdamW", OptimizerKind::kAdam},
                        {"adamw", OptimizerKind::kAdam},
                        {"ADAM", OptimizerKind::kAdam},  // as in DeepSpeed, unless adam_w_mode is false
                        {"sgd", OptimizerKind::kSgd},
                        {"SGD", OptimizerKind::kSgd},
                        {"Lion", OptimizerKind::kLion},
                        {"lion", OptimizerKind::kLion}}) {
    SCOPED_TRACE(c.type);
    EXPECT_EQ(optimizer(fmt::format(R"({{"type": "{}"}})", c.type)).kind, c.kind);
  }
}

TEST_F(OptimizerSection, DefaultsOfEachType) {
  const RunConfig adam = load(R"({"type": "Adam"})");
  EXPECT_EQ(adam.warnings, Strings{});
  EXPECT_DOUBLE_EQ(adam.optimizer.lr, 1e-3);
  EXPECT_DOUBLE_EQ(adam.optimizer.beta1, 0.9);
  EXPECT_DOUBLE_EQ(adam.optimizer.beta2, 0.999);
  EXPECT_DOUBLE_EQ(adam.optimizer.eps, 1e-8);
  EXPECT_DOUBLE_EQ(adam.optimizer.weight_decay, 0);
  EXPECT_TRUE(adam.optimizer.bias_correction);
  const RunConfig sgd = load(R"({"type": "SGD"})");
  EXPECT_EQ(sgd.warnings, Strings{});
  EXPECT_DOUBLE_EQ(sgd.optimizer.lr, 1e-3);
  EXPECT_DOUBLE_EQ(sgd.optimizer.momentum, 0);
  EXPECT_DOUBLE_EQ(sgd.optimizer.dampening, 0);
  EXPECT_FALSE(sgd.optimizer.nesterov);
  EXPECT_DOUBLE_EQ(sgd.optimizer.weight_decay, 0);
  // Lion's paper and DeepSpeed disagree, and that is said.
  const RunConfig lion = load(R"({"type": "Lion"})");
  EXPECT_DOUBLE_EQ(lion.optimizer.lr, 1e-4);
  EXPECT_DOUBLE_EQ(lion.optimizer.beta1, 0.9);
  EXPECT_DOUBLE_EQ(lion.optimizer.beta2, 0.99);
  EXPECT_DOUBLE_EQ(lion.optimizer.weight_decay, 0);
  EXPECT_TRUE(warns(lion, "optimizer.params.lr: is not given: took 0.0001"));
  EXPECT_TRUE(warns(lion, "optimizer.params.betas: is not given: took [0.9, 0.99]"));
  EXPECT_EQ(load(R"({"type": "Lion", "params": {"lr": 1e-4, "betas": [0.95, 0.98]}})").warnings, Strings{});
  for (const RunConfig* run : {&adam, &sgd, &lion}) {
    EXPECT_EQ(run->optimizer.state, StatePrecision::kFull);
    EXPECT_TRUE(run->optimizer.overlap);
    EXPECT_TRUE(run->optimizer.groups.empty());
    EXPECT_FALSE(run->optimizer.decay_all);
  }
}

TEST_F(OptimizerSection, ParametersOfEachType) {
  const OptimizerConfig sgd =
      optimizer(R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true,
      "weight_decay": 0.01, "decay": "all"}})");
  EXPECT_DOUBLE_EQ(sgd.lr, 0.1);
  EXPECT_DOUBLE_EQ(sgd.momentum, 0.9);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_DOUBLE_EQ(sgd.weight_decay, 0.01);
  EXPECT_TRUE(sgd.decay_all);
  EXPECT_DOUBLE_EQ(optimizer(R"({"type": "SGD", "params": {"momentum": 0.5, "dampening": 1}})").dampening, 1);
  const OptimizerConfig lion = optimizer(R"({"type": "Lion", "params": {"lr": 3e-4, "betas": [0.8, 0.7]}})");
  EXPECT_DOUBLE_EQ(lion.lr, 3e-4);
  EXPECT_DOUBLE_EQ(lion.beta1, 0.8);
  EXPECT_DOUBLE_EQ(lion.beta2, 0.7);
  const RunConfig idle = load(R"({"type": "SGD", "params": {"dampening": 0.5}})");
  EXPECT_TRUE(warns(idle, "optimizer.params.dampening: has no effect: there is no momentum"));
  const RunConfig autos = load(R"({"type": "Lion", "params": {"lr": "auto", "betas": "auto"}})");
  EXPECT_DOUBLE_EQ(autos.optimizer.lr, 1e-4);
  EXPECT_TRUE(warns(autos, "optimizer.params.betas: \"auto\": took [0.9, 0.99]"));
}

TEST_F(OptimizerSection, AStateOfMomentsWithoutMomentsWarns) {
  EXPECT_TRUE(warns(load(R"({"type": "SGD", "state": "int8"})"), "SGD without momentum has none"));
  EXPECT_EQ(load(R"({"type": "SGD", "state": "int8", "params": {"momentum": 0.9}})").warnings, Strings{});
}

TEST_F(OptimizerSection, DeepSpeedsKeysForTheState) {
  const std::string states = R"({"type": "AdamW", "params": {"fp32_optimizer_states": false}})";
  EXPECT_EQ(load(states, {"bf16.enabled=true"}).optimizer.state, StatePrecision::kBf16);
  EXPECT_EQ(load(states, {"bf16.enabled=true"}).warnings, Strings{});
  EXPECT_EQ(load(states, {"bf16.enabled=true", "optimizer.state=bf16"}).optimizer.state,
            StatePrecision::kBf16);
  EXPECT_EQ(
      load(states, {"bf16.enabled=true", "optimizer.params.fp32_optimizer_states=true"}).optimizer.state,
      StatePrecision::kFull);
  EXPECT_EQ(load(states,
                 {"bf16.enabled=true", "optimizer.params.fp32_optimizer_states=true", "optimizer.state=int8"})
                .optimizer.state,
            StatePrecision::kInt8);
  EXPECT_EQ(load(states, {"fp16.enabled=true"}).optimizer.state, StatePrecision::kBf16);
  // The moments take the weights' type there.
  const RunConfig fp32 = load(states);
  EXPECT_EQ(fp32.optimizer.state, StatePrecision::kFull);
  EXPECT_TRUE(warns(fp32, "optimizer.params.fp32_optimizer_states: has no effect"));

  const std::string section = R"({"bf16": {"enabled": true, "bf16_optimizer_states": true}})";
  EXPECT_EQ(load_over(section).optimizer.state, StatePrecision::kBf16);
  EXPECT_EQ(load_over(section, {"optimizer.type=Lion"}).optimizer.state, StatePrecision::kBf16);
  EXPECT_EQ(load_over(section, {"bf16.enabled=false"}).optimizer.state, StatePrecision::kFull);
  EXPECT_EQ(load_over(R"({"bf16": {"enabled": true, "bf16_optimizer_states": false}})",
                      {"optimizer.type=Lion", "optimizer.state=int8"})
                .optimizer.state,
            StatePrecision::kInt8);
}

TEST_F(OptimizerSection, Overlap) {
  const auto overlap = [&](const char* value) {
    return load(R"({"type": "AdamW"})", {std::string("optimizer.overlap=") + value}).optimizer.overlap;
  };
  for (const char* on : {"true", "on", "auto", "\"on\""}) EXPECT_TRUE(overlap(on)) << on;
  for (const char* off : {"false", "off", "\"off\""}) EXPECT_FALSE(overlap(off)) << off;
  EXPECT_TRUE(warns(load(R"({"type": "AdamW", "overlap": "auto"})"), "optimizer.overlap: \"auto\": took on"));
  // Another type drops the old params, and nothing else.
  const std::string base = R"({"type": "AdamW", "params": {"eps": 1e-6}, "overlap": false, "state": "int8"})";
  const RunConfig other = load(base, {"optimizer.type=SGD", "optimizer.params.momentum=0.9"});
  EXPECT_FALSE(other.optimizer.overlap);
  EXPECT_EQ(other.optimizer.state, StatePrecision::kInt8);
}

TEST_F(OptimizerSection, Groups) {
  const RunConfig run = load(R"({"type": "AdamW", "params": {"weight_decay": 0.1, "decay": "matrices"},
      "param_groups": [
      {"params": "wte.*", "weight_decay": 0},
      {"params": ["*.bias", "ln_?.weight"], "lr_factor": 2, "weight_decay": 0.5},
      {"params": "h.0.*", "frozen": true},
      {"params": "h.1.*", "frozen": false, "lr_factor": 0.5}]})");
  EXPECT_EQ(run.warnings, Strings{});
  const std::vector<ParamGroup>& groups = run.optimizer.groups;
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_EQ(groups[0].patterns, Strings{"wte.*"});
  EXPECT_EQ(groups[0].rule.weight_decay, 0.0);
  EXPECT_DOUBLE_EQ(groups[0].rule.lr_factor, 1);
  EXPECT_FALSE(groups[0].frozen);
  EXPECT_EQ(groups[1].patterns, (Strings{"*.bias", "ln_?.weight"}));
  EXPECT_DOUBLE_EQ(groups[1].rule.lr_factor, 2);
  EXPECT_EQ(groups[1].rule.weight_decay, 0.5);
  EXPECT_TRUE(groups[2].frozen);
  EXPECT_FALSE(groups[3].frozen);
  EXPECT_EQ(groups[3].rule.weight_decay, std::nullopt);
  const RunConfig set = load(R"({"type": "AdamW"})", {"optimizer.param_groups.0.params=*.bias",
                                                      "optimizer.param_groups.0.frozen=true"});
  ASSERT_EQ(set.optimizer.groups.size(), 1u);
  EXPECT_TRUE(set.optimizer.groups[0].frozen);
}

// ---- what is wrong

TEST_F(OptimizerSection, ErrorsNameThePlaceAndTheWayOut) {
  struct Case {
    const char* section;
    const char* path;  // below "optimizer"
    const char* message;
  };
  const Case cases[] = {
      {R"({"type": "DeepSpeedCPUAdam"})", "type", "a configuration names the method"},
      {R"({"type": "FusedAdam"})", "type", "the name of a class"},
      {R"({"type": "FusedLion"})", "type", "the name of a class"},
      {R"({"type": "Muon"})", "type", "expected \"AdamW\", \"Adam\", \"SGD\" or \"Lion\""},
      {R"({"type": "lyon"})", "type", "did you mean \"Lion\"?"},
      {R"({"type": 3})", "type", "found 3, expected a text"},
      // Keys of another one.
      {R"({"type": "AdamW", "params": {"momentum": 0.9}})", "params.momentum",
       "belongs to SGD; the type is AdamW"},
      {R"({"type": "Lion", "params": {"nesterov": true}})", "params.nesterov",
       "belongs to SGD; the type is Lion"},
      {R"({"type": "adam", "params": {"dampening": 0}})", "params.dampening",
       "belongs to SGD; the type is Adam"},
      {R"({"type": "SGD", "params": {"betas": [0.9, 0.999]}})", "params.betas",
       "belongs to Adam, AdamW, Lion"},
      {R"({"type": "SGD", "params": {"fp32_optimizer_states": false}})", "params.fp32_optimizer_states",
       "belongs to Adam, AdamW, Lion; the type is SGD"},
      {R"({"type": "Lion", "params": {"eps": 1e-8}})", "params.eps",
       "belongs to Adam, AdamW; the type is Lion"},
      {R"({"type": "SGD", "params": {"adam_w_mode": true}})", "params.adam_w_mode", "choose that type"},
      {R"({"type": "Lion", "params": {"bias_correction": false}})", "params.bias_correction",
       "belongs to Adam"},
      {R"({"type": "Lion", "params": {"amsgrad": false}})", "params.amsgrad", "belongs to Adam"},
      {R"({"type": "SGD", "params": {"torch_adam": true}})", "params.torch_adam", "belongs to Adam"},
      // Ranges, and what goes together.
      {R"({"type": "SGD", "params": {"momentum": 1}})", "params.momentum", "from 0 to below 1"},
      {R"({"type": "SGD", "params": {"momentum": 0.9, "dampening": 1.5}})", "params.dampening",
       "from 0 to 1"},
      {R"({"type": "SGD", "params": {"nesterov": true}})", "params.nesterov",
       "needs a momentum above 0 and no dampening; momentum is 0, dampening 0"},
      {R"({"type": "SGD", "params": {"nesterov": true, "momentum": 0.9, "dampening": 0.1}})",
       "params.nesterov", "dampening 0.1"},
      {R"({"type": "Lion", "params": {"betas": [0.9, 1]}})", "params.betas", "two numbers"},
      {R"({"type": "SGD", "params": {"lr": -1}})", "params.lr", "from 0 to 1e30"},
      {R"({"type": "Lion", "params": {"weight_decay": -1}})", "params.weight_decay", "from 0 to 1e30"},
      {R"({"type": "SGD", "params": {"max_grad_norm": -1}})", "params.max_grad_norm", "from 0 to 1e30"},
      {R"({"type": "SGD", "params": {"maximize": true}})", "params.maximize", "the loss is minimised"},
      {R"({"type": "SGD", "params": {"momentun": 0.9}})", "params.momentun", "did you mean momentum?"},
      // A key that another one has is not proposed.
      {R"({"type": "AdamW", "params": {"momentun": 0.9}})", "params.momentun", "is not a known key"},
      // State.
      {R"({"type": "AdamW", "state": "fp16"})", "state", "one of \"fp32\", \"split\", \"bf16\", \"int8\""},
      {R"({"type": "AdamW", "state": 8})", "state", "one of \"fp32\""},
      {R"({"type": "AdamW", "state": "split"})", "state",
       "arithmetic fp32: \"split\" makes the bf16 weight one half of the master weight"},
      {R"({"type": "AdamW", "params": {"state": "int8"}})", "params.state", "did you mean optimizer.state?"},
      // Overlap.
      {R"({"type": "AdamW", "overlap": "maybe"})", "overlap",
       "true or \"on\", false or \"off\", or \"auto\""},
      {R"({"type": "AdamW", "overlap": 1})", "overlap", "found 1"},
      {R"({"type": "AdamW", "params": {"overlap": false}})", "params.overlap",
       "did you mean optimizer.overlap?"},
      // Groups.
      {R"({"type": "AdamW", "param_groups": {"params": "*"}})", "param_groups", "expected a list"},
      {R"({"type": "AdamW", "param_groups": ["*.bias"]})", "param_groups.0", "expected an object in a list"},
      {R"({"type": "AdamW", "param_groups": [{"frozen": true}]})", "param_groups.0.params", "is missing"},
      {R"({"type": "AdamW", "param_groups": [{"params": "a", "lr_factor": 2}, {"params": []}]})",
       "param_groups.1.params", "expected a pattern of parameter names or a list"},
      {R"({"type": "AdamW", "param_groups": [{"params": ["a", 3]}]})", "param_groups.0.params",
       "expected a pattern"},
      {R"({"type": "AdamW", "param_groups": [{"params": ""}]})", "param_groups.0.params",
       "expected a pattern"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias"}]})", "param_groups.0",
       "says nothing about its parameters"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "frozen": false}]})", "param_groups.0",
       "says nothing about its parameters"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "frozen": true, "lr_factor": 2}]})",
       "param_groups.0.lr_factor", "cannot be combined with \"frozen\": true"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "frozen": true, "weight_decay": 0}]})",
       "param_groups.0.weight_decay", "what is frozen is never updated"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "lr_factor": 0}]})",
       "param_groups.0.lr_factor", "\"frozen\": true leaves"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "lr_factor": -1}]})",
       "param_groups.0.lr_factor", "from 0 to 1e30"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "weight_decay": "no"}]})",
       "param_groups.0.weight_decay", "expected a number"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "lr": 1e-3}]})", "param_groups.0.lr",
       "\"lr_factor\" multiplies the learning rate"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "frozn": true}]})", "param_groups.0.frozn",
       "did you mean frozen?"},
      {R"({"type": "AdamW", "param_groups": [{"params": "*.bias", "frozen": "yes"}]})",
       "param_groups.0.frozen", "true or false"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.section);
    const Error error = usage_error([&] { return load(c.section); });
    EXPECT_EQ(error.where(), directory_ + "/over.json: optimizer." + c.path) << error.what();
    EXPECT_HAS(error.what(), c.message);
  }
  const Error typo = usage_error([&] { return load(R"({"type": "AdamW", "params": {"momentun": 0.9}})"); });
  EXPECT_HAS_NOT(typo.hint(), "momentum?");
}

TEST_F(OptimizerSection, StateAndPrecisionMustAgree) {
  const auto fails = [&](const std::string& overlay, const Strings& sets, const std::string& where,
                         const std::string& message) {
    const Error error = usage_error([&] { return load_over(overlay, sets); });
    EXPECT_EQ(error.where(), where) << error.what();
    EXPECT_HAS(error.what(), message);
  };
  const std::string over = directory_ + "/over.json: ";
  fails(R"({"optimizer": {"type": "AdamW", "state": "split"}, "fp16": {"enabled": true}})", {},
        over + "optimizer.state", "optimizer.state split cannot be combined with arithmetic fp16");
  for (const char* state : {"split", "bf16", "int8"}) {
    fails(R"({"optimizer": {"type": "AdamW"}, "fp64": {"enabled": true}})",
          {std::string("optimizer.state=") + state}, "--set: optimizer.state",
          "with fp64 all of the state is fp64");
  }
  for (const char* state : {"fp32", "split", "int8"}) {
    const std::string set = std::string("optimizer.state=") + state;
    const std::string conflict =
        fmt::format("asks for moments in bf16, but optimizer.state is text \"{}\"", state);
    fails(
        R"({"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": false}}, "bf16": {"enabled": true}})",
        {set}, over + "optimizer.params.fp32_optimizer_states", conflict);
    fails(R"({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": true, "bf16_optimizer_states": true}})",
          {set}, over + "bf16.bf16_optimizer_states", conflict);
  }
}

// ---- the share that is updated on the host

TEST_F(OptimizerSection, Ratio) {
  const auto load_ratio = [&](const std::string& entry, const Strings& sets = {}) {
    return load_over(
        R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", )" + entry + "}}}",
        sets);
  };
  const RunConfig run = load_ratio(R"("ratio": 0.75)");
  EXPECT_DOUBLE_EQ(run.host_update_share, 0.75);
  EXPECT_EQ(run.warnings, Strings{});
  EXPECT_EQ(load_ratio(R"("ratio": 1.0)").warnings, Strings{});
  EXPECT_DOUBLE_EQ(load_ratio(R"("ratio": 0)").host_update_share, 0);
  EXPECT_DOUBLE_EQ(load_ratio(R"("ratio": "auto")").host_update_share, 1);
  EXPECT_DOUBLE_EQ(load_set({}).host_update_share, 1);
  const RunConfig none = load_ratio(R"("ratio": 0.5)", {"zero_optimization.offload_optimizer.device=none"});
  EXPECT_DOUBLE_EQ(none.host_update_share, 1);
  EXPECT_TRUE(warns(none, "offload_optimizer.ratio: has no effect: everything is updated on the device"));
  const RunConfig stage2 = load_ratio(R"("ratio": 0.5)", {"zero_optimization.stage=2"});
  EXPECT_DOUBLE_EQ(stage2.host_update_share, 1);
  EXPECT_TRUE(
      warns(stage2, "offload_optimizer.ratio: has no effect: as in DeepSpeed, it counts with stage 3"));
  for (const char* bad : {R"("ratio": 1.5)", R"("ratio": -0.1)", R"("ratio": "half")"}) {
    const Error error = usage_error([&] { return load_ratio(bad); });
    EXPECT_EQ(error.where(), directory_ + "/over.json: zero_optimization.offload_optimizer.ratio");
    EXPECT_HAS(error.message(), "a number from 0 to 1");
  }
}

// ---- fp16

class Fp16Section : public ConfigTest {};

TEST_F(Fp16Section, DefaultsAreDeepSpeeds) {
  const RunConfig run = load_over(R"({"fp16": {"enabled": true}})");
  EXPECT_EQ(run.dtype, DType::kF16);
  EXPECT_EQ(run.gradient_dtype, DType::kF16);
  EXPECT_DOUBLE_EQ(run.loss_scale.loss_scale, 0) << "dynamic";
  EXPECT_EQ(run.loss_scale.initial_scale_power, 16);
  EXPECT_EQ(run.loss_scale.loss_scale_window, 1000);
  EXPECT_EQ(run.loss_scale.hysteresis, 2);
  EXPECT_FALSE(run.loss_scale.consecutive_hysteresis);
  EXPECT_DOUBLE_EQ(run.loss_scale.min_loss_scale, 1);
  EXPECT_EQ(run.warnings, Strings{});
}

TEST_F(Fp16Section, EveryKeyIsTaken) {
  const RunConfig run = load_over(R"({"fp16": {"enabled": true, "auto_cast": false, "loss_scale": 0,
      "initial_scale_power": 32, "loss_scale_window": 50, "hysteresis": 3, "consecutive_hysteresis": true,
      "min_loss_scale": 0.5, "fp16_master_weights_and_grads": false}, "communication_data_type": "fp16"})");
  EXPECT_EQ(run.loss_scale.initial_scale_power, 32);
  EXPECT_EQ(run.loss_scale.loss_scale_window, 50);
  EXPECT_EQ(run.loss_scale.hysteresis, 3);
  EXPECT_TRUE(run.loss_scale.consecutive_hysteresis);
  EXPECT_DOUBLE_EQ(run.loss_scale.min_loss_scale, 0.5);
  EXPECT_EQ(run.gradient_dtype, DType::kF16);
  EXPECT_EQ(run.warnings, Strings{});
  EXPECT_DOUBLE_EQ(load_over(R"({"fp16": {"enabled": true, "loss_scale": 128}})").loss_scale.loss_scale, 128);
  EXPECT_EQ(load_over(R"({"fp16": {"enabled": true}, "communication_data_type": "fp32"})").gradient_dtype,
            DType::kF32);
  EXPECT_EQ(load_over(R"({"fp16": {"enabled": true}, "communication_data_type": "bf16"})").gradient_dtype,
            DType::kBF16);
  EXPECT_TRUE(warns(load_over(R"({"fp16": {"enabled": true, "auto_cast": true}})"),
                    "fp16.auto_cast: has no effect: the inputs are tokens"));
  EXPECT_EQ(load_set({"fp16.enabled=true"}).dtype, DType::kF16);
}

TEST_F(Fp16Section, AutoPrefersBf16) {
  const RunConfig alone = load_over(R"({"fp16": {"enabled": "auto"}})");
  EXPECT_EQ(alone.dtype, DType::kF32);
  EXPECT_TRUE(warns(alone, "fp16.enabled: \"auto\": took false"));
  const RunConfig both = load_over(R"({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})");
  EXPECT_EQ(both.dtype, DType::kF32) << "this machine_ has no bf16 instructions";
  // Asked for by name, fp16 is meant.
  const RunConfig named = load_over(R"({"fp16": {"enabled": true}, "bf16": {"enabled": "auto"}})");
  EXPECT_EQ(named.dtype, DType::kF16);
  EXPECT_TRUE(warns(named, "bf16.enabled: \"auto\": took false, fp16 is enabled"));
}

// ---- OneCycle, which moves betas

TEST_F(OptimizerSection, OneCycleMovesNoBetasOfSgd) {
  const std::string cycle =
      R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1}})";
  EXPECT_TRUE(
      warns(load_over(R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, )" + cycle + "}"),
            "cycle_momentum moves beta1, which SGD has not"));
  const RunConfig lion = load_over(
      R"({"optimizer": {"type": "Lion", "params": {"lr": 1, "betas": [0.9, 0.99]}}, )" + cycle + "}");
  EXPECT_EQ(lion.warnings, Strings{}) << "beta2 is the one that DeepSpeed sets";
}

}  // namespace
}  // namespace zg
