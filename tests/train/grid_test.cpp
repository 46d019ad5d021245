// Runs whose ranks are spread along several axes at once: parts of layers, parts of sequences, stages.
#include "train/agreement.hpp"
#include "train/run_fixture.hpp"
#include "ziggurat/train/observers.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

class GridRuns : public RunTest {
 protected:
  struct Losses final : TrainObserver {
    std::vector<double> all;
    std::int64_t tokens = 0;
    void on_step(const StepRecord& r) override {
      all.push_back(r.result.loss);
      tokens = r.result.tokens;
    }
  };
  struct Outcome {
    std::vector<double> losses;
    std::int64_t tokens = 0;
    std::optional<double> val_loss;
    std::string model;  // the saved weights
    CommTraffics comm;
  };
  // With as many tokens as bytes, 4 layers, and heads that 2 x 2 ranks can share.
  static Strings models() {
    return {
        R"(model={"arch": "gpt2", "vocab_size": 257, "n_layer": 4, "n_head": 4, "n_embd": 36,
              "n_positions": 32, "n_inner": 52})",
        R"(model={"arch": "llama", "vocab_size": 257, "hidden_size": 40, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10, "intermediate_size": 44,
              "max_position_embeddings": 32, "tie_word_embeddings": false})"};
  }
  static Strings with(Strings all, const Strings& more) {
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  RunConfig config(const Strings& overrides) const {
    return on_book(with(
        {"data.seq_len=16", "data.validation=0.2", "train_batch_size=8", "train_micro_batch_size_per_gpu=1",
         "steps=3", "eval.every=2", "eval.batches=5", "gradient_clipping=0.5"},
        overrides));
  }
  Outcome train(const Strings& overrides) {
    Trainer trainer(config(overrides));
    trainer.start();
    Losses losses;
    const RunSummary summary = trainer.run({&losses});
    trainer.save_model(directory_ + "/model");
    EXPECT_EQ(summary.measured, summary.formula);
    EXPECT_EQ(summary.comm, summary.comm_formula);
    return {losses.all, losses.tokens, summary.val_loss,
            test::read_file(directory_ + "/model/model.safetensors"), summary.comm};
  }
  static Strings grid(int ranks, int tensor, int context, int pipeline, const Strings& more = {}) {
    return with({fmt::format("devices=host:{}", ranks), fmt::format("parallel.tensor={}", tensor),
                 fmt::format("parallel.context={}", context), fmt::format("parallel.pipeline={}", pipeline)},
                more);
  }
};

constexpr const char* kUlysses = "parallel.context_method=ulysses";
constexpr const char* kSequence = "parallel.sequence=true";

// With a step that changes no bit, what is saved is what was initialised, or read.
TEST_F(GridRuns, BeginWithOneRanksWeightsAndSaveThemWhole) {
  const Strings still{"steps=1", R"(optimizer={"type": "SGD", "params": {"lr": 0, "weight_decay": 0}})"};
  for (const std::string& model : models()) {
    const Outcome one = train(with({model}, still));
    std::filesystem::rename(directory_ + "/model", directory_ + "/from");
    for (const std::string& from : {model, "model={\"from\": \"" + directory_ + "/from\"}"}) {
      for (const Strings& how :
           {grid(8, 2, 2, 2, {"zero_optimization.stage=3", kSequence}), grid(4, 2, 2, 1, {kUlysses})}) {
        SCOPED_TRACE(from + " " + testing::PrintToString(how));
        const Outcome many = train(with(with({from}, still), how));
        EXPECT_TRUE(many.model == one.model);
        EXPECT_EQ(many.tokens, one.tokens);
        EXPECT_NEAR(many.losses[0] / one.losses[0], 1, 1e-6);
      }
    }
    std::filesystem::remove_all(directory_ + "/from");
    if (HasFailure()) return;
  }
}

