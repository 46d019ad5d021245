// Runs whose ranks have a part of each layer: the files that they read and write are of the whole model, and
// random initial weights are those of one rank.
#include "train/run_fixture.hpp"
#include "ziggurat/train/run_plan.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

class TensorRuns : public RunTest {
 protected:
  struct Losses final : TrainObserver {
    std::vector<double> all;
    void on_step(const StepRecord& r) override { all.push_back(r.result.loss); }
  };
  struct Outcome {
    std::vector<double> losses;
    std::optional<double> val_loss;
    std::string model, text;
    CommTraffics comm;
  };
  // Llamas with 3 or 1 heads for keys and values, and a GPT-2, with 257 tokens.
  static Strings models() {
    const auto llama = [](int heads, int kv_heads, bool tied) {
      return fmt::format(
          R"(model={{"arch": "llama", "vocab_size": 257, "hidden_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": {}, "num_key_value_heads": {}, "head_dim": 10, "intermediate_size": 44,
        "max_position_embeddings": 32, "tie_word_embeddings": {}}})",
          heads, kv_heads, tied);
    };
    return {
        R"(model={"arch": "gpt2", "vocab_size": 257, "n_layer": 2, "n_head": 4, "n_embd": 36, "n_positions": 32,
              "n_inner": 52})",
        llama(4, 1, true), llama(12, 3, false)};
  }
  Outcome train(const Strings& overrides) {
    Strings all{"data.train=" + directory_ + "/book.txt",
                "output.dir=" + directory_ + "/out",
                "data.seq_len=16",
                "data.validation=0.2",
                "train_batch_size=8",
                "train_micro_batch_size_per_gpu=2",
                "steps=3",
                "eval.every=2",
                "eval.batches=3",
                "gradient_clipping=0.5"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    Trainer trainer(load_set(all));
    trainer.start();
    Losses losses;
    const RunSummary summary = trainer.run({&losses});
    trainer.save_model(directory_ + "/model");
    EXPECT_EQ(summary.measured, summary.formula);
    EXPECT_EQ(summary.comm, summary.comm_formula);
    return {losses.all, summary.val_loss, test::read_file(directory_ + "/model/model.safetensors"),
            trainer.describe(), summary.comm};
  }
  static Strings split(int tensor, const Strings& more) {
    Strings all{"devices=host:4", fmt::format("parallel.tensor={}", tensor)};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static Strings with(Strings all, const Strings& more) {
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

// With steps that change no bit, what is saved is what was initialised, or read.
TEST_F(TensorRuns, BeginWithOneRanksWeightsAndSaveThemWhole) {
  const Strings still{"steps=1", R"(optimizer={"type": "SGD", "params": {"lr": 0, "weight_decay": 0}})"};
  for (const std::string& model : models()) {
    const Outcome one = train(with({model}, still));
    std::filesystem::rename(directory_ + "/model", directory_ + "/from");
    for (const std::string& from : {model, "model={\"from\": \"" + directory_ + "/from\"}"}) {
      for (const Strings& how :
           {split(2, {"zero_optimization.stage=3"}), split(4, {"parallel.sequence=true"}),
            split(2, {"zero_optimization.stage=1", "parallel.sequence=true"})}) {
        SCOPED_TRACE(from + " " + testing::PrintToString(how));
        const Outcome many = train(with(with({from}, still), how));
        EXPECT_TRUE(many.model == one.model);
        EXPECT_NEAR(many.losses[0] / one.losses[0], 1, 1e-6);
      }
    }
    std::filesystem::remove_all(directory_ + "/from");
    if (HasFailure()) return;
  }
}

TEST_F(TensorRuns, TrainAsOneRankDoes) {
  for (const std::string& model : models()) {
    const Outcome one = train({model});
    std::optional<std::string> whole;
    for (const Strings& how :
         {split(2, {"zero_optimization.stage=0"}), split(2, {"zero_optimization.stage=3"}),
          split(2, {"tiers.device=1MiB", "tiers.host=2MiB", "zero_optimization.stage=2"})}) {
      SCOPED_TRACE(model + " " + testing::PrintToString(how));
      const Outcome many = train(with({model}, how));
      ASSERT_EQ(many.losses.size(), one.losses.size());
      for (std::size_t i = 0; i < one.losses.size(); ++i)
        EXPECT_NEAR(many.losses[i] / one.losses[i], 1, 1e-5);
      EXPECT_NEAR(*many.val_loss / *one.val_loss, 1, 1e-5);
      EXPECT_HAS(many.text, "4, 2 with the parts of each layer");
      EXPECT_GT(many.comm[CommAxis::kTensor].sent, 0);
      EXPECT_TRUE(many.model == whole.value_or(many.model)) << "a stage changes no bit";
      whole = many.model;
    }
    if (HasFailure()) return;
  }
}

// What the sizes of model and batch tell is refused by the plan, before anything is allocated.
TEST_F(TensorRuns, WhatCannotBeSplitIsRefused) {
  const auto refused = [&](const Strings& settings, const Lora& lora = {}) {
    Strings all{"data.train=" + directory_ + "/book.txt", "output.dir=" + directory_ + "/out",
                "data.seq_len=15", "train_batch_size=12"};
    all.insert(all.end(), settings.begin(), settings.end());
    const RunConfig run = load_set(all);
    Hardware machine;
    machine.memory.available = std::int64_t{1} << 34;
    machine.cores.nodes = {{0, {{0, 0}}}};
    ModelConfig model = *run.model;
    model.lora = lora;
    return usage_error([&] { return make_run_plan(run, model, 100, machine); });
  };
  const Strings all = models();
  const Error heads = refused({all[0], "devices=host:3", "parallel.tensor=3"});
  EXPECT_EQ(heads.where(), "parallel.tensor");
  EXPECT_EQ(heads.message(), "3 parts do not divide the 4 heads of attention");
  const Error rows = refused({all[0], "devices=host:2", "parallel.tensor=2", "parallel.sequence=true",
                              "train_micro_batch_size_per_gpu=1"});
  EXPECT_EQ(rows.where(), "parallel.sequence");
  EXPECT_EQ(rows.message(), "2 parts do not divide the 15 tokens of a micro-batch");
  const Error copies = refused(
      {all[2], "devices=host:2", "parallel.tensor=2", R"(optimizer={"type": "AdamW", "state": "int8"})"});
  EXPECT_EQ(copies.where(), "parallel.tensor");
  EXPECT_HAS(copies.message(), "copies of some of the 3 heads of keys and values");
  EXPECT_HAS(copies.hint(), "choose parts that divide 3, or a multiple of it");
  std::string phi3 = all[1];
  phi3.replace(phi3.find("llama"), 5, "phi3");
  const Error fused = refused(
      {phi3, "devices=host:2", "parallel.tensor=2", R"(optimizer={"type": "AdamW", "state": "bf16"})"},
      {.rank = 4, .alpha = 4, .modules = 1u << static_cast<int>(LoraModule::kQkv)});
  EXPECT_EQ(fused.where(), "parallel.tensor");
  EXPECT_HAS(fused.message(), "a head's 40 elements of model.layers.0.self_attn.qkv_proj.lora_B.weight");
  EXPECT_HAS(fused.hint(), "choose parts that divide 1, a lora.rank that is a multiple of 128, or keep");
}

// Heads of a multiple of 256 elements in each parameter.
TEST_F(TensorRuns, CopiesInFewBitsGoWithHeadsOfWholeBlocks) {
  const auto planned = [&](const std::string& arch, int heads, int kv_heads, const Strings& settings,
                           const Lora& lora = {}) {
    Strings all{"data.train=" + directory_ + "/book.txt",
                "output.dir=" + directory_ + "/out",
                "data.seq_len=16",
                "train_batch_size=8",
                "devices=host:2",
                "parallel.tensor=2",
                fmt::format(R"(model={{"arch": "{}", "vocab_size": 257, "hidden_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": {}, "num_key_value_heads": {}, "head_dim": 32,
        "intermediate_size": 44, "max_position_embeddings": 32}})",
                            arch, heads, kv_heads)};
    all.insert(all.end(), settings.begin(), settings.end());
    const RunConfig run = load_set(all);
    Hardware machine;
    machine.memory.available = std::int64_t{1} << 34;
    machine.cores.nodes = {{0, {{0, 0}}}};
    ModelConfig model = *run.model;
    model.lora = lora;
    return make_run_plan(run, model, 100, machine).layout->model->shard().degree;
  };
  const Lora lora{.rank = 8, .alpha = 4, .modules = 1u << static_cast<int>(LoraModule::kQkv)};
  for (const char* few :
       {R"(optimizer={"type": "AdamW", "state": "int8"})", R"(optimizer={"type": "AdamW", "state": "bf16"})",
        "zero_optimization.zero_quantized_gradients=true"}) {
    EXPECT_EQ(planned("llama", 12, 3, {few}), 2) << few;
    EXPECT_EQ(planned("phi3", 4, 1, {few}, lora), 2) << few;
  }
}

}  // namespace
}  // namespace zg
