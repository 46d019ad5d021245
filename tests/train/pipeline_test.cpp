// A run whose ranks are the stages of a pipeline, as a library.
#include "train/agreement.hpp"
#include "train/rank_plans.hpp"
#include "train/run_fixture.hpp"
#include "ziggurat/train/observers.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

class PipelineOfARun : public RunTest {
 protected:
  struct Records final : TrainObserver {
    std::vector<StepRecord> all;
    void on_step(const StepRecord& r) override { all.push_back(r); }
  };
  struct Outcome {
    std::vector<double> losses;
    std::optional<double> val_loss;
    std::string model;  // the saved weights
    RunSummary summary;
    std::vector<StepRecord> records;
    std::string report;
  };
  RunConfig config(const Strings& overrides) const {
    return tiny({"data.validation=0.2", "train_batch_size=8", "train_micro_batch_size_per_gpu=1", "steps=4",
                 "eval.every=2", "eval.batches=5", "gradient_clipping=0.5", "model.n_layer=4"},
                overrides);
  }
  Outcome train(const Strings& overrides) {
    Trainer trainer(config(overrides));
    trainer.start();
    Records records;
    StepLog log(directory_ + "/log.jsonl");
    Outcome o;
    o.summary = trainer.run({&records, &log});
    trainer.save_model(directory_ + "/model");
    for (const StepRecord& r : records.all) o.losses.push_back(r.result.loss);
    o.val_loss = o.summary.val_loss;
    o.model = test::read_file(directory_ + "/model/model.safetensors");
    o.records = records.all;
    o.report = final_report(o.summary, trainer);
    return o;
  }
};

