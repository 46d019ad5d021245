// DeepSeek's models in files: what is refused, and what is left out.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/hf_files.hpp"
#include "support/errors.hpp"
#include "support/families.hpp"
#include "support/files.hpp"

namespace zg::test {
namespace {

using nlohmann::json;

struct LatentFiles : testing::Test {
  static json config(const char* name = "deepseek_v3") { return json::parse(FamilyFile(name).config_text()); }
  static std::string refusal(const json& text) {
    return error_of([&] { (void)parse_hf_config(text.dump(), "config.json"); }).message();
  }
  static std::string with(const char* key, const json& value) {
    json text = config();
    text[key] = value;
    return refusal(text);
  }
};

// With the defaults of the released models, or by the file's own keys.
TEST_F(LatentFiles, SayWhichLayersHaveExperts) {
  const auto dense = [](json text) { return parse_hf_config(text.dump(), "config.json").experts.dense; };
  json text = config("deepseek_v3_moe");
  EXPECT_EQ(dense(text), (std::vector{true, false, false}));
  text["first_k_dense_replace"] = 0;
  EXPECT_EQ(dense(text), std::vector<bool>());
  text["num_hidden_layers"] = 4, text.erase("first_k_dense_replace");
  EXPECT_EQ(dense(text), (std::vector{true, true, true, false}));
  text = config("deepseek_v2_moe");
  text.erase("first_k_dense_replace");
  EXPECT_EQ(dense(text), std::vector<bool>());
  text["first_k_dense_replace"] = 3;
  EXPECT_FALSE(parse_hf_config(text.dump(), "config.json").experts.on());
}

TEST_F(LatentFiles, RoutersThatAreNotKnownAreRefused) {
  const auto refused = [](const char* family, const char* key, const json& value) {
    json text = config(family);
    text[key] = value;
    return refusal(text);
  };
  constexpr const char *kV2 = "deepseek_v2_moe", *kV3 = "deepseek_v3_moe";
  EXPECT_HAS(refused(kV3, "n_group", 3),
             "\"n_group\" is 3; groups of 2 or more of the 8 experts are expected");
  EXPECT_HAS(refused(kV3, "n_group", 8), "\"n_group\" is 8; groups of 2 or more");
  EXPECT_HAS(refused(kV3, "topk_group", 5), "\"topk_group\" is 5; at most \"n_group\", 4, is expected");
  EXPECT_HAS(refused(kV3, "topk_group", 1),
             "\"topk_group\" is 1; groups with 3 experts or more are expected");
  EXPECT_HAS(refused(kV3, "scoring_func", "softmax"), "only \"sigmoid\" is supported");
  EXPECT_HAS(refused(kV3, "topk_method", "greedy"), "only \"noaux_tc\" is supported");
  EXPECT_HAS(refused(kV2, "scoring_func", "sigmoid"), "only \"softmax\" is supported");
  EXPECT_HAS(refused(kV2, "topk_method", "noaux_tc"),
             "only \"greedy\" or \"group_limited_greedy\" is supported");
  EXPECT_HAS(refused(kV2, "mlp_bias", true), "only false, in layers with experts, is supported");
  json text = config(kV2);  // groups count for one of the two methods alone
  text["topk_method"] = "greedy";
  EXPECT_EQ(parse_hf_config(text.dump(), "config.json").experts.router.groups, 1);
}

TEST_F(LatentFiles, SizesThatDoNotFitAreRefused) {
  EXPECT_HAS(with("num_key_value_heads", 2), "\"num_key_value_heads\" is 2; 6, as \"num_attention_heads\",");
  EXPECT_HAS(with("head_dim", 11), "\"head_dim\" is 11; 6, as \"qk_rope_head_dim\",");
  json text = config();
  text.erase("head_dim"), text["qk_rope_head_dim"] = 5;
  EXPECT_HAS(refusal(text), "\"qk_rope_head_dim\" is 5; an even number is expected");
  EXPECT_HAS(with("kv_lora_rank", 0), "\"kv_lora_rank\" is 0");
  EXPECT_HAS(with("q_lora_rank", 0), "\"q_lora_rank\" is 0");
  EXPECT_HAS(with("sliding_window", 7), "\"sliding_window\" is 7; only null is supported");
  EXPECT_HAS(with("rope_parameters", {{"rope_type", "linear"}, {"factor", 2.0}, {"mscale_all_dim", 1.0}}),
             "only \"mscale_all_dim\" of \"rope_type\" \"yarn\" is supported");
  ModelConfig biased = FamilyFile("deepseek_v2").config();
  biased.block.qkv_bias = true;
  EXPECT_HAS(error_of([&] { validate(biased); }).message(), "biases without q_lora_rank are not supported");
}

// The defaults of the released models, and Kimi K2's model_type.
TEST_F(LatentFiles, AreReadByTheirNames) {
  json text = config();
  text["model_type"] = "kimi_k2";
  EXPECT_EQ(parse_hf_config(text.dump(), "config.json"), FamilyFile("deepseek_v3").config());
  for (const char* key : {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                          "head_dim", "rope_interleave", "num_key_value_heads"})
    text.erase(key);
  const ModelConfig c = parse_hf_config(text.dump(), "config.json");
  EXPECT_EQ(c.arch, Arch::kDeepseekV3);
  EXPECT_EQ(c.head_size, 192);
  EXPECT_EQ(c.kv_heads, 6);
  EXPECT_TRUE(c.block.rope.interleaved);
  EXPECT_EQ(c.block.latent, (LatentAttention{.q_rank = 1536, .kv_rank = 512, .rope = 64, .value_size = 128}));
}

// Layers after the last one predict further tokens. Other families have none.
TEST_F(LatentFiles, LayersOfFurtherPredictionsAreLeftOut) {
  const TempDir dir;
  const auto log_of = [&](const char* family, std::initializer_list<const char*> more) {
    const Model model(FamilyFile(family).config(), DType::kF32, host_ops());
    Tensors tensors = tensors_of(model, "F32");
    for (const char* name : more) tensors[name] = {"F32", {1}, std::string(4, '\0')};
    write_file(dir / "model.safetensors", safetensors_bytes(tensors));
    testing::internal::CaptureStderr();
    const auto error = thrown_by([&] { const HfWeights weights(dir.path(), model); });
    const std::string log = testing::internal::GetCapturedStderr();
    return error ? "error: " + error->message() : log;
  };
  EXPECT_HAS(log_of("deepseek_v3", {"model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"}),
             "\"model.layers.3.eh_proj.weight\", \"model.layers.3.enorm.weight\" are no part of the model");
  EXPECT_EQ(log_of("deepseek_v3", {}), "");
  for (const char* inside :
       {"model.layers.2.eh_proj.weight", "model.layers.x.enorm.weight", "model.layers.3"})
    EXPECT_HAS(log_of("deepseek_v3", {inside}), "is no tensor of this model");
  for (const char* other : {"deepseek_v2", "qwen3"})
    EXPECT_HAS(log_of(other, {"model.layers.3.eh_proj.weight"}), "is no tensor of this model");
}

}  // namespace
}  // namespace zg::test
