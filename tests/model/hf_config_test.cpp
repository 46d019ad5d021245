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
  expected.norm_eps = 1e-5, expected.block.rope.theta = 10000, expected.init_std = 0.02,
  expected.tied = false;
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
      {kGpt2, R"({"activation_function": "gelu"})",
       "\"activation_function\" is \"gelu\"; only the GELU by tanh"},
      {kGpt2, R"({"activation_function": 3})", "a text"},
      {kGpt2, R"({"reorder_and_upcast_attn": true})", "only false is supported"},
      {kGpt2, R"({"scale_attn_weights": 1})", "true or false"},
      {kGpt2, R"({"n_layer": 1000000000})", "from 1 to 65536"},
      {kGpt2, R"({"n_layer": 1e9})", "\"n_layer\" is 1000000000.0"},
      {kGpt2, R"({"n_layer": -9223372036854775808})", "from 1 to 65536"},
      {kGpt2, R"({"vocab_size": 50257.5})", "\"vocab_size\" is 50257.5"},
      {kGpt2, R"({"initializer_range": -0.1})", "a number > 0"},
      {kGpt2, R"({"add_cross_attention": true})", "only false is supported"},
      {kGpt2, R"({"quantization_config": {"bits": 4}})", "has no \"quant_method\""},
      {kGpt2, R"({"model_type": "gpt_neo"})", "the architecture is \"gpt_neo\""},
      {kGpt2, R"({"model_type": null, "architectures": ["PhimoeForCausalLM"]})", "\"PhimoeForCausalLM\""},
      {kGpt2, R"({"model_type": null, "architectures": []})", "a list of names"},
      {kGpt2, R"({"model_type": null, "architectures": null})",
       "neither \"model_type\" nor \"architectures\""},
      {kLlama, R"({"hidden_size": null})", "\"hidden_size\" is missing"},
      {kLlama, R"({"intermediate_size": null})", "\"intermediate_size\" is missing"},
      {kLlama, R"({"num_key_value_heads": 5})", "32 is no multiple of \"num_key_value_heads\" 5"},
      {kLlama, R"({"num_attention_heads": 28})", "2048 is no multiple of \"num_attention_heads\" 28"},
      {kLlama, R"({"head_dim": 63})", "even"},
      {kLlama, R"({"hidden_act": "gelu"})", "only SiLU"},
      {kLlama, R"({"num_local_experts": 8})", "\"num_local_experts\" is 8; only null"},
      {kLlama, R"({"residual_multiplier": 0.22})", "\"residual_multiplier\" is 0.22"},
      {kLlama, R"({"final_logit_softcapping": 30.0})", "\"final_logit_softcapping\" is 30.0"},
      {kLlama, R"({"attention_bias": 1})", "true or false"},
      {kLlama, R"({"sliding_window": 128})", "\"sliding_window\" is 128"},
      {kLlama, R"({"model_type": "mistral", "sliding_window": 64, "mlp_bias": true})",
       "\"mlp_bias\" is true"},
      {kLlama, R"({"mlp_bias": 1})", "true or false"},
      {kLlama, R"({"rope_theta": -1})", "\"rope_theta\" is -1"},
      {kLlama, R"({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})",
       "\"low_freq_factor\" is missing"},
      {kLlama, R"({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}})",
       "\"llama3\" or \"yarn\" is supported"},
      {kLlama, R"({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}})",
       "\"rope_type\" is \"longrope\""},
      {kLlama, R"({"rope_scaling": {"rope_type": "linear", "factor": 2, "mrope_section": [1]}})",
       "mrope_section"},
      {kLlama, R"({"rope_scaling": {"type": "linear", "factor": 0}})", "\"factor\" is 0"},
      {kLlama, R"({"rope_scaling": {"factor": 2.0}})", "an object with \"rope_type\" is supported"},
      {kLlama, R"({"rope_scaling": 2.0})", "null or an object"},
      {kLlama, R"({"rope_parameters": {"rope_type": 3, "rope_theta": 1e4}})", "a text is expected"},
      {kLlama, R"({"rope_parameters": {"rope_theta": 0}})", "\"rope_theta\" is 0"},
      {kLlama, R"({"partial_rotary_factor": 0.5})", "only 1 is supported"},
      {kLlama, R"({"model_type": "phimoe"})", "the architecture is \"phimoe\": Phi-3.5-MoE, whose routers"},
      {kLlama, R"({"model_type": "llama4_text"})",
       "the architecture is \"llama4_text\": Llama 4, whose router"},
      {kLlama, R"({"model_type": "qwen3_next"})", "Qwen3-Next, most of whose layers have linear attention"},
      {kLlama, R"({"model_type": "gemma3", "text_config": {}})", "nested in \"text_config\""},
      {kLlama, R"({"model_type": "gemma2", "hidden_activation": "gelu"})", "only the GELU by tanh"},
      {kLlama, R"({"model_type": "gemma2", "layer_types": ["full_attention"]})", "for 22 layers"},
      {kLlama, R"({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0, "sliding_window": 64})",
       "\"attn_logit_softcapping\" is 50.0; only null"},
      {kLlama,
       R"({"model_type": "qwen3", "use_sliding_window": true, "sliding_window": -5, "max_window_layers": 1})",
       "\"sliding_window\" is -5"},
      {kLlama, R"({"model_type": "mistral", "num_key_value_heads": null})",
       "\"num_key_value_heads\" is missing"},
      {kLlama, R"({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2}})", "\"longrope\""},
      {kLlama,
       R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64}})",
       "is 64; beside the object it is not given, and is 4096"},
      {kLlama, R"({"model_type": "phi3", "original_max_position_embeddings": 32,
                   "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64}})",
       "is 64; beside the object it is 32"},
      {kLlama,
       R"({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}})",
       "\"partial_rotary_factor\" 1 is supported"},
      {kLlama, R"({"model_type": "mistral", "num_hidden_layers": 1, "layer_types": ["full_attention"]})",
       "\"sliding_attention\" for all layers"},
      {kLlama, R"({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 3}})",
       "\"full_attention\""},
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
  EXPECT_EQ(absent->where(), dir_ / "nowhere");
  EXPECT_HAS(absent->message(), "there is no such directory");
  const std::pair<std::string, const char*> table[] = {
      {"", "is no JSON: line 1, column 1"},
      {"{\"model_type\":", "is no JSON: line 1, column 15"},
      {"[1]", "no object"},
      {"{\"model_type\":\"gpt2\",\"model_type\":\"llama\"}", "\"model_type\" appears twice"},
      {"{\"a\":{\"b\":1,\"b\":2}}", "\"b\" appears twice"},
      {std::string("{}\0{}", 5), "a zero byte"},
      {"{\"a\":" + std::string(100000, '['), "nests objects and lists 100001 deep, 100 at most"},
  };
  for (const auto& [text, told] : table) {
    const auto error = thrown_by([&, content = text] { read(content); });
    ASSERT_TRUE(error.has_value()) << told;
    EXPECT_EQ(error->code(), Errc::kUsage);
    EXPECT_HAS(error->message(), told);
  }
}