// A pipeline over all ranks has one rank's bits; with two ranks a stage, those of two ranks. The saved model
// is gathered from all stages.
TEST_F(PipelineOfARun, GivesTheSameModel) {
  const Outcome one = train({}), two = train({"devices=host:2"});
  struct Case {
    const Outcome& same;
    Strings settings;
  };
  const Case cases[] = {
      {one, {"devices=host:2", "parallel.pipeline=2"}},
      {one, {"devices=host:4", "parallel.pipeline=4", "parallel.pipeline_schedule=1f1b"}},
      {one, {"devices=host:2", "parallel.pipeline=2", "parallel.stage_layers=[3,1]"}},
      {one,
       {"devices=host:2", "pipeline.stages=2", "parallel.chunks=2",
        "parallel.pipeline_schedule=depth_first"}},
      {one,
       {"devices=host:4", "parallel.pipeline=4", "parallel.pipeline_schedule=zero_bubble",
        "activation_checkpointing.recompute=false"}},
      {two, {"devices=host:4", "parallel.pipeline=2", "parallel.chunks=2", "zero_optimization.stage=3"}},
      {two,
       {"devices=host:4", "parallel.pipeline=2", "parallel.pipeline_schedule=zero_bubble",
        "zero_optimization.stage=3"}},
      {two,
       {"devices=host:4", "parallel.pipeline=2", "parallel.pipeline_schedule=gpipe",
        "zero_optimization.stage=1"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::PrintToString(c.settings));
    const Outcome now = train(c.settings);
    EXPECT_EQ(now.losses, c.same.losses);
    EXPECT_EQ(now.val_loss, c.same.val_loss);
    EXPECT_TRUE(now.model == c.same.model);
    EXPECT_EQ(now.summary.measured, now.summary.formula);
    EXPECT_EQ(now.summary.comm, now.summary.comm_formula);
    EXPECT_GT(now.summary.comm[CommAxis::kStages].sent, 0);
  }
}

// The plan draws the schedule, and the records and the report compare the bubble with its formula.
TEST_F(PipelineOfARun, TellsOfItsStagesAndItsBubble) {
  const Strings settings{"devices=host:4", "parallel.pipeline=2", "parallel.chunks=2",
                         "zero_optimization.stage=3"};
  Trainer planned(config(settings));
  const std::string plan = plan_report(planned);
  EXPECT_HAS(plan, "pipeline   2 stages of 2 chunks each, breadth_first, bubble 11.1% of a step; layers 0-0");
  EXPECT_HAS(plan, "\nstage 0   a0 a1 a2 a3 b0 b1 b2 .  B0 B0 b3 B1 B1");
  EXPECT_HAS(plan, ", stages ");
  const Outcome now = train(settings);
  ASSERT_EQ(now.records.size(), 4u);
  for (const StepRecord& r : now.records) {
    ASSERT_EQ(r.stage_seconds.size(), 2u);
    EXPECT_EQ(r.stage_seconds[0], std::max(r.own_seconds[0], r.own_seconds[1]));
    EXPECT_EQ(r.stage_seconds[1], std::max(r.own_seconds[2], r.own_seconds[3]));
    EXPECT_GT(r.bubble, 0);
    EXPECT_NEAR(r.bubble_formula, 1.0 / 9, 1e-12);
  }
  EXPECT_HAS(now.report, "% of the step time measured, 11.1% by formula");
  EXPECT_HAS(now.report, "2 stages");
  const std::string log = test::read_file(directory_ + "/log.jsonl");
  EXPECT_HAS(log, "\"pipeline\":{\"bubble\":");
  EXPECT_HAS(log, "\"stage_ms\":[");
  EXPECT_HAS(log, "\"stages\":");
}

// What a refused run is told to be enough is so for every stage: here the last one, with a head of its own,
// or the first one, with the embedding.
TEST_F(PipelineOfARun, TheSmallestBudgetsAreThoseOfAllStages) {
  const auto number_after = [](const std::string& text, const std::string& key) {
    return std::stoll(text.substr(text.find(key) + key.size()));
  };
  for (const char* layers : {"parallel.stage_layers=[1,3]", "parallel.stage_layers=[3,1]"}) {
    for (const char* tied : {"model.tie_word_embeddings=false", "model.tie_word_embeddings=true"}) {
      SCOPED_TRACE(testing::Message() << layers << ", " << tied);
      const Strings settings{"devices=host:2", "parallel.pipeline=2", "model.n_layer=4", layers, tied};
      const auto with = [&](std::int64_t device, std::int64_t host) {
        Strings all{fmt::format("tiers.device={}", device), fmt::format("tiers.host={}", host)};
        all.insert(all.end(), settings.begin(), settings.end());
        return config(all);
      };
      const Error error = test::error_of([&] { Trainer trainer(with(4096, 4096)); });
      ASSERT_EQ(error.code(), Errc::kMemory);
      const std::int64_t device = number_after(error.hint(), "tiers.device="),
                         host = number_after(error.hint(), "tiers.host=");
      EXPECT_NO_THROW(Trainer trainer(with(device, host)));
      EXPECT_THROW(Trainer trainer(with(device - 4096, host)), Error);
    }
  }
}

// Weights are gathered ahead where there is room for one more.
TEST_F(PipelineOfARun, GathersAheadWhereThereIsRoom) {
  const Strings settings{"devices=host:4", "parallel.pipeline=2", "zero_optimization.stage=3"};
  const auto ahead = [&](Strings more) {
    more.insert(more.end(), settings.begin(), settings.end());
    const Trainer trainer(config(more));
    std::vector<std::int32_t> of;
    for (const RunPlan& plan : trainer.plans()) of.push_back(plan.choices.gather_ahead);
    return of;
  };
  EXPECT_EQ(ahead({}), (std::vector<std::int32_t>{1, 1, 1, 1}));
  EXPECT_EQ(ahead({"parallel.pipeline_schedule=zero_bubble"}), (std::vector<std::int32_t>{1, 1, 1, 1}));
}

// ... and otherwise by none: ranks of a stage gather together, in one order. Of plans that choose 1, 0, 1,
// all but the second one are made again.
TEST(PlansOfRanks, TheRankWithLeastRoomDecidesHowFarAllGatherAhead) {
  Processes alone;
  std::vector<int> asked(3);
  const PlanOf plan_of = [&](int local, const std::optional<RankChoices>& choices) {
    RunPlan plan;
    if (choices) ++asked[static_cast<std::size_t>(local)];
    plan.choices.gather_ahead = choices ? choices->gather_ahead : local == 1 ? 0 : 1;
    return plan;
  };
  for (const RunPlan& plan : plan_ranks(alone, 3, true, plan_of)) EXPECT_EQ(plan.choices.gather_ahead, 0);
  EXPECT_EQ(asked, (std::vector<int>{1, 0, 1}));
  // Without a pipeline the first rank chooses.
  for (const RunPlan& plan : plan_ranks(alone, 3, false, plan_of)) EXPECT_EQ(plan.choices.gather_ahead, 1);
  EXPECT_EQ(asked, (std::vector<int>{1, 1, 2}));
}

// One stage that needs tiles has all of them in tiles: those that chose whole layers are planned again.
TEST(PlansOfRanks, AllStagesAreInTilesIfOneIs) {
  Processes alone;
  std::vector<int> asked(3);
  const PlanOf plan_of = [&](int local, const std::optional<RankChoices>& choices) {
    RunPlan plan;
    if (choices) ++asked[static_cast<std::size_t>(local)];
    plan.choices.blocks = choices      ? choices->blocks
                          : local == 1 ? BlockTiling::kInTiles
                                       : BlockTiling::kWhole;
    return plan;
  };
  for (const RunPlan& plan : plan_ranks(alone, 3, true, plan_of))
    EXPECT_EQ(plan.choices.blocks, BlockTiling::kInTiles);
  EXPECT_EQ(asked, (std::vector<int>{1, 0, 1}));
}

// A backward in halves is drawn in halves. Of the ten turns of this step each stage idles in one.
TEST_F(PipelineOfARun, DrawsTheHalvesOfABackward) {
  Trainer planned(config({"devices=host:2", "parallel.pipeline=2", "parallel.pipeline_schedule=zero_bubble",
                          "train_batch_size=3"}));
  const std::string plan = plan_report(planned);
  EXPECT_HAS(plan, "pipeline   2 stages of 1 chunk each, zero_bubble, bubble 10.0% of a step; layers");
  EXPECT_HAS(plan, "W3: those of the weights");
  EXPECT_HAS(plan,
             "\nstage 0   a0 a1 .  A0 W0 a2 A1 W1 A2 W2\n"
             "stage 1   .  a0 A0 a1 A1 W0 a2 A2 W1 W2\n");
}

TEST_F(PipelineOfARun, IsRefusedWhereItCannotBe) {
  const auto refused = [&](const Strings& settings, const char* key, const char* message) {
    Strings all{"devices=host:2", "parallel.pipeline=2"};
    all.insert(all.end(), settings.begin(), settings.end());
    const Error error = usage_error([&] { return Trainer(config(all)).ranks(); });
    EXPECT_EQ(error.where(), key);
    EXPECT_HAS(error.message(), message);
  };
  refused({"parallel.chunks=3"}, "parallel.chunks",
          "2 stages of 3 chunks each are more than the model's 4 layers");
  refused({"model.n_layer=1"}, "parallel.pipeline", "1 layers");
  refused({"parallel.stage_layers=[3,2]"}, "parallel.stage_layers",
          "are 3 + 2, which are 5 layers, and the model has 4");
  refused({"parallel.chunks=2", "parallel.pipeline_schedule=1f1b"}, "parallel.chunks", "1f1b has one chunk");
  refused({"parallel.chunks=2", "parallel.pipeline_schedule=zero_bubble"}, "parallel.chunks",
          "zero_bubble has one chunk");
  refused({"parallel.chunks=2", "parallel.pipeline_group=7"}, "parallel.pipeline_group", "in groups of 7");
  refused({"parallel.chunks=2", "train_batch_size=1"}, "parallel.chunks",
          "as many micro-batches as the 2 stages");
}

// Processes and ranks compare what their neighbours expect of them.
TEST_F(PipelineOfARun, AgreesOnTheSchedule) {
  const auto lines = [&](const Strings& settings) {
    Strings all{"devices=host:2", "parallel.pipeline=2"};
    all.insert(all.end(), settings.begin(), settings.end());
    const Trainer trainer(config(all));
    EXPECT_EQ(agreement_of(trainer.plans()[0]), agreement_of(trainer.plans()[1]));
    return agreement_of(trainer.plan());
  };
  const auto same = lines({});
  EXPECT_EQ(lines({"tiers.device=40MiB", "tiers.host=40MiB"}), same);
  for (const char* differs : {"parallel.chunks=2", "parallel.pipeline_schedule=gpipe",
                              "parallel.pipeline_group=4", "parallel.stage_layers=[3,1]"})
    EXPECT_NE(lines({differs}), same) << differs;
}

}  // namespace
}  // namespace zg
