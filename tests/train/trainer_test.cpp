// The trainer as a library: what it plans for which machine, whom it tells what, and when it ends.
#include "ziggurat/train/trainer.hpp"

#include "train/run_fixture.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class TrainerLibrary : public RunTest {
 protected:
  RunConfig config(const Strings& overrides) const {
    return tiny({"data.validation=0.2", "train_batch_size=4", "steps=5", "eval.every=2", "eval.batches=3"},
                overrides);
  }
};

struct Told final : TrainObserver {
  std::vector<std::string> all;
  std::vector<double> losses;
  std::int64_t throws_at = 0;
  void on_step_begin(std::int64_t step) override { all.push_back(fmt::format("begin {}", step)); }
  void on_step_computed(std::int64_t step) override { all.push_back(fmt::format("computed {}", step)); }
  void on_step(const StepRecord& r) override {
    all.push_back(fmt::format("step {}{}", r.step, r.val_loss ? " evaluated" : ""));
    losses.push_back(r.result.loss);
    if (r.step == throws_at) throw Error(Errc::kUsage, "observer", "has seen enough");
  }
  void on_end(const RunSummary& s) override { all.push_back(fmt::format("end after {}", s.steps)); }
};

TEST_F(TrainerLibrary, TellsEachStepToItsObserversAndTheEnd) {
  Trainer trainer(config({}));
  trainer.start();
  Told first, second;
  const RunSummary summary = trainer.run({&first, &second});
  EXPECT_EQ(first.all, (std::vector<std::string>{"begin 1", "computed 1", "step 1", "begin 2", "computed 2",
                                                 "step 2 evaluated", "begin 3", "computed 3", "step 3",
                                                 "begin 4", "computed 4", "step 4 evaluated", "begin 5",
                                                 "computed 5", "step 5 evaluated", "end after 5"}));
  EXPECT_EQ(first.all, second.all);
  EXPECT_EQ(summary.first_loss, first.losses.front());
  EXPECT_EQ(summary.last_loss, first.losses.back());
  EXPECT_EQ(summary.measured, summary.formula);
  EXPECT_FALSE(fs::exists(directory_ + "/out/log.jsonl"));  // that is for whoever asks for it
}

TEST_F(TrainerLibrary, EndsWithTheStepAfterItIsAskedTo) {
  int asked = 0;
  Trainer trainer(config({}), {.stop = [&] { return ++asked == 3; }});
  trainer.start();
  Told told;
  EXPECT_EQ(trainer.run({&told}).steps, 3);
  EXPECT_EQ(told.all.back(), "end after 3");
  EXPECT_EQ(told.all[told.all.size() - 2], "step 3 evaluated");  // the last one is
  trainer.save_model(directory_ + "/model");
  EXPECT_TRUE(fs::exists(directory_ + "/model/model.safetensors"));
}

TEST_F(TrainerLibrary, WhatAnObserverThrowsEndsTheRun) {
  Trainer trainer(config({}));
  trainer.start();
  Told told;
  told.throws_at = 2;
  const Error error = usage_error([&] { return trainer.run({&told}), 0; });
  EXPECT_EQ(error.where(), "observer");
  EXPECT_EQ(told.all.back(), "step 2 evaluated");
}

TEST_F(TrainerLibrary, TheHistoryOfAPlanIsWhatARunDoes) {
  for (const char* evaluations : {"eval.every=0", "eval.every=2"}) {
    Trainer trainer(config({evaluations}));
    trainer.start();
    (void)trainer.run();
    History planned = trainer.plan().history(5), run = trainer.rank().engine().history();
    // What comes before the first step, and the flush after an evaluation, which has nothing to do.
    ASSERT_EQ(run.front().activity, Activity::kInitialize);
    run.erase(run.begin());
    ASSERT_EQ(planned.back().activity, Activity::kFlush);
    planned.pop_back();
    ASSERT_EQ(planned.size(), run.size()) << evaluations;
    for (std::size_t i = 0; i < run.size(); ++i) {
      EXPECT_EQ(planned[i].activity, run[i].activity) << i;
      EXPECT_EQ(planned[i].times, run[i].times) << i;
    }
  }
}

