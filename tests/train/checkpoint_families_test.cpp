// What checkpoints record of the models of today's families.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "support/errors.hpp"
#include "support/families.hpp"
#include "train/checkpoint_bits.hpp"

namespace zg::test {
namespace {

TEST(CheckpointFamilies, AModelIsReadAsItWasWritten) {
  for (const char* name : kFamilyNames) {
    SCOPED_TRACE(name);
    ModelConfig c = FamilyFile(name).config();
    c.dropout = {.embedding = 0.1, .residual = 0.25};
    c.init_std = ModelConfig{}.init_std;  // of the first weights alone, so that no checkpoint has it
    EXPECT_EQ(model_of(model_bits(c), "manifest"), c);
    ModelConfig adapted = c;
    adapted.lora = {.rank = 7, .alpha = 1.0 / 3, .rslora = true, .dropout = 0.1};
    const std::vector<LoraModule> modules = lora_modules(c);
    for (std::size_t i = 0; i < modules.size(); ++i) {
      adapted.lora.modules |= 1u << static_cast<int>(modules[i]);
      EXPECT_EQ(model_of(model_bits(adapted), "manifest"), adapted);
    }
  }
}

TEST(CheckpointFamilies, GPT2AndPlainLlamasHaveTheKeysOfBefore) {
  for (const ModelConfig& c : {reference_gpt2(), reference_llama()}) {
    for (const auto& [key, value] : model_bits(c)) EXPECT_NE(key, "model.block");
  }
}

// A run with another block does not go on from the checkpoint, whichever of its numbers differs.
TEST(CheckpointFamilies, AnotherBlockIsRefused) {
  using Change = std::function<void(ModelConfig&)>;
  const auto expect_refused = [](const ModelConfig& before, const Change& change) {
    ModelConfig now = before;
    change(now);
    const auto error =
        error_of([&] { (void)compare_bits(model_bits(before), model_bits(now), {}, "manifest"); });
    EXPECT_HAS(error.message(), "model.block");
  };
  const ModelConfig gemma2 = FamilyFile("gemma2").config(), gemma3 = FamilyFile("gemma3").config(),
                    qwen2 = FamilyFile("qwen2").config(), phi3 = FamilyFile("phi3").config();
  EXPECT_TRUE(compare_bits(model_bits(gemma2), model_bits(gemma2), {}, "manifest").empty());
  expect_refused(gemma2, [](ModelConfig& c) { c.block.window = 8; });
  expect_refused(gemma2, [](ModelConfig& c) { c.block.windowed[0] = false; });
  expect_refused(gemma2, [](ModelConfig& c) { c.block.attention_softcap = 5; });
  expect_refused(gemma2, [](ModelConfig& c) { c.block.final_softcap = 0; });
  expect_refused(gemma2, [](ModelConfig& c) { c.block.query_pre_attn_scalar = 16; });
  expect_refused(gemma3, [](ModelConfig& c) { c.block.window_rope->theta = 1e4; });
  expect_refused(gemma3, [](ModelConfig& c) { c.block.rope.scaling.factor = 4; });
  expect_refused(qwen2, [](ModelConfig& c) { c.block.rope.scaling.original = 32; });
  expect_refused(phi3, [](ModelConfig& c) { c.block.rope.scaling.short_factor[2] = 3; });
  const ModelConfig llama3 = FamilyFile("llama3").config();
  const Change plain = [](ModelConfig& c) { c.block.rope.scaling = {}; };
  expect_refused(llama3, plain);
  ModelConfig llama2 = llama3;
  plain(llama2);
  expect_refused(llama2, [&](ModelConfig& c) { c = llama3; });
}

// Texts of other versions of the program that mean the same are the same.
TEST(CheckpointFamilies, OtherWordsForTheSameBlockAreTheSame) {
  const BitKeys now = model_bits(FamilyFile("qwen2").config());
  BitKeys before = now;
  for (auto& [key, value] : before) {
    if (key == "model.block") value.insert(1, "\"a_key_of_another_version\": 1, ");
  }
  EXPECT_NE(before, now);
  EXPECT_TRUE(compare_bits(before, now, {}, "manifest").empty());
}

}  // namespace
}  // namespace zg::test