// Each number is allowed by itself; what they make together is not: the product of sizes, and angles.
TEST_F(HfConfigTest, RefusesWhatNumbersMakeTogether) {
  const Refusal table[] = {
      {kLlama, R"({"hidden_size": 16777216, "num_attention_heads": 1024, "num_key_value_heads": 1024,
                   "head_dim": 128, "intermediate_size": 16777216, "num_hidden_layers": 65536})",
       "parameters; 1e+15 at most"},
      {kGpt2, R"({"n_embd": 16777216, "n_head": 16, "n_inner": 16777216, "n_layer": 65536})",
       "parameters; 1e+15 at most"},
      {kLlama, R"({"head_dim": 1000000000})", "is not between 1 and"},
      {kLlama, R"({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}})", "not finite"},
      {kLlama,
       R"({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 5e-324, "beta_slow": 5e-324}})",
       "not finite"},
      {kLlama, R"({"model_type": "phi3", "sliding_window": 64, "partial_rotary_factor": 1e308})",
       "which are no pairs"},
  };
  for (const Refusal& r : table) {
    json config = json::parse(r.base);
    config.merge_patch(json::parse(r.patch));
    const auto error = thrown_by([&] { validate(read(config.dump())); });
    ASSERT_TRUE(error.has_value()) << r.patch << " was accepted";
    EXPECT_EQ(error->code(), Errc::kUsage) << r.patch;
    EXPECT_HAS(error->message(), r.told) << r.patch;
  }
}

// Names of one function, and what transformers reads nowhere or takes for "not given".
TEST_F(HfConfigTest, TakesOtherNamesOfTheSame) {
  const auto with = [&](const char* base, const char* patch) {
    json config = json::parse(base);
    config.merge_patch(json::parse(patch));
    return read(config.dump());
  };
  for (const char* same :
       {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh"}) {
    EXPECT_EQ(with(kGpt2, fmt::format(R"({{"activation_function": "{}"}})", same).c_str()), read(kGpt2));
  }
  EXPECT_EQ(with(kLlama, R"({"hidden_act": "swish"})"), read(kLlama));
  const char* const yarn = R"({"rope_scaling": {"rope_type": "yarn", "factor": 4,
      "original_max_position_embeddings": 512}})";
  EXPECT_EQ(with(kLlama, R"({"rope_scaling": {"rope_type": "yarn", "factor": 4, "finetuned": true,
      "original_max_position_embeddings": 512, "mscale": 0, "mscale_all_dim": 0, "beta_fast": 0, "beta_slow": 0}})"),
            with(kLlama, yarn));
  const ModelConfig scores =
      with(kGpt2, R"({"scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true})");
  EXPECT_TRUE(!scores.scaled_scores && scores.scores_by_layer);
  EXPECT_EQ(read(write_hf_config(scores)), scores);
  const ModelConfig biases = with(kLlama, R"({"mlp_bias": true})");
  EXPECT_TRUE(biases.block.mlp_bias);
  EXPECT_EQ(read(write_hf_config(biases)), biases);
}

