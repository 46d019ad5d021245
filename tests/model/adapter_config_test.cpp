// Which modules an adapter_config.json means, beside PEFT (tests/reference/lora/targets.json), and what of it
// is refused.
#include "model/adapter_config.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <tuple>

#include "model/adapters.hpp"
#include "model/hf_files.hpp"
#include "model/name_pattern.hpp"
#include "support/errors.hpp"
#include "support/families.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg::test {
namespace {

using nlohmann::json;

ModelConfig model_of(const std::string& family) {
  const bool experts = family.starts_with("qwen2_moe");
  ModelConfig c = family == "gpt2" ? tiny_gpt2() : experts ? FamilyFile("qwen2_moe").config() : tiny_llama();
  c.layers = 4;
  if (experts) c.experts.count = 3, c.experts.dense = {true, false, true, false};
  return c;
}

std::string config_text(const json& keys) {
  json config = {{"peft_type", "LORA"}, {"r", 2}, {"lora_alpha", 2}};
  config.merge_patch(keys);
  return config.dump();
}

std::vector<std::string> modules_of(const hf::AdapterConfig& config, const ModelConfig& model) {
  using enum model::AdapterList::Which;
  std::vector<std::string> names;
  const model::AdapterList expert = model::AdapterList::of_expert(model, kAll);
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const auto add = [&](LoraModule module, const std::string& path) {
      if (!config.has(layer, module)) return;
      names.push_back(
          fmt::format("{}.{}.{}", model.arch == Arch::kGpt2 ? "transformer.h" : "model.layers", layer, path));
    };
    const model::AdapterList list(model, layer, kAll);
    for (const model::Adapter& one : list.all()) add(one.module, one.path());
    for (const model::Adapter& one : expert.all()) {
      if ((bit_of(one.module) & kExpertParameters) != 0) {
        add(one.module, "mlp.experts." + one.path());
        continue;
      }
      for (std::int64_t e = 0; model.has_experts(layer) && e < model.experts.count; ++e)
        add(one.module, fmt::format("mlp.experts.{}.{}", e, one.path()));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(AdapterTargets, AreThoseOfPeft) {
  const json reference = json::parse(read_file(test::in_source("tests/reference/lora/targets.json")));
  int refused = 0;
  for (const json& one : reference.at("cases")) {
    SCOPED_TRACE(one.dump());
    const ModelConfig model = model_of(one.at("model"));
    hf::AdapterConfig config;
    const auto error =
        thrown_by([&] { config = hf::parse_adapters(config_text(one.at("keys")), "here", model); });
    EXPECT_EQ(error.has_value(), one.at("modules").is_null()) << (error ? error->what() : "accepted");
    if (error) {
      EXPECT_EQ(error->code(), Errc::kUsage);
      ++refused;
    } else {
      EXPECT_EQ(modules_of(config, model), one.at("modules").get<std::vector<std::string>>());
    }
  }
  EXPECT_GE(reference.at("cases").size(), 20u);
  EXPECT_GE(refused, 3);
}

TEST(AdapterTargets, AreRefusedWithOneMessage) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"target_modules": "(q_proj"})", "has a ( without its ) at character 8"},
      {R"x({"target_modules": "q_proj)"})x", "has a ) without its ( at character 7"},
      {R"({"target_modules": "*q_proj"})", "has a repeat of nothing"},
      {R"({"target_modules": "[q_proj"})", "has a [ without its ]"},
      {R"({"target_modules": "(q)\\1_proj"})", "has \\1, which is not supported,"},
      {R"({"target_modules": "(?i)Q_PROJ"})", "has a kind of group that is not supported"},
      {R"({"target_modules": "q{5000}"})", "has a repeat of more than 1000"},
      {R"({"target_modules": "q{3,2}"})", "least number is above its most"},
      {R"x({"target_modules": "(.*q_proj|lm_head)"})x", "it names lm_head, too, which has no adapters here"},
      {R"({"target_modules": ["q_proj", "embed_tokens"]})", "it names model.embed_tokens, too"},
      {R"({"target_modules": ["q_proj", 3]})", "a list of names of modules"},
      {R"({"target_modules": {"q_proj": 1}})", "a list of names of modules, or a pattern"},
      {R"({"target_modules": null})", "\"target_modules\" is nothing"},
      {R"({"target_modules": ["q_proj"], "layers_to_transform": [4]})", "whole numbers below 4"},
      {R"({"target_modules": ["q_proj"], "layers_to_transform": -1})", "whole numbers below 4"},
      {R"({"target_modules": ["q_proj"], "layers_to_transform": 1.5})", "whole numbers below 4"},
      {R"({"target_modules": ["q_proj"], "layers_to_transform": 18446744073709551615})",
       "whole numbers below 4"},
      {R"({"target_modules": ["q_proj"], "layers_pattern": "layers"})",
       "nothing without \"layers_to_transform\""},
      {R"({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]})", "expected names among q_proj"},
      {R"({"target_modules": ["q_proj"], "exclude_modules": "(("})", "\"exclude_modules\" is \"((\""},
      {R"({"target_modules": ["q_proj"], "r": 1e300})", "\"r\" is 1e+300"},
      {R"({"target_modules": ["q_proj"], "r": -1})", "\"r\" is -1"},
      {R"({"target_modules": ["q_proj"], "lora_alpha": 1e300})", "a number above 0 that fp32 holds"},
      {R"({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]})",
       "expected nothing: llama has no parameters that hold all experts of a layer"},
  };
  const std::pair<const char*, const char*> of_experts[] = {
      {R"({"target_modules": ["experts.0.up_proj", "experts.2.up_proj"]})",
       "expected the up_proj of all experts of layer 1, or of none: of experts 0 and 1 it names one"},
      {R"({"target_modules": ["up_proj", "gate"]})", "it names model.layers.1.mlp.gate, too"},
      {R"({"target_modules": ["shared_expert_gate"]})",
       "it names model.layers.1.mlp.shared_expert_gate, too"},
      {R"({"target_modules": ["proj"]})",
       "expected names among q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, "
       "shared_expert.gate_proj, shared_expert.up_proj, shared_expert.down_proj, experts.*.gate_proj, "
       "experts.*.up_proj and experts.*.down_proj, the modules of qwen2_moe"},
      {R"({"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]})",
       "expected a list of names among mlp.experts.gate_up_proj and mlp.experts.down_proj"},
      {R"({"target_modules": [], "target_parameters": "mlp.experts.down_proj"})", "expected a list of names"},
      {R"({"target_parameters": ["down_proj"], "lora_dropout": 0.1})",
       "\"lora_dropout\" is 0.1, expected 0, as \"target_parameters\" ask for"},
  };
  std::vector<std::tuple<const char*, const char*, const char*>> all;
  for (const auto& [keys, told] : cases) all.emplace_back("llama", keys, told);
  for (const auto& [keys, told] : of_experts) all.emplace_back("qwen2_moe", keys, told);
  for (const auto& [family, keys, told] : all) {
    const auto error = thrown_by([&, text = keys, name = family] {
      (void)hf::parse_adapters(config_text(json::parse(text)), "here", model_of(name));
    });
    ASSERT_TRUE(error.has_value()) << keys;
    EXPECT_EQ(error->code(), Errc::kUsage) << keys;
    EXPECT_EQ(error->where(), "here");
    EXPECT_HAS(error->message(), told) << keys;
  }
}

