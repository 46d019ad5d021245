// Budgets are hard: what does not fit is refused before step 1 with what would do; that does, and not a byte
// less.
#include <charconv>
#include <cstdint>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

struct Variant {
  const char* name;
  Strings overrides;
};
void PrintTo(const Variant& v, std::ostream* out) {
  *out << v.name;
}

std::int64_t number_after(const std::string& text, const std::string& key) {
  const std::size_t at = text.find(key);
  std::int64_t value = -1;
  if (at != std::string::npos)
    std::from_chars(text.data() + at + key.size(), text.data() + text.size(), value);
  EXPECT_GT(value, 0) << key << " in: " << text;
  return value;
}

class SmallestBudgets : public CliTest, public ::testing::WithParamInterface<Variant> {
 protected:
  Outcome attempt(std::int64_t device, std::int64_t host, const std::string& output) const {
    return run(Strings{"train", "config.json"} +
               sets(GetParam().overrides +
                    Strings{"tiers.device=" + std::to_string(device), "tiers.host=" + std::to_string(host),
                            "tiers.nvme.0.path=.", "aio.backend=ram", "output.dir=" + output}));
  }
  void expect_refused(const Outcome& o, const std::string& place) const {
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_HAS(message_of(o), place) << o.err;
    EXPECT_EQ(o.out, "");
    expect_nothing_half_written();
  }
};

TEST_P(SmallestBudgets, AreNamedAndSufficeToTheByte) {
  const Outcome refused = attempt(4096, 4096, "out");
  expect_refused(refused, "the smallest budgets that do");
  const std::string message = message_of(refused);
  const std::int64_t device = number_after(message, "tiers.device="),
                     host = number_after(message, "tiers.host=");

  expect_refused(attempt(device - 1, host, "out"), "tiers.device=" + std::to_string(device));
  expect_refused(attempt(device, host - 1, "out"), "tiers.host=" + std::to_string(host));

  const Outcome tight = attempt(device, host, "tight");
  ASSERT_EQ(tight.code, 0) << tight.err;
  // Room for everything: the same numbers, to the last bit.
  train(GetParam().overrides + Strings{"output.dir=roomy"});
  const auto a = log("tight/log.jsonl"), b = log("roomy/log.jsonl");
  ASSERT_EQ(a.size(), b.size());
  std::int64_t travelled = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].at("loss"), b[i].at("loss")) << "step " << i + 1;
    EXPECT_EQ(a[i].at("grad_norm"), b[i].at("grad_norm")) << "step " << i + 1;
    EXPECT_EQ(a[i].value("val_loss", nlohmann::json()), b[i].value("val_loss", nlohmann::json()))
        << "step " << i + 1;
    EXPECT_LE(a[i].at("peak_bytes").at("device"), device);
    EXPECT_LE(a[i].at("peak_bytes").at("host"), host);
    travelled += a[i].at("bytes").at("nvme_read").get<std::int64_t>();
  }
  EXPECT_GT(travelled, 0);
  EXPECT_EQ(read("tight/model/model.safetensors"), read("roomy/model/model.safetensors"));
}

const Variant kVariants[] = {
    {"Gpt2", {}},
    {"MicroBatchMajor", {"accumulation=micro_batch_major"}},
    {"WithoutRecomputation", {"activation_checkpointing.recompute=false"}},
    {"WithoutClipping", {"gradient_clipping=0"}},
    {"Llama",
     {R"(model={"arch": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24,
        "intermediate_size": 43, "max_position_embeddings": 32, "tie_word_embeddings": false})"}},
};
INSTANTIATE_TEST_SUITE_P(Variants, SmallestBudgets, ::testing::ValuesIn(kVariants),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

// What sanitizers add to the memory of a process is no budget's.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

// 11 layers of width 384: 371 MiB of weights, gradients and optimizer state through 15 MiB of host memory.
// All of it together would not fit below the line that is tested.
TEST_F(CliTest, ResidentMemoryStaysBelowTheBudgetsAndAConstant) {
  if (kInstrumented) GTEST_SKIP() << "sanitizers need memory of their own";
  constexpr std::int64_t kMiB = 1 << 20, kDevice = 16 * kMiB, kHost = 15 * kMiB;
  // kProcessOverhead of run_plan.hpp, as docs/memory-and-drives.md states it.
  constexpr std::int64_t kOverhead = 256 * kMiB;
  // Per block of width 384: 12 * 384^2 weights, each with 20 bytes (weight 4, gradient 4, master, m and v
  // 12).
  constexpr std::int64_t kState = std::int64_t{11} * 12 * 384 * 384 * 20;
  static_assert(kState >= 20 * kHost && kState > kDevice + kHost + kOverhead);
  const Outcome o =
      run(Strings{"train", "config.json"} +
          sets({"model.n_layer=11", "model.n_embd=384", "model.n_head=6", "steps=3", "eval.every=0",
                "tiers.device=16MiB", "tiers.host=15MiB", "tiers.nvme.0.path=."}));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_LT(o.peak_bytes, kDevice + kHost + kOverhead);
  RecordProperty("peak_MiB", std::to_string(o.peak_bytes / kMiB));
}

// A run without a drive that has nowhere to put its state: the message says how to help it.
TEST_F(CliTest, WhatFitsNoBudgetIsToldWhatToAllow) {
  const Outcome o = run(Strings{"train", "config.json"} + sets({"tiers.device=4KiB"}));
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_HAS(message_of(o), "tiers.device") << o.err;
  expect_nothing_half_written();
}

TEST_F(CliTest, APlanSaysWhatFitsAndWritesNoRun) {
  const Outcome o = run(Strings{"train", "config.json", "--plan"} +
                        sets({"tiers.device=600KiB", "tiers.host=600KiB", "tiers.nvme.0.path=."}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_HAS(o.out, "it fits");
  EXPECT_HAS(o.out, "nvme read");
  expect_nothing_half_written();
}

}  // namespace
}  // namespace zg::cli_test
