// config.json and the "model" section: what is taken, what is refused, and in which words.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "model/hf_files.hpp"

namespace zg {
namespace {

using nlohmann::json;
using test::TempDir;
using test::thrown_by;

// As OpenAI's repository has it.
const char* const kGpt2 = R"({
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
  "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "summary_type": "cls_index", "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257})";

const char* const kLlama = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
  "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
  "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.35.0", "use_cache": true,
  "vocab_size": 32000})";

class HfConfigTest : public ::testing::Test {
 protected:
  ModelConfig read(const std::string& text) {
    test::write_file(dir_ / "config.json", text);
    return read_hf_config(dir_.path());
  }
  TempDir dir_;
};

void expect_equal(const ModelConfig& a, const ModelConfig& b) {
  EXPECT_EQ(a.arch, b.arch);
  EXPECT_EQ(a.vocab_size, b.vocab_size);
  EXPECT_EQ(a.context, b.context);
  EXPECT_EQ(a.width, b.width);
  EXPECT_EQ(a.layers, b.layers);
  EXPECT_EQ(a.heads, b.heads);
  EXPECT_EQ(a.kv_heads, b.kv_heads);
  EXPECT_EQ(a.head_size, b.head_size);
  EXPECT_EQ(a.inner, b.inner);
  EXPECT_EQ(a.norm_eps, b.norm_eps);
  if (a.arch == Arch::kLlama) {
    EXPECT_EQ(a.block.rope.theta, b.block.rope.theta);
  }
  EXPECT_EQ(a.init_std, b.init_std);
  EXPECT_EQ(a.tied, b.tied);
}

TEST_F(HfConfigTest, ReadsGpt2) {
  ModelConfig expected;
  expected.arch = Arch::kGpt2;
  expected.vocab_size = 50257, expected.context = 1024, expected.width = 768, expected.layers = 12;
  expected.heads = 12, expected.kv_heads = 12, expected.head_size = 64, expected.inner = 3072;
  expected.norm_eps = 1e-5, expected.init_std = 0.02, expected.tied = true;
  expect_equal(read(kGpt2), expected);
  // Without model_type the architecture decides; n_ctx stands for n_positions; null counts as absent.
  json other = json::parse(kGpt2);
  other.erase("model_type");
  other.erase("n_positions");
  other["n_inner"] = nullptr;
  expect_equal(read(other.dump()), expected);
  other["n_inner"] = 1000;
  other["tie_word_embeddings"] = false;
  other["activation_function"] = "gelu_pytorch_tanh";
  other["scale_attn_by_inverse_layer_idx"] = false;
  expected.inner = 1000;
  expected.tied = false;
  expect_equal(read(other.dump()), expected);
}