TEST_F(TrainerLibrary, DropoutOfADirectoryIsToldAndThatOfTheRunIsSaved) {
  const std::string model = directory_ + "/model";
  {
    Trainer trainer(config({"steps=1", "model.dropout.embedding=0.25", "model.dropout.residual=0.5"}));
    EXPECT_HAS(trainer.plan().describe(), "dropout 0.25 of embeddings and 0.5 of residual branches");
    trainer.start();
    (void)trainer.run();
    trainer.save_model(model);
  }
  EXPECT_EQ(read_hf_dropout(model), "embd_pdrop 0.25, resid_pdrop 0.5");
  const RunConfig from = on_book({"data.seq_len=16", "data.validation=0.2", "train_batch_size=4", "steps=1",
                                  "model.from=" + model, "model.dropout.residual=0.125"});
  testing::internal::CaptureStderr();
  const Trainer trainer(from);
  EXPECT_HAS(
      testing::internal::GetCapturedStderr(),
      "config.json has embd_pdrop 0.25, resid_pdrop 0.5: the run goes by model.dropout.embedding 0 and "
      "model.dropout.residual 0.125 instead");
  EXPECT_EQ(trainer.plan().model_config.dropout, (DropoutRates{0, 0.125}));
  EXPECT_EQ(read_hf_dropout(model, {0.25, 0.5}), "");
  EXPECT_EQ(read_hf_dropout(model, {0.25, 0.125}), "resid_pdrop 0.5");
}

// They say which tokens end a text and how turns are written, which a model that is trained further knows as
// well.
TEST_F(TrainerLibrary, AModelThatIsTrainedFurtherKeepsWhatIsSaidOfItsTexts) {
  const std::string model = directory_ + "/model", next = directory_ + "/next";
  {
    Trainer trainer(config({"steps=1"}));
    trainer.start();
    (void)trainer.run();
    trainer.save_model(model);
  }
  EXPECT_FALSE(std::filesystem::exists(model + "/generation_config.json"));
  const std::string text = R"({"eos_token_id": [10, 13]})";
  test::write_file(model + "/generation_config.json", text);
  test::write_file(model + "/tokenizer_config.json", "{}");
  test::write_file(model + "/chat_template.jinja", "{{ messages }}");
  Trainer trainer(on_book(
      {"data.seq_len=16", "data.validation=0.2", "train_batch_size=4", "steps=1", "model.from=" + model}));
  trainer.start();
  (void)trainer.run();
  trainer.save_model(next);
  EXPECT_EQ(test::read_file(next + "/generation_config.json"), text);
  EXPECT_EQ(test::read_file(next + "/tokenizer_config.json"), "{}");
  EXPECT_EQ(test::read_file(next + "/chat_template.jinja"), "{{ messages }}");
}

// The depth of drives goes by the host's memory and the number of drives; a depth that is stated stays. The
// room that the plan leaves for moves does not grow with a depth that it finds, since that would cost
// traffic.
TEST_F(TrainerLibrary, ThePlanFindsTheDepthOfTheDrives) {
  const auto plan_of = [](const RunConfig& c) {
    ModelConfig model = *c.model;
    model.vocab_size = 256;
    Hardware machine;
    machine.memory.available = 64 * kGiB;
    machine.cores.nodes = {{0, {{0, 0}, {1, 1}}}};
    machine.drives.resize(c.tiers.nvme.size(), {0, {1024 * kGiB, 1}});
    return make_run_plan(c, model, 500, machine);
  };
  const auto depth = [&](const char* host, std::vector<std::string> more) {
    more.insert(more.begin(), {std::string("tiers.host=") + host, "tiers.nvme.0.path=/nowhere/a"});
    return plan_of(config(more)).queue_depth;
  };
  EXPECT_EQ(depth("96MiB", {}), 32);
  EXPECT_EQ(depth("160MiB", {}), 40);
  EXPECT_EQ(depth("640MiB", {}), 64);
  EXPECT_EQ(depth("640MiB", {"tiers.nvme.1.path=/nowhere/b", "tiers.nvme.2.path=/nowhere/c"}), 53);
  EXPECT_EQ(depth("640MiB", {"devices=host:2", "tiers.nvme.1.path=/nowhere/b"}), 64)
      << "the ranks share memory and drives";
  EXPECT_EQ(depth("640MiB", {"aio.queue_depth=5"}), 5);
  const auto large = [&](Strings more) {
    for (const char* setting : {"model.n_layer=12", "model.n_embd=768", "model.n_head=12",
                                "tiers.device=256MiB", "tiers.host=640MiB", "tiers.nvme.0.path=/nowhere/a"})
      more.push_back(setting);
    return plan_of(config(more));
  };
  const RunPlan found = large({}), least = large({"aio.queue_depth=32"}),
                more = large({"aio.queue_depth=64"});
  EXPECT_EQ(found.queue_depth, 64);
  EXPECT_EQ(found.resident.host, least.resident.host);
  EXPECT_EQ(found.dry_run.per_step, least.dry_run.per_step);
  EXPECT_LT(more.resident.host, least.resident.host);
}