// A Llama's file as one of another family, with these keys.
ModelConfig family(const char* text) {
  json config = json::parse(kLlama);
  config.merge_patch(json::parse(text));
  return parse_hf_config(config.dump(), "config.json");
}

TEST(Families, BothSpellingsOfRotaryEmbeddings) {
  const ModelConfig older =
      family(R"({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3",
      "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}})");
  const ModelConfig newer =
      family(R"({"model_type": "llama", "rope_theta": null, "rope_parameters": {"rope_theta": 5e5,
      "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192}})");
  EXPECT_EQ(older, newer);
  EXPECT_EQ(older.block.rope.scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(older.block.rope.scaling.original, 8192);
  EXPECT_EQ(older.block.rope.theta, 5e5);
  // Gemma 3: a scaling at the top is of the layers without a window.
  const ModelConfig gemma =
      family(R"({"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
      "rope_scaling": {"rope_type": "linear", "factor": 8}, "sliding_window": 512})");
  EXPECT_EQ(
      gemma,
      family(R"({"model_type": "gemma3_text", "rope_theta": null, "sliding_window": 512, "rope_parameters": {
      "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6},
      "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}})"));
  EXPECT_EQ(gemma.block.window_rope->theta, 1e4);
  EXPECT_EQ(gemma.block.window_rope->scaling.kind, RopeScaling::Kind::kNone);
}

TEST(Families, WindowsByRuleAndByList) {
  const auto windows = [](const char* text) {
    std::string all;
    const ModelConfig c = family(text);
    for (std::int64_t l = 0; l < c.layers; ++l) all += c.has_window(l) ? '1' : '0';
    return all;
  };
  EXPECT_EQ(windows(R"({"model_type": "mistral", "sliding_window": 64})"), std::string(22, '1'));
  // A file that says nothing means 4096, and one that says null none.
  json mistral = json::parse(kLlama);
  mistral["model_type"] = "mistral", mistral["max_position_embeddings"] = 8192;
  EXPECT_EQ(parse_hf_config(mistral.dump(), "config.json").block.window, 4096);
  mistral["sliding_window"] = nullptr;
  EXPECT_FALSE(parse_hf_config(mistral.dump(), "config.json").any_window());
  EXPECT_EQ(windows(R"({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3})"),
            std::string(22, '0'));
  EXPECT_EQ(windows(R"({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3,
                        "use_sliding_window": true})"),
            "000" + std::string(19, '1'));
  EXPECT_EQ(windows(R"({"model_type": "gemma2", "sliding_window": 64})"), "1010101010101010101010");
  EXPECT_EQ(windows(R"({"model_type": "gemma3_text", "sliding_window": 64})"), "1111101111101111101111");
  // A list wins over the rule.
  EXPECT_EQ(windows(R"({"model_type": "gemma2", "sliding_window": 64, "num_hidden_layers": 3,
                        "layer_types": ["full_attention", "full_attention", "sliding_attention"]})"),
            "001");
}

TEST(Families, WhatFilesDoNotSay) {
  const ModelConfig qwen2 = family(R"({"model_type": "qwen2"})"),
                    qwen3 = family(R"({"model_type": "qwen3"})"),
                    gemma2 = family(R"({"model_type": "gemma2", "tie_word_embeddings": null})"),
                    olmo2 = family(R"({"model_type": "olmo2"})"), phi3 = family(R"({"model_type": "phi3"})");
  EXPECT_TRUE(qwen2.block.qkv_bias);
  EXPECT_FALSE(qwen2.block.o_bias);
  EXPECT_EQ(qwen3.head_size, 128);  // not 2048 / 32
  EXPECT_EQ(qwen3.block.head_norms, HeadNorms::kEach);
  EXPECT_EQ(gemma2.block.norm_weight, NormWeight::kPlusOne);
  EXPECT_EQ(gemma2.block.attention_softcap, 50);
  EXPECT_EQ(gemma2.block.query_pre_attn_scalar, 256);
  EXPECT_TRUE(gemma2.tied);
  EXPECT_EQ(olmo2.block.norms, NormPlacement::kAfter);
  EXPECT_EQ(olmo2.block.head_norms, HeadNorms::kAll);
  EXPECT_TRUE(phi3.block.fused);
  // Of two shares of a head the one of the object counts, whatever it is.
  const char* const shares = R"({"model_type": "phi3", "partial_rotary_factor": 0.5,
                                 "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}})";
  EXPECT_EQ(family(shares).block.rope.partial, 1);
  EXPECT_EQ(family(R"({"model_type": "phi3", "partial_rotary_factor": 0.5})").block.rope.partial, 0.5);
  for (const ModelConfig& c : {qwen2, qwen3, gemma2, olmo2, phi3}) EXPECT_NO_THROW(validate(c));
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
      {R"({"n_embd": 48})", "\"arch\" is missing", "\"gpt2\", \"llama\""},
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