// One rank's run to within rounding; and at one degree of tensor, context and data, the same bits with every
// number of stages, schedule, ZeRO stage and placement.
TEST_F(GridRuns, TrainAsOneRankDoes) {
  struct Case {
    Strings plain;
    std::vector<Strings> same;
  };
  const std::string small = "tiers.device=1MiB", host = "tiers.host=8MiB",
                    zero3 = "zero_optimization.stage=3", depth = "parallel.pipeline_schedule=depth_first",
                    chunks = "parallel.chunks=2";
  const Case cases[] = {
      {grid(4, 2, 1, 1),
       {grid(4, 2, 1, 1, {zero3}), grid(8, 2, 1, 2, {zero3, small, host}),
        grid(8, 2, 1, 2, {chunks, depth})}},
      {grid(4, 1, 2, 1), {grid(8, 1, 2, 2, {zero3, small, host}), grid(8, 1, 2, 2, {chunks})}},
      {grid(4, 2, 2, 1, {kSequence}),
       {grid(4, 2, 2, 1, {kSequence, zero3}),
        grid(8, 2, 2, 2, {kSequence, chunks, depth, zero3, small, host})}},
      {grid(4, 2, 2, 1, {kUlysses}),
       {grid(8, 2, 2, 2, {kUlysses, "zero_optimization.stage=1", "parallel.pipeline_schedule=1f1b"})}},
  };
  for (const std::string& model : models()) {
    const Outcome one = train({model});
    for (const Case& c : cases) {
      SCOPED_TRACE(model + " " + testing::PrintToString(c.plain));
      const Outcome plain = train(with({model}, c.plain));
      EXPECT_EQ(plain.tokens, one.tokens);
      ASSERT_EQ(plain.losses.size(), one.losses.size());
      for (std::size_t i = 0; i < one.losses.size(); ++i)
        EXPECT_NEAR(plain.losses[i] / one.losses[i], 1, 1e-5);
      EXPECT_NEAR(*plain.val_loss / *one.val_loss, 1, 1e-5);
      for (const Strings& how : c.same) {
        SCOPED_TRACE(testing::PrintToString(how));
        const Outcome now = train(with({model}, how));
        EXPECT_EQ(now.losses, plain.losses);
        EXPECT_EQ(now.val_loss, plain.val_loss);
        EXPECT_TRUE(now.model == plain.model);
      }
      if (HasFailure()) return;
    }
  }
}

TEST_F(GridRuns, AreDescribed) {
  const Trainer trainer(
      config(with({models()[0]}, grid(8, 2, 2, 2, {kSequence, "zero_optimization.stage=3"}))));
  const std::string plan = plan_report(trainer);
  EXPECT_HAS(plan,
             "\nranks      8, 2 with the parts of each layer and of the sequence, in groups of 2 that hold "
             "their stage once;");
  EXPECT_HAS(plan, "\ngrid       tensor 2 x context 2 x data 1 x pipeline 2, the first axis fastest");
  EXPECT_HAS(plan, "\nsequences  in parts, one on each of 2 ranks (ring)");
  EXPECT_HAS(plan, "\npipeline   2 stages of 1 chunk each, breadth_first");
  EXPECT_HAS(plan, "\nstage 0   a0 a1 ");
  for (const char* axis : {", tensor ", ", context ", ", stages ", ", copies "}) EXPECT_HAS(plan, axis);
  for (const RunPlan& one : trainer.plans()) EXPECT_EQ(agreement_of(one), agreement_of(trainer.plan()));
}

TEST_F(GridRuns, WhatCannotBeIsRefused) {
  const auto refused = [&](const Strings& settings) {
    return usage_error([&] { return Trainer(config(with({models()[0]}, settings))).ranks(); });
  };
  const Error heads = refused(grid(8, 4, 2, 1, {kUlysses}));
  EXPECT_EQ(heads.where(), "parallel.context");
  EXPECT_EQ(
      heads.message(),
      "is 2, which does not divide the 1 heads and 1 for keys and values of each of 4 parts of a layer");
  EXPECT_EQ(heads.hint(), "set it to 1, or parallel.context_method to ring");
  const Error rows = refused(grid(8, 2, 4, 1, {kSequence, kUlysses, "data.seq_len=4"}));
  EXPECT_EQ(rows.where(), "parallel.context") << "heads come first";
  const Error slices = refused(grid(8, 4, 2, 1, {kSequence, "data.seq_len=4"}));
  EXPECT_EQ(slices.where(), "parallel.sequence");
  EXPECT_EQ(slices.message(),
            "4 parts do not divide the 2 tokens of a micro-batch that a part of the sequences has");
}

}  // namespace
}  // namespace zg