// Sizes of a GPU that nobody has.
struct SomeGpu final : OpSizes {
  std::int64_t row_groups() const override { return 264; }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return 3 << 20; }
  std::int64_t logits_bytes() const override { return 64 << 20; }
};

TEST_F(TrainerLibrary, APlanCanBeMadeForAMachineThatIsNotThere) {
  const RunConfig c =
      config({"tiers.host=64MiB", "tiers.nvme.0.path=/nowhere/a", "tiers.nvme.1.path=/nowhere/b",
              "tiers.device=24MiB", R"(optimizer={"type": "AdamW", "overlap": false})"});
  ModelConfig model = *c.model;
  model.vocab_size = 256;
  const SomeGpu gpu;
  Hardware machine;
  machine.memory.available = 512 * kGiB;
  machine.cores.nodes = {{0, {}}, {1, {}}};
  for (int cpu = 0; cpu < 64; ++cpu)
    machine.cores.nodes[static_cast<std::size_t>(cpu / 32)].cores.push_back({cpu, cpu});
  machine.drives = {{0, {1024 * kGiB, 1}}, {1, {1024 * kGiB, 2}}};
  machine.gpu = Hardware::Gpu{.sizes = &gpu, .memory = 24 * kMiB, .granule = 2 * kMiB, .numa_nodes = {1}};
  const RunPlan plan = make_run_plan(c, model, 500, machine), again = make_run_plan(c, model, 500, machine);
  EXPECT_TRUE(plan.dry_run.fits);
  EXPECT_GT(plan.dry_run.per_step[kToDevice], 0);
  EXPECT_EQ(plan.dry_run.per_step, again.dry_run.per_step);
  EXPECT_EQ(plan.cores.nodes, again.cores.nodes);
  EXPECT_EQ(plan.budgets.device, 24 * kMiB);
  EXPECT_EQ(plan.layout->options.device_granule, 2 * kMiB);
  EXPECT_EQ(plan.layout->options.state_versions, 2);  // there would be room
  EXPECT_EQ(plan.cores.device_nodes, std::vector<int>{1});
  EXPECT_GE(plan.layout->workspace_bytes(), 3 << 20);  // the GPU's scratch is counted
  EXPECT_HAS(plan.describe(), "in a phase of its own");
  EXPECT_EQ(plan.programs->timing, UpdateTiming::kSeparate);
  EXPECT_EQ(plan.budgets.host, 64 * kMiB);
  // Processes of one machine divide what is a machine's.
  machine.processes = 2;
  const RunPlan shared = make_run_plan(c, model, 500, machine);
  EXPECT_EQ(shared.budgets.host, 32 * kMiB);
  EXPECT_EQ(shared.budgets.device, 24 * kMiB);
  machine.processes = 1;
  // Less memory is refused in the same words as on a machine that is there.
  machine.gpu->memory = 4 * kMiB;
  RunConfig small = c;
  small.tiers.device = 4 * kMiB;
  const Error error = test::error_of([&] { return make_run_plan(small, model, 500, machine); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_HAS(error.hint(), "tiers.device=");
}

// How many rows of logits are computed at a time decides how gradients of the output matrix are added up.
TEST_F(TrainerLibrary, ChunksOfLogitsDoNotDependOnBudgets) {
  const RunConfig c = config(
      {"tiers.host=8GiB", "data.seq_len=32", "train_batch_size=64", "train_micro_batch_size_per_gpu=64"});
  ModelConfig model = *c.model;
  model.vocab_size = 50257;
  const SomeGpu gpu;
  Hardware machine;
  machine.memory.available = 512 * kGiB;
  machine.cores.nodes = {{0, {{0, 0}, {1, 1}}}};
  const auto workspace = [&](std::int64_t budget) {
    machine.gpu = Hardware::Gpu{.sizes = &gpu, .memory = budget, .granule = 2 * kMiB};
    RunConfig run = c;
    run.tiers.device = budget;
    return make_run_plan(run, model, 500, machine).layout->workspace_bytes();
  };
  EXPECT_EQ(workspace(300 * kMiB), workspace(64 * kGiB));
}

}  // namespace
}  // namespace zg