TEST(NamePattern, MatchesWholeNamesAsPythonDoes) {
  const auto matches = [](const char* pattern, const char* name) {
    return hf::NamePattern(pattern).matches(name);
  };
  EXPECT_TRUE(matches("a{2,3}", "aaa") && matches("a{2}", "aa") && matches("a{,2}", "") &&
              matches("a{1,}", "aaaa"));
  EXPECT_FALSE(matches("a{2,3}", "a") || matches("a{2,3}", "aaaa") || matches("a{,2}", "aaa"));
  EXPECT_TRUE(matches("a{x}", "a{x}"));  // no repeat: a text
  EXPECT_TRUE(matches("[]a-c-]+", "a]b-c") && matches("[^a]", "b") && matches("[\\d.]+", "1.5"));
  EXPECT_FALSE(matches("[^a]", "a") || matches("[a-c]", "d"));
  EXPECT_TRUE(matches("(?P<x>a|b)*?c", "abac") && matches("a|", "") && matches("(a*)*b", "aaab"));
  EXPECT_TRUE(matches("\\ba\\b\\.\\bb", "a.b") && matches("a\\Bb", "ab") && matches("^a$", "a"));
  EXPECT_FALSE(matches("a\\bb", "ab") || matches("a", "ab") || matches("b", "ab"));
  EXPECT_TRUE(matches("(?=a.)\\w\\w", "ab") && matches("a(?!c)\\w", "ab") && matches(".*(?<=a)b", "xab"));
  EXPECT_FALSE(matches("a(?!b)\\w", "ab") || matches(".*(?<!a)b", "xab"));
}

