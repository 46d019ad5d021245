// Runs whose ranks have parts of the same sequences.
#include "train/run_fixture.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

class ContextRuns : public RunTest {
 protected:
  struct Outcome {
    std::vector<double> losses;
    std::int64_t tokens = 0;
    RunSummary summary;
  };
  struct Losses final : TrainObserver {
    Outcome& out;
    explicit Losses(Outcome& o) : out(o) {}
    void on_step(const StepRecord& r) override {
      out.losses.push_back(r.result.loss);
      out.tokens = r.result.tokens;
    }
  };
  RunConfig config(const Strings& overrides) const {
    return tiny({"data.validation=0.2", "train_batch_size=8", "steps=3", "eval.every=2", "eval.batches=5",
                 "gradient_clipping=0.5"},
                overrides);
  }
  Outcome train(const Strings& overrides) {
    Outcome out;
    Trainer trainer(config(overrides));
    trainer.start();
    Losses losses(out);
    out.summary = trainer.run({&losses});
    trainer.save_model(directory_ + "/model");
    return out;
  }
};

// The same batch, of the same data, whoever has which part of it.
TEST_F(ContextRuns, AreThoseOfOneRank) {
  const Outcome one = train({});
  for (const Strings& way :
       {Strings{"devices=host:2", "parallel.context=2"},
        Strings{"devices=host:2", "parallel.context=2", "parallel.context_method=ulysses"},
        Strings{"devices=host:4", "parallel.context=2", "zero_optimization.stage=3"}}) {
    SCOPED_TRACE(testing::PrintToString(way));
    const Outcome many = train(way);
    EXPECT_EQ(many.tokens, one.tokens);
    ASSERT_EQ(many.losses.size(), one.losses.size());
    // Sums in another order, in fp32, over three steps of AdamW.
    for (std::size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(many.losses[i] / one.losses[i], 1, 1e-5);
    EXPECT_NEAR(*many.summary.val_loss / *one.summary.val_loss, 1, 1e-5);
    EXPECT_EQ(many.summary.comm, many.summary.comm_formula);
    EXPECT_EQ(many.summary.measured, many.summary.formula);
    EXPECT_GT(many.summary.comm[CommAxis::kContext].sent, 0);
    EXPECT_GT(many.summary.comm_seconds[CommAxis::kContext], 0);
  }
}

TEST_F(ContextRuns, UlyssesSharesHeads) {
  const RunConfig run = config({"devices=host:4", "parallel.context=4", "parallel.context_method=ulysses"});
  const Error error = usage_error([&] { return Trainer(run), 0; });
  EXPECT_EQ(error.where(), "parallel.context");
  EXPECT_HAS(error.message(), "is 4, which does not divide the model's 2 heads and 2 for keys and values");
  EXPECT_EQ(error.hint(), "set it to 2, or parallel.context_method to ring");
}

}  // namespace
}  // namespace zg
