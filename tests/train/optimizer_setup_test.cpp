// What the engine is told of an optimizer's configuration.
#include "train/optimizer_setup.hpp"

#include "config/config_fixture.hpp"

namespace zg {
namespace {

class OptimizerSetup : public ConfigTest {
 protected:
  using ConfigTest::load;
  // The base with this "optimizer" section (and whatever follows it).
  RunConfig load(const std::string& section, const Strings& overrides = {}) const {
    return load_over("{\"optimizer\": " + section + "}", overrides);
  }
  OptimizerConfig optimizer(const std::string& section) const { return load(section).optimizer; }
};

TEST_F(OptimizerSetup, NamesInAnyCase) {
  const auto name = [&](const char* type) {
    return std::string(optimizer_name(optimizer(fmt::format(R"({{"type": "{}"}})", type))));
  };
  for (const char* type : {"AdamW", "adamw", "ADAM"}) EXPECT_EQ(name(type), "AdamW") << type;
  for (const char* type : {"sgd", "SGD"}) EXPECT_EQ(name(type), "SGD") << type;
  for (const char* type : {"Lion", "lion"}) EXPECT_EQ(name(type), "Lion") << type;
  EXPECT_STREQ(optimizer_name(optimizer(R"({"type": "adam", "params": {"adam_w_mode": false}})")), "Adam");
}

TEST_F(OptimizerSetup, WhatTheUpdateIsTold) {
  const RunConfig run = load(R"({"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9, "nesterov": true}})");
  const UpdateParams params = update_rule(run, 6).params;
  EXPECT_EQ(params.step, 7);
  EXPECT_DOUBLE_EQ(params.lr, 0.5);
  EXPECT_DOUBLE_EQ(params.momentum, 0.9);
  EXPECT_DOUBLE_EQ(params.dampening, 0);
  EXPECT_TRUE(params.nesterov);
}

TEST_F(OptimizerSetup, StateFormats) {
  struct Case {
    const char* section;
    DType weights;
    MasterFormat master;
    MomentFormat moments;
    int count;
  };
  const Case cases[] = {
      {R"({"type": "AdamW"})", DType::kBF16, MasterFormat::kFull, MomentFormat::kFull, 2},
      {R"({"type": "AdamW", "state": "fp32"})", DType::kBF16, MasterFormat::kFull, MomentFormat::kFull, 2},
      {R"({"type": "AdamW", "state": "split"})", DType::kBF16, MasterFormat::kSplit, MomentFormat::kFull, 2},
      {R"({"type": "AdamW", "state": "bf16"})", DType::kBF16, MasterFormat::kSplit, MomentFormat::kBf16, 2},
      {R"({"type": "AdamW", "state": "int8"})", DType::kBF16, MasterFormat::kSplit, MomentFormat::kInt8, 2},
      {R"({"type": "AdamW", "state": "bf16"})", DType::kF32, MasterFormat::kFull, MomentFormat::kBf16, 2},
      {R"({"type": "AdamW", "state": "int8"})", DType::kF16, MasterFormat::kFull, MomentFormat::kInt8, 2},
      {R"({"type": "Lion", "state": "int8"})", DType::kBF16, MasterFormat::kSplit, MomentFormat::kInt8, 1},
      {R"({"type": "SGD", "state": "split"})", DType::kBF16, MasterFormat::kSplit, MomentFormat::kFull, 0},
      {R"({"type": "SGD", "state": "bf16", "params": {"momentum": 0.9}})", DType::kF32, MasterFormat::kFull,
       MomentFormat::kBf16, 1},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(fmt::format("{} {}", c.section, name_of(c.weights)));
    Strings sets;
    if (c.weights == DType::kBF16) sets = {"bf16.enabled=true"};
    if (c.weights == DType::kF16) sets = {"fp16.enabled=true"};
    const RunConfig run = load(c.section, sets);
    ASSERT_EQ(run.dtype, c.weights);
    const StateFormat format = state_format(run.optimizer, run.dtype);
    EXPECT_EQ(format.kind, run.optimizer.kind);
    EXPECT_EQ(format.master, c.master);
    EXPECT_EQ(format.moments, c.moments);
    EXPECT_EQ(format.moment_count, c.count);
  }
}

// The rule has one more group: of what no group matches.
TEST_F(OptimizerSetup, GroupsOfTheRule) {
  const RunConfig run = load(R"({"type": "AdamW", "params": {"weight_decay": 0.1}, "param_groups": [
      {"params": "wte.*", "weight_decay": 0},
      {"params": ["*.bias", "ln_?.weight"], "lr_factor": 2, "weight_decay": 0.5},
      {"params": "h.0.*", "frozen": true},
      {"params": "h.1.*", "frozen": false, "lr_factor": 0.5}]})");
  const UpdateRule rule = update_rule(run, 0);
  ASSERT_EQ(rule.groups.size(), 5u);
  EXPECT_DOUBLE_EQ(rule.groups[0].lr_factor, 1);
  EXPECT_EQ(rule.groups[0].weight_decay, std::nullopt);
  EXPECT_EQ(rule.groups[1].weight_decay, 0.0);
  EXPECT_DOUBLE_EQ(rule.groups[2].lr_factor, 2);
  EXPECT_DOUBLE_EQ(rule.groups[4].lr_factor, 0.5);
}