// Expressions that make others go back for ever, or nest without an end.
TEST(NamePattern, TakesABoundedNumberOfSteps) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string name(60, 'a');
  EXPECT_FALSE(hf::NamePattern("(a*)*(a*)*(a|aa)+b").matches(name));
  std::string optional;
  for (int i = 0; i < 400; ++i) optional += "(?:a?)?";
  EXPECT_TRUE(hf::NamePattern(optional).matches(name));
  std::string nested = "a?";
  for (int i = 0; i < 40; ++i) nested = "(?:(?=" + nested + ").*){1000}";
  EXPECT_THROW((void)hf::NamePattern(nested).matches(name), std::invalid_argument);
  EXPECT_THROW(hf::NamePattern(std::string(1000, '(')), std::invalid_argument);
  EXPECT_THROW(hf::NamePattern(std::string(100'000, 'a')), std::invalid_argument);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

// Adapters of some layers alone: A and B of the others are zero, and nothing is merged into them.
TEST(AdapterFiles, OfSomeLayersAreZeroInTheOthers) {
  ModelConfig config = model_of("llama");
  config.lora = {.rank = 2, .alpha = 4, .modules = bit_of(LoraModule::kQ)};
  const Model model(config, DType::kF32, host_ops());
  const TempDir dir;
  Tensors tensors;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      if (!p.adapter || p.name.find("layers.2.") == p.name.npos) continue;
      Tensor t{"F32", {p.whole_rows, p.whole_cols}, ""};
      for (std::int64_t i = 0; i < p.count(); ++i) append(t.bytes, "F32", value(p.name, i));
      tensors["base_model.model." + p.name] = t;
    }
  }
  ASSERT_EQ(tensors.size(), 2u);
  write_file(dir / "adapter_model.safetensors", safetensors_bytes(tensors));
  write_file(dir / "adapter_config.json",
             config_text({{"target_modules", {"q_proj"}}, {"lora_alpha", 4}, {"layers_to_transform", 2}}));
  const AdapterWeights weights(dir.path(), config);
  EXPECT_EQ(weights.lora(), config.lora);
  int merged = 0;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      std::vector<float> values(static_cast<std::size_t>(p.count()), 7.0f);
      if (!p.adapter) {
        merged += weights.merge(p, 0, p.count(), values.data());
        continue;
      }
      weights.read(p, 0, p.count(), values.data());
      const bool there = p.name.find("layers.2.") != p.name.npos;
      for (std::int64_t i = 0; i < p.count(); ++i)
        ASSERT_EQ(values[static_cast<std::size_t>(i)], there ? value(p.name, i) : 0) << p.name;
    }
  }
  EXPECT_EQ(merged, 1);
  // A layer that the configuration names must be there.
  write_file(dir / "adapter_config.json",
             config_text({{"target_modules", {"q_proj"}}, {"layers_to_transform", {1, 2}}}));
  EXPECT_HAS(error_of([&] { const AdapterWeights w(dir.path(), config); }).message(),
             "misses \"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight\"");
}

}  // namespace
}  // namespace zg::test
