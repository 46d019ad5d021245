// A run on several ranks of this process, as a library.
#include "train/agreement.hpp"
#include "train/run_fixture.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

class RanksOfARun : public RunTest {
 protected:
  struct Outcome {
    std::vector<double> losses;
    std::optional<double> val_loss;
    std::string model;  // the saved weights
    LinkBytes measured, formula;
    CommTraffics comm, comm_formula;
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
    return {losses.all,          summary.val_loss, test::read_file(directory_ + "/model/model.safetensors"),
            summary.measured,    summary.formula,  summary.comm,
            summary.comm_formula};
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
    EXPECT_EQ(now.comm, now.comm_formula);
    EXPECT_GT(now.comm[CommAxis::kDataParallel].sent, 0);
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

// What one step exchanges is what the plan says, summed over the ranks; and the record knows each rank.
// Of 256 values in fp32, 1024 bytes, 8 bits leave 260, and 4 bits 132, with the scale.
TEST_F(RanksOfARun, FewerBitsAreFewerBytes) {
  const Strings four{"devices=host:4", "train_micro_batch_size_per_gpu=1", "zero_optimization.stage=3"};
  const Outcome whole = train(four);
  const auto bytes = [](const Outcome& o, CommAxis axis) { return o.comm[axis].sent; };
  const std::int64_t weights = bytes(whole, CommAxis::kShards),
                     gradients = bytes(whole, CommAxis::kDataParallel);
  const auto with = [&](const Strings& more) {
    Strings all = four;
    all.insert(all.end(), more.begin(), more.end());
    const Outcome now = train(all);
    EXPECT_EQ(now.comm, now.comm_formula);
    EXPECT_EQ(now.measured, now.formula);
    for (std::size_t i = 0; i < now.losses.size(); ++i)
      EXPECT_NEAR(now.losses[i] / whole.losses[i], 1, 0.01) << i;
    return now;
  };
  const Outcome both = with(
      {"zero_optimization.zero_quantized_weights=true", "zero_optimization.zero_quantized_gradients=true"});
  EXPECT_EQ(bytes(both, CommAxis::kDataParallel), 0);
  EXPECT_EQ(bytes(both, CommAxis::kShards) * 1024, weights * 260 + gradients * 132);
  const Outcome of_gradients =
      with({"zero_optimization.zero_quantized_gradients=true", "parallel.quantized_gradient_bits=8"});
  EXPECT_EQ(bytes(of_gradients, CommAxis::kShards) * 1024, weights * 1024 + gradients * 260);
  EXPECT_NE(of_gradients.losses, both.losses);
}

TEST_F(RanksOfARun, ExchangeWhatThePlanForetold) {
  struct Records final : TrainObserver {
    std::vector<StepRecord> all;
    void on_step(const StepRecord& r) override { all.push_back(r); }
  } records;
  Trainer trainer(
      config({"devices=host:4", "zero_optimization={\"stage\": 3, \"zero_hpz_partition_size\": 2}"}));
  trainer.start();
  const RunSummary summary = trainer.run({&records});
  ASSERT_EQ(records.all.size(), 4u);
  for (const StepRecord& r : records.all) {
    EXPECT_EQ(r.result.comm, trainer.totals().comm);
    EXPECT_EQ(r.ranks(), 4);
    EXPECT_NEAR(r.result.stall, r.result.stall_for.total(), 1e-12);
    EXPECT_GT(r.loader_seconds, 0);
    EXPECT_GT(*std::min_element(r.own_seconds.begin(), r.own_seconds.end()), 0);
  }
  for (int i = 0; i < kCommAxes; ++i) {
    const auto axis = static_cast<CommAxis>(i);
    const CommTraffic& t = trainer.totals().comm[axis];
    EXPECT_EQ(t.sent > 0, is_of_sharding(axis)) << name_of(axis);
    EXPECT_EQ(t.sent, t.received);
  }
  EXPECT_EQ(summary.own_seconds.size(), 4u);
}

// A report on all ranks says for each where it is, and for whom it waits.
TEST_F(RanksOfARun, AReportSaysWhoIsWaitedFor) {
  Watchdog watchdog({.stall_seconds = 0});
  struct Holder final : TrainObserver {
    explicit Holder(Watchdog& w) : watchdog(w) {}
    // Holds the first rank until the others wait for it, or for a minute.
    void on_step_begin(std::int64_t step) override {
      if (step != 2) return;
      const auto begin = Clock::now();
      const auto all_wait = [&] {
        for (const int rank : {1, 2, 3}) {
          if (text.find(fmt::format("rank {} waits for rank 0 in exchange of numbers", rank)) ==
              std::string::npos)
            return false;
        }
        return true;
      };
      do text = watchdog.dump();
      while (!all_wait() && seconds_between(begin, Clock::now()) < 60);
    }
    Watchdog& watchdog;
    std::string text;
  } holder(watchdog);
  Trainer trainer(config({"devices=host:4", "zero_optimization.stage=3"}), {.watchdog = &watchdog});
  trainer.start();
  trainer.run({&holder});
  EXPECT_HAS(holder.text, "ranks: ");
  EXPECT_HAS(holder.text, "rank 0: in no operation; step 1 was the last to begin");
  for (const int rank : {1, 2, 3})
    EXPECT_HAS(holder.text, fmt::format("rank {} waits for rank 0 in exchange of numbers", rank));
}

// What must be the same on all ranks is told by the plan, and budgets are not.
TEST_F(RanksOfARun, AgreeOnTheConfigurationButForBudgets) {
  const auto lines = [&](const Strings& settings) {
    Strings all{"devices=host:2", "train_batch_size=8"};
    all.insert(all.end(), settings.begin(), settings.end());
    return agreement_of(Trainer(config(all)).plan());
  };
  const auto same = lines({});
  EXPECT_EQ(lines({"tiers.device=40MiB", "tiers.host=40MiB", "threads.compute=1"}), same);
  for (const char* differs :
       {"seed=5", "steps=5", "eval.batches=4", "gradient_clipping=0.25", "model.n_layer=1", "data.seq_len=8",
        "bf16.enabled=true", "zero_optimization.stage=3", "train_micro_batch_size_per_gpu=1",
        R"(optimizer={"type": "AdamW", "params": {"lr": 2e-3}})"})
    EXPECT_NE(lines({differs}), same) << differs;
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