// ---- groups and the names of a model

class Groups : public OptimizerSetup {
 protected:
  Groups() : run_(load_set({})), model_(with_vocabulary(*run_.model), DType::kF32, host_ops()) {}
  static ModelConfig with_vocabulary(ModelConfig config) {
    config.vocab_size = 64;
    return config;
  }
  std::vector<std::vector<int>> groups(const std::string& list) const {
    return parameter_groups(optimizer(R"({"type": "AdamW", "param_groups": )" + list + "}"), model_);
  }
  // The group of the parameter with this name.
  int group_of(const std::vector<std::vector<int>>& groups, const std::string& name) const {
    EXPECT_EQ(groups.size(), model_.units().size());
    for (std::size_t u = 0; u < groups.size(); ++u) {
      const std::vector<Param>& params = model_.units()[u].params;
      EXPECT_EQ(groups[u].size(), params.size());
      for (std::size_t i = 0; i < params.size(); ++i) {
        if (params[i].name == name) return groups[u][i];
      }
    }
    ADD_FAILURE() << "no parameter " << name;
    return -2;
  }

  RunConfig run_;
  Model model_;
};

TEST_F(Groups, TheFirstThatMatchesHolds) {
  const auto g = groups(R"([{"params": "h.0.*.bias", "lr_factor": 3},
                            {"params": ["h.0.*", "wpe.weight"], "frozen": true},
                            {"params": "*.bias", "weight_decay": 0.1}])");
  EXPECT_EQ(group_of(g, "h.0.attn.c_attn.bias"), 1);
  EXPECT_EQ(group_of(g, "h.0.attn.c_attn.weight"), kFrozen);
  EXPECT_EQ(group_of(g, "wpe.weight"), kFrozen);
  EXPECT_EQ(group_of(g, "h.1.attn.c_attn.bias"), 3);
  EXPECT_EQ(group_of(g, "ln_f.bias"), 3);
  EXPECT_EQ(group_of(g, "h.1.attn.c_attn.weight"), 0);
  EXPECT_EQ(group_of(g, "wte.weight"), 0);
  EXPECT_TRUE(groups("[]").empty());
  const auto one = groups(R"([{"params": "h.?.ln_1.weight", "lr_factor": 3}])");
  EXPECT_EQ(group_of(one, "h.1.ln_1.weight"), 1);
  EXPECT_EQ(group_of(one, "h.1.ln_2.weight"), 0);
}

TEST_F(Groups, WhatHoldsForNothingIsAnError) {
  struct Case {
    const char* list;
    const char* where;
    const char* message;
  };
  const Case cases[] = {
      {R"([{"params": "*.bias", "lr_factor": 2}, {"params": ["wte.*", "transformer.wpe.*"], "frozen": true}])",
       "optimizer.param_groups.1.params", "\"transformer.wpe.*\" matches no parameter"},
      {R"([{"params": "attn", "lr_factor": 2}])", "optimizer.param_groups.0.params",
       "e.g. \"h.0.ln_1.weight\""},
      {R"([{"params": "*", "lr_factor": 2}, {"params": "*.bias", "frozen": true}])",
       "optimizer.param_groups.1.params", "earlier groups have taken"},
      {R"([{"params": "*", "frozen": true}])", "optimizer.param_groups", "every parameter is frozen"},
      {R"([{"params": "h.*", "frozen": true}, {"params": ["w*", "ln_f.*"], "frozen": true}])",
       "optimizer.param_groups", "nothing to train"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.list);
    const Error error = usage_error([&] { return groups(c.list); });
    EXPECT_EQ(error.where(), c.where);
    EXPECT_HAS(error.what(), c.message);
  }
}

TEST_F(OptimizerSetup, PatternsOfTheExampleOfASmallStateMatchItsModel) {
  const RunConfig run = load(ConfigSource{{shipped("gpt2-124m-small-state.json")}, {}});
  const Model model(*run.model, run.dtype, host_ops());
  const std::vector<std::vector<int>> groups = parameter_groups(run.optimizer, model);
  EXPECT_EQ(groups.front(), (std::vector<int>{kFrozen, kFrozen}));
  EXPECT_EQ(groups.back(), (std::vector<int>{2, 2}));  // the last norm
}

}  // namespace
}  // namespace zg
