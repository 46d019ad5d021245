// A run on several ranks of this process, as a library.
#include "train/session_fixture.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

class RanksOfARun : public SessionTest {
 protected:
  struct Outcome {
    std::vector<double> losses;
    std::optional<double> val_loss;
    std::string model;  // the saved weights
    Traffic measured, formula;
  };
  struct Losses final : TrainObserver {
    std::vector<double> all;
    void on_step(const StepRecord& r) override { all.push_back(r.result.loss); }
  };

  RunConfig config(const Strings& overrides) const {
    return tiny({"data.validation=0.2", "train_batch_size=8", "steps=4", "eval.every=2", "eval.batches=5",
                 "gradient_clipping=0.5"},
                overrides);
  }
  Outcome train(const Strings& overrides) {
    Trainer trainer(config(overrides));
    trainer.start();
    Losses losses;
    const RunSummary summary = trainer.run({&losses});
    trainer.save_model(directory_ + "/model");
    return {losses.all, summary.val_loss, test::read_file(directory_ + "/model/model.safetensors"),
            summary.measured, summary.formula};
  }
};

TEST_F(RanksOfARun, EveryStageGivesTheSameModel) {
  const Outcome one = train({"train_micro_batch_size_per_gpu=1"});
  std::optional<Outcome> first;
  for (const char* sharding : {"zero_optimization={\"stage\": 0}", "zero_optimization={\"stage\": 1}",
                               "zero_optimization={\"stage\": 2}", "zero_optimization={\"stage\": 3}",
                               "zero_optimization={\"stage\": 3, \"zero_hpz_partition_size\": 2}",
                               "zero_optimization={\"stage\": 2, \"mics_shard_size\": 2}"}) {
    SCOPED_TRACE(sharding);
    const Outcome now = train({"devices=host:4", "train_micro_batch_size_per_gpu=1", sharding});
    EXPECT_EQ(now.measured, now.formula);
    if (!first) first = now;
    EXPECT_EQ(now.losses, first->losses);
    EXPECT_EQ(now.val_loss, first->val_loss);
    EXPECT_TRUE(now.model == first->model);
  }
  // Sums in another order, in fp32, over four steps.
  ASSERT_EQ(first->losses.size(), one.losses.size());
  for (std::size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(first->losses[i] / one.losses[i], 1, 1e-5);
  EXPECT_NEAR(*first->val_loss / *one.val_loss, 1, 1e-5);
}

TEST_F(RanksOfARun, StopTogetherAfterTheStepInWhichTheFirstIsAsked) {
  int asked = 0;
  Trainer trainer(config({"devices=host:3", "train_batch_size=6"}), {.stop = [&] { return ++asked == 2; }});
  trainer.start();
  EXPECT_EQ(trainer.run().steps, 2);
}

// What one rank throws ends all, and is what the run throws.
TEST_F(RanksOfARun, OneThatFailsEndsAllWithItsError) {
  struct Thrower final : TrainObserver {
    void on_step(const StepRecord& r) override {
      if (r.step == 2) throw Error(Errc::kUsage, "observer", "has seen enough");
    }
  } thrower;
  Trainer trainer(config({"devices=host:4", "zero_optimization.stage=3"}));
  trainer.start();
  const Error error = test::error_of([&] { return trainer.run({&thrower}), 0; });
  EXPECT_EQ(error.where(), "observer");
}

TEST_F(RanksOfARun, TheBatchIsThatOfAllRanks) {
  const RunConfig c = config({"devices=host:4", "train_micro_batch_size_per_gpu=1"});
  EXPECT_EQ(c.micro_batch, 1);
  EXPECT_EQ(c.accumulation_steps, 2);
  const Error error = usage_error([&] {
    return config({"devices=host:3", "train_micro_batch_size_per_gpu=1"});
  });
  EXPECT_HAS(error.where(), "train_batch_size");
  EXPECT_HAS(error.message(), "8 != 1 * 2 * 3");
  EXPECT_HAS(usage_error([&] {
               return config({"devices=host:4", "zero_optimization.mics_shard_size=3"});
             }).message(),
             "does not divide the 4 ranks");
}

}  // namespace
}  // namespace zg