TEST_F(HfConfigTest, ReadsLlama) {
  ModelConfig expected;
  expected.arch = Arch::kLlama;
  expected.vocab_size = 32000, expected.context = 2048, expected.width = 2048, expected.layers = 22;
  expected.heads = 32, expected.kv_heads = 4, expected.head_size = 64, expected.inner = 5632;
  expected.norm_eps = 1e-5, expected.block.rope.theta = 10000, expected.init_std = 0.02, expected.tied = false;
  expect_equal(read(kLlama), expected);
  // What the library assumes when a key is absent.
  json other = json::parse(kLlama);
  for (const char* key :
       {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act"}) {
    other.erase(key);
  }
  expected.kv_heads = 32, expected.norm_eps = 1e-6;
  expect_equal(read(other.dump()), expected);
  other["head_dim"] = 128;
  other["rope_scaling"] = {{"rope_type", "default"}};
  other["rope_theta"] = 500000;
  expected.head_size = 128, expected.block.rope.theta = 500000;
  expect_equal(read(other.dump()), expected);
  other.erase("rope_theta");
  other.erase("rope_scaling");
  other["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};  // as newer versions write it
  expected.block.rope.theta = 1e6;
  expect_equal(read(other.dump()), expected);
}

TEST_F(HfConfigTest, WhatIsWrittenIsReadAgain) {
  for (ModelConfig c :
       {test::tiny_gpt2(), test::tiny_gpt2(false), test::tiny_llama(), test::tiny_llama(true)}) {
    c.norm_eps = 1.2345678901234567e-5;
    c.init_std = 0.1 + 0.2;  // needs all 17 digits
    const std::string text = write_hf_config(c, DType::kBF16);
    expect_equal(read(text), c);
    const json parsed = json::parse(text);
    EXPECT_EQ(parsed["torch_dtype"], "bfloat16");
    EXPECT_EQ(parsed["architectures"][0], c.arch == Arch::kGpt2 ? "GPT2LMHeadModel" : "LlamaForCausalLM");
    EXPECT_EQ(parsed["model_type"], c.arch == Arch::kGpt2 ? "gpt2" : "llama");
  }
}

// A run has its own rates: those of a file are told, and those of the run are written.
TEST_F(HfConfigTest, DropoutIsToldAndWritten) {
  EXPECT_EQ(read(kGpt2).dropout, DropoutRates{});
  EXPECT_EQ(read_hf_dropout(dir_.path()), "embd_pdrop 0.1, resid_pdrop 0.1, attn_pdrop 0.1");
  ModelConfig c = test::tiny_gpt2();
  const auto written = [&] {
    test::write_file(dir_ / "config.json", write_hf_config(c, DType::kF32));
    return read_hf_dropout(dir_.path());
  };
  EXPECT_EQ(written(), "");
  EXPECT_EQ(json::parse(write_hf_config(c, DType::kF32))["resid_pdrop"], 0.0);
  c.dropout = {.embedding = 0.25, .residual = 0.125};
  EXPECT_EQ(written(), "embd_pdrop 0.25, resid_pdrop 0.125");
  (void)read(kLlama);
  EXPECT_EQ(read_hf_dropout(dir_.path()), "");
}

struct Refusal {
  const char* base;
  const char* patch;  // merged into the base; null removes a key
  const char* told;   // part of the message
};

TEST_F(HfConfigTest, RefusesAndSaysWhy) {
  const Refusal table[] = {
      {kGpt2, R"({"vocab_size": null})", "\"vocab_size\" is missing"},
      {kGpt2, R"({"n_embd": null})", "\"n_embd\" is missing"},
      {kGpt2, R"({"n_positions": null, "n_ctx": null})", "\"n_positions\" is missing"},
      {kGpt2, R"({"n_layer": 0})", "\"n_layer\" is 0"},
      {kGpt2, R"({"n_layer": 1000000})", "from 1 to 65536"},
      {kGpt2, R"({"n_layer": "12"})", "\"n_layer\" is \"12\""},
      {kGpt2, R"({"n_embd": -768})", "\"n_embd\" is -768"},
      {kGpt2, R"({"n_embd": 768.0})", "\"n_embd\" is 768.0"},
      {kGpt2, R"({"n_embd": 18446744073709551615})", "\"n_embd\" is 18446744073709551615"},
      {kGpt2, R"({"n_embd": 770})", "770 is no multiple of \"n_head\" 12"},
      {kGpt2, R"({"n_inner": []})", "\"n_inner\" is []"},
      {kGpt2, R"({"layer_norm_epsilon": 0})", "\"layer_norm_epsilon\" is 0"},
      {kGpt2, R"({"layer_norm_epsilon": "small"})", "a number > 0"},
      {kGpt2, R"({"tie_word_embeddings": 1})", "true or false"},
      {kGpt2, R"({"activation_function": "gelu"})", "\"activation_function\" is \"gelu\"; only gelu_new"},
      {kGpt2, R"({"activation_function": 3})", "a text"},
      {kGpt2, R"({"scale_attn_by_inverse_layer_idx": true})", "only false is supported"},
      {kGpt2, R"({"reorder_and_upcast_attn": true})", "only false is supported"},
      {kGpt2, R"({"scale_attn_weights": false})", "only true is supported"},
      {kGpt2, R"({"add_cross_attention": true})", "only false is supported"},
      {kGpt2, R"({"quantization_config": {"bits": 4}})", "\"quantization_config\" is {\"bits\":4}"},
      {kGpt2, R"({"model_type": "gpt_neo"})", "the architecture is \"gpt_neo\""},
      {kGpt2, R"({"model_type": null, "architectures": ["MistralForCausalLM"]})", "\"MistralForCausalLM\""},
      {kGpt2, R"({"model_type": null, "architectures": []})", "a list of names"},
      {kGpt2, R"({"model_type": null, "architectures": null})",
       "neither \"model_type\" nor \"architectures\""},
      {kLlama, R"({"hidden_size": null})", "\"hidden_size\" is missing"},
      {kLlama, R"({"intermediate_size": null})", "\"intermediate_size\" is missing"},
      {kLlama, R"({"num_key_value_heads": 5})", "32 is no multiple of \"num_key_value_heads\" 5"},
      {kLlama, R"({"num_attention_heads": 28})", "2048 is no multiple of \"num_attention_heads\" 28"},
      {kLlama, R"({"head_dim": 63})", "even"},
      {kLlama, R"({"hidden_act": "gelu"})", "only silu"},
      {kLlama, R"({"attention_bias": true})", "\"attention_bias\" is true"},
      {kLlama, R"({"mlp_bias": true})", "\"mlp_bias\" is true"},
      {kLlama, R"({"rope_theta": -1})", "\"rope_theta\" is -1"},
      {kLlama, R"({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})", "rope_type \"default\""},
      {kLlama, R"({"rope_scaling": {"type": "linear", "factor": 2.0}})", "rope_type \"default\""},
      {kLlama, R"({"rope_scaling": {"factor": 2.0}})", "rope_type \"default\""},
      {kLlama, R"({"rope_scaling": 2.0})", "null or an object"},
      {kLlama, R"({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})", "rope_type \"default\""},
      {kLlama, R"({"rope_parameters": {"rope_theta": 0}})", "\"rope_theta\" is 0"},
      {kLlama, R"({"partial_rotary_factor": 0.5})", "only 1 is supported"},
  };
  for (const Refusal& r : table) {
    json config = json::parse(r.base);
    config.merge_patch(json::parse(r.patch));
    const auto error = thrown_by([&] { read(config.dump()); });
    ASSERT_TRUE(error.has_value()) << r.patch << " was accepted";
    EXPECT_EQ(error->code(), Errc::kUsage) << r.patch;
    EXPECT_HAS(error->where(), "config.json") << r.patch;
    EXPECT_HAS(error->message(), r.told) << r.patch << ": " << error->message();
    EXPECT_FALSE(error->hint().empty()) << r.patch;
  }
}

TEST_F(HfConfigTest, RefusesWhatIsNoConfiguration) {
  const auto absent = thrown_by([&] { read_hf_config(dir_ / "nowhere"); });
  EXPECT_HAS(absent->where(), "nowhere/config.json");
  const std::pair<std::string, const char*> table[] = {
      {"", "not valid JSON"},
      {"{\"model_type\":", "not valid JSON"},
      {"[1]", "no object"},
      {"{\"model_type\":\"gpt2\",\"model_type\":\"llama\"}", "\"model_type\" appears twice"},
      {"{\"a\":{\"b\":1,\"b\":2}}", "\"b\" appears twice"},
      {std::string("{}\0{}", 5), "zero byte"},
      {"{\"a\":" + std::string(100000, '['), "nested deeper"},
  };
  for (const auto& [text, told] : table) {
    const auto error = thrown_by([&, content = text] { read(content); });
    ASSERT_TRUE(error.has_value()) << told;
    EXPECT_EQ(error->code(), Errc::kUsage);
    EXPECT_HAS(error->message(), told);
  }
}

TEST(ModelSection, TakesTheSameKeysAndNoOthers) {
  const ModelConfig gpt2 = parse_model_config(
      R"({"arch": "gpt2", "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4})", "run.json: model");
  EXPECT_EQ(gpt2.arch, Arch::kGpt2);
  EXPECT_EQ(gpt2.vocab_size, 0);  // left to the tokenizer
  EXPECT_EQ(gpt2.inner, 192);
  EXPECT_TRUE(gpt2.tied);
  const ModelConfig llama = parse_model_config(
      R"({"arch": "llama", "vocab_size": 99, "max_position_embeddings": 64, "hidden_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "intermediate_size": 100, "initializer_range": 0})",
      "run.json: model");
  EXPECT_EQ(llama.vocab_size, 99);
  EXPECT_EQ(llama.head_size, 12);
  EXPECT_EQ(llama.init_std, 0);
  EXPECT_FALSE(llama.tied);

  struct Case {
    const char *text, *told, *hint;
  };
  const Case table[] = {
      {R"({"n_embd": 48})", "\"arch\" is missing", "\"gpt2\" or \"llama\""},
      {R"({"arch": "bert"})", "\"arch\" is \"bert\"", ""},
      {R"({"arch": "gpt2", "n_layers": 3})", "unknown key \"n_layers\" for gpt2",
       "did you mean \"n_layer\"?"},
      {R"({"arch": "llama", "hiden_size": 3})", "unknown key \"hiden_size\" for llama", "\"hidden_size\""},
      {R"({"arch": "gpt2", "attn_pdrop": 0.1})", "unknown key \"attn_pdrop\"", ""},
      {R"({"arch": "gpt2", "quite_another_thing_altogether": 1})", "unknown key",
       "known for gpt2: arch vocab_size"},
      {R"({"arch": "gpt2", "n_positions": 64, "n_ctx": 32, "n_embd": 48, "n_layer": 3, "n_head": 4})",
       "\"n_ctx\" is 32", ""},
      {R"({"arch": "gpt2", "vocab_size": 0})", "\"vocab_size\" is 0", ""},
      {R"({"arch": "gpt2", "n_embd": 48})", "\"n_positions\" is missing", "add \"n_positions\""},
  };
  for (const Case& c : table) {
    const auto error = thrown_by([&] { parse_model_config(c.text, "run.json: model"); });
    ASSERT_TRUE(error.has_value()) << c.text;
    EXPECT_EQ(error->code(), Errc::kUsage);
    EXPECT_EQ(error->where(), "run.json: model");
    EXPECT_HAS(error->message(), c.told);
    EXPECT_HAS(error->hint(), c.hint);
  }
}

}  // namespace
}  // namespace zg
