// Runs that go on from a checkpoint: as if they had not stopped, to the bit, wherever they go on; and what a
// resumed run may not change.
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/copies.hpp"
#include "ziggurat/optim/state.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

struct Case {
  const char* name;
  Strings settings;
};
const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"AdamW", {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}})"}},
      {"AdamWEarly", {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})", "gradient_clipping=0"}},
      {"AdamWSeparate", {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "overlap": false})"}},
      {"AdamWSplit",
       {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "split"})", "bf16.enabled=true"}},
      {"AdamWBf16",
       {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "bf16"})", "bf16.enabled=true"}},
      {"AdamWInt8",
       {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "int8"})", "bf16.enabled=true"}},
      {"AdamWInt8Fp32", {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "state": "int8"})"}},
      {"Lion", {R"(optimizer={"type": "Lion", "params": {"lr": 1e-3}, "state": "int8"})"}},
      {"Momentum", {R"(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}, "state": "bf16"})"}},
      {"Sgd", {R"(optimizer={"type": "SGD", "params": {"lr": 0.1}})"}},
      // Some steps are skipped before the checkpoint, and some after it.
      {"Fp16",
       {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})",
        R"(fp16={"enabled": true, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 2})"}},
      {"Schedule",
       {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})", "scheduler.type=WarmupCosineLR",
        "scheduler.params.warmup_num_steps=2", "scheduler.params.total_num_steps=6"}},
      {"Dropout",
       {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}})", "model.dropout.embedding=0.2",
        "model.dropout.residual=0.1"}},
      {"GroupsAndFrozen", {R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "param_groups": [
          {"params": ["wpe.weight", "h.0.mlp.*"], "frozen": true}, {"params": ["*bias"], "lr_factor": 2}]})"}}};
  return all;
}

class Resumed : public CheckpointFixture, public testing::WithParamInterface<Case> {};

TEST_P(Resumed, GoesOnToTheBit) {
  const Strings& settings = GetParam().settings;
  const Outcome whole = run("whole", settings + Strings{"steps=7"});
  // Stops after three steps, and after two more.
  const Outcome three = run("parts", settings);
  EXPECT_EQ(three.losses, std::vector<double>(whole.losses.begin(), whole.losses.begin() + 3));
  const std::string kept = directory_ + "/kept";
  fs::copy(directory_ + "/parts/checkpoints", kept, fs::copy_options::recursive);
  const Outcome five = run("parts", settings + Strings{"steps=5"}, "");
  EXPECT_EQ(five.losses.size(), 2u);
  const Outcome seven = run("parts", settings + Strings{"steps=7"}, "");
  EXPECT_EQ(seven.losses.size(), 2u);
  expect_tail(whole, seven);
  EXPECT_EQ(whole.summary.skipped, seven.summary.skipped);
  EXPECT_EQ(whole.summary.loss_scale, seven.summary.loss_scale);
  if (std::string(GetParam().name) == "Fp16") {
    EXPECT_GT(three.summary.skipped, 0);
    EXPECT_GT(whole.summary.skipped, three.summary.skipped);
  }
  // From the first checkpoint, in other places: on drives, with little memory, through another back end, on
  // one thread; and all in the device.
  fs::create_directories(directory_ + "/disk");
  const Outcome elsewhere = run("elsewhere",
                                settings + Strings{"steps=7", "tiers.device=600KiB", "tiers.host=300KiB",
                                                   "tiers.nvme.0.path=" + directory_ + "/disk",
                                                   "aio.backend=threads", "threads.compute=1"},
                                kept);
  EXPECT_GT(elsewhere.summary.measured.nvme_read(), 0);
  expect_tail(whole, elsewhere);
  fs::create_directories(directory_ + "/again");
  expect_tail(whole, run("again", settings + Strings{"steps=7", "tiers.device=64MiB"}, kept));
}

INSTANTIATE_TEST_SUITE_P(Runs, Resumed, testing::ValuesIn(cases()),
                         [](const auto& of) { return std::string(of.param.name); });

class Checkpoints : public CheckpointFixture {
 protected:
  Strings ranks(int n, const std::string& zero) const {
    return {fmt::format("devices=host:{}", n), "train_micro_batch_size_per_gpu=1",
            "zero_optimization=" + zero};
  }
  // What the ranks of a trainer hold, by the checkpoint that they write.
  static constexpr const char* kStages[] = {R"({"stage": 0})", R"({"stage": 2})", R"({"stage": 3})",
                                            R"({"stage": 3, "zero_hpz_partition_size": 2})"};
};

TEST_F(Checkpoints, OfFourRanksGoOnUnderEveryStage) {
  const Outcome whole = run("whole", ranks(4, kStages[2]) + Strings{"steps=6"});
  const Outcome three = run("three", ranks(4, kStages[2]));
  EXPECT_EQ(Checkpoint(three.newest).manifest().files.size(), 4u);
  int i = 0;
  for (const char* stage : kStages) {
    SCOPED_TRACE(stage);
    const std::string out = fmt::format("rest{}", i++);
    expect_tail(whole, run(out, ranks(4, stage) + Strings{"steps=6"}, three.newest));
  }
}

// Five topologies, one after the other: what each has loaded it saves again, byte by byte.
TEST_F(Checkpoints, PassThroughOtherNumbersOfRanks) {
  std::string path = run("begin", {}).newest;
  const Tensors tensors = tensors_in(path);
  int i = 0;
  for (const Strings& topology : {ranks(4, kStages[2]), ranks(3, kStages[1]) + Strings{"train_batch_size=3"},
                                  ranks(2, kStages[0]), ranks(4, kStages[3]), ranks(1, kStages[0])}) {
    SCOPED_TRACE(i);
    // One step is done, which changes no weight.
    const Strings still{fmt::format("steps={}", 4 + i), "optimizer.params.lr=0",
                        R"(checkpoint.allow=["train_batch_size", "optimizer.params.lr"])"};
    const Outcome next = run(fmt::format("next{}", i++), topology + still, path);
    for (const auto& [name, bytes] : tensors) {
      if (name.find(".exp_avg") != name.npos) continue;
      EXPECT_TRUE(bytes == next.tensors.at(name)) << name;
    }
    Trainer trainer(config("look", topology + still), {.resume = path});
    trainer.start();
    Tensors loaded;
    for (int r = 0; r < trainer.local_ranks(); ++r) {
      if (trainer.plans()[static_cast<std::size_t>(r)].layout->options.sharding.replica() > 0) continue;
      trainer.rank(r).engine().save_state([&](const StateTile& tile) {
        const auto put = [&](const std::string& name, const View& v) {
          std::vector<char>& all = loaded[name];
          const auto width = static_cast<std::int64_t>(size_of(v.dtype));
          all.resize(std::max(all.size(), static_cast<std::size_t>((tile.first + v.count()) * width)));
          std::memcpy(all.data() + tile.first * width, v.data, static_cast<std::size_t>(v.count() * width));
        };
        put(tile.param->name, tile.master);
        put(tile.param->name + ".exp_avg", tile.moment[0]);
        put(tile.param->name + ".exp_avg_sq", tile.moment[1]);
      });
    }
    EXPECT_TRUE(loaded == tensors_in(path));
    path = next.newest;
  }
}

TEST_F(Checkpoints, AreWrittenEverySoManyStepsAndTheNewestAreKept) {
  struct Seen final : TrainObserver {
    std::string path;
    std::vector<std::vector<std::int64_t>> steps;
    void on_checkpoint(std::int64_t) override {
      steps.emplace_back();
      for (const CheckpointEntry& entry : list_checkpoints(path)) steps.back().push_back(entry.step);
    }
  } seen;
  Trainer trainer(config("out", {"steps=7", "checkpoint.every=2", "checkpoint.keep=2"}));
  seen.path = trainer.plan().config.checkpoint.path;
  trainer.start();
  EXPECT_HAS(trainer.describe(), "a kill would lose up to 2 steps");
  const RunSummary summary = trainer.run({&seen});
  EXPECT_EQ(summary.measured, summary.formula);
  const std::vector<std::vector<std::int64_t>> expected{{}, {2}, {4, 2}, {6, 4}};
  EXPECT_EQ(seen.steps, expected);
  std::vector<std::int64_t> steps;
  for (const CheckpointEntry& entry : list_checkpoints(seen.path)) steps.push_back(entry.step);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{7, 6}));
  EXPECT_TRUE(unfinished_checkpoints(seen.path).empty());
}

TEST_F(Checkpoints, AreWrittenByTime) {
  struct Count final : TrainObserver {
    int all = 0;
    void on_checkpoint(std::int64_t) override { ++all; }
  } count;
  Trainer trainer(config("out", {"steps=4", "checkpoint.every=0", "checkpoint.every_seconds=1e-9"}));
  trainer.start();
  (void)trainer.run({&count});
  EXPECT_EQ(count.all, 4);
}

TEST_F(Checkpoints, NoneAreWrittenUnlessTheyAreAskedFor) {
  Trainer trainer(config("out", {"checkpoint.every=0"}));
  trainer.start();
  (void)trainer.run();
  EXPECT_FALSE(fs::exists(directory_ + "/out/checkpoints"));
  EXPECT_HAS(trainer.describe(), "a kill would lose the whole run");
}

TEST_F(Checkpoints, ANewRunDoesNotReplaceThoseOfAnother) {
  (void)run("out", {});
  Trainer trainer(config("out", {}));
  const Error error = usage_error([&] { return trainer.start(), 0; });
  EXPECT_HAS(error.message(), "step 3");
  EXPECT_HAS(error.hint(), "--resume");
  EXPECT_EQ(list_checkpoints(directory_ + "/out/checkpoints").size(), 1u);
}

TEST_F(Checkpoints, WithoutRoomTheRunIsRefused) {
  Trainer trainer(config("out", {"checkpoint.keep=1000000000"}));
  const Error error = usage_error([&] { return trainer.start(), 0; });
  EXPECT_HAS(error.where(), "checkpoint.path");
  EXPECT_HAS(error.hint(), "checkpoint.keep");
}

// ---- what a resumed run may change

TEST_F(Checkpoints, WhatChangesBitsIsRefusedUnlessItIsAllowed) {
  const std::string from = run("out", {}).newest;
  const auto refused = [&](const Strings& change, const std::string& key) {
    SCOPED_TRACE(key);
    const Error error =
        usage_error([&] { return Trainer(config("new", change + Strings{"steps=4"}), {.resume = from}), 0; });
    EXPECT_EQ(error.where(), from);
    EXPECT_HAS(error.message(), key + " is ");
    return error;
  };
  write("other.txt", std::string(4000, 'x') + read(directory_ + "/book.txt"));
  const std::vector<std::pair<Strings, std::string>> changes{
      {{"seed=2"}, "seed"},
      {{"optimizer.params.lr=0.5"}, "optimizer.params.lr"},
      {{"optimizer.params.weight_decay=0.5"}, "optimizer.params.weight_decay"},
      {{"gradient_clipping=0.25"}, "gradient_clipping"},
      {{"train_batch_size=8"}, "train_batch_size"},
      {{"train_micro_batch_size_per_gpu=1"}, "train_micro_batch_size_per_gpu"},
      {{"data.seq_len=8"}, "data.seq_len"},
      {{"model.dropout.embedding=0.5"}, "model.dropout.embedding"},
      {{"model.dropout.residual=0.5"}, "model.dropout.residual"},
      {{"data.train=" + directory_ + "/other.txt"}, "data.train"},
      {{R"(scheduler={"type": "WarmupLR"})"}, "scheduler.type"},
      {{"bf16.enabled=true"}, "precision"}};
  for (const auto& [change, key] : changes) {
    EXPECT_HAS(refused(change, key).hint(), "checkpoint.allow");
    std::string all;
    for (const auto& [ignored, one] : changes) all += "\"" + one + "\", ";
    all += R"("communication_data_type", "gradient_accumulation_steps", "scheduler.params.warmup_max_lr")";
    if (key == "precision") continue;  // the tensors fit
    Trainer allowed(config("new", change + Strings{"steps=4", "checkpoint.allow=[" + all + "]"}),
                    {.resume = from});
    EXPECT_EQ(allowed.first_step(), 3);
  }
  EXPECT_HAS_NOT(refused({"model.n_layer=2"}, "model.layers").hint(), "checkpoint.allow");
  EXPECT_HAS(refused({"optimizer.state=int8"}, "optimizer.state").hint(), "checkpoint.allow");
  // What changes no bit is taken.
  Trainer taken(config("new", {"steps=9", "eval.every=1", "eval.batches=3", "tiers.host=64MiB",
                               "tiers.device=64MiB", "threads.compute=1", "zero_optimization.stage=3",
                               "activation_checkpointing.recompute=false", "optimizer.overlap=false"}),
                {.resume = from});
  EXPECT_EQ(taken.first_step(), 3);
}

TEST_F(Checkpoints, SplitAndWholeMastersAreTaken) {
  const Strings bf16{"bf16.enabled=true"};
  const Outcome whole = run("whole", bf16 + Strings{"steps=6"});
  const std::string three = run("three", bf16).newest;
  expect_tail(whole, run("rest", bf16 + Strings{"steps=6", "optimizer.state=split"}, three));
}

// Formats of the state that do not hold each other's values are converted where that is allowed: values that
// the new format has stay as they are.
TEST_F(Checkpoints, OtherFormatsOfTheStateAreTakenByChoice) {
  const Strings bf16{"bf16.enabled=true"};
  const auto with = [&](const char* state) {
    return bf16 +
           Strings{fmt::format("optimizer.state={}", state), R"(checkpoint.allow=["optimizer.state"])"};
  };
  const Outcome whole = run("whole", bf16 + Strings{"steps=6"});
  int i = 0;
  for (const char* before : {"fp32", "bf16", "int8"}) {
    const std::string three = run(fmt::format("three{}", i++), with(before)).newest;
    for (const char* after : {"split", "bf16", "int8"}) {
      SCOPED_TRACE(fmt::format("{}, then {}", before, after));
      const Outcome rest = run(fmt::format("rest{}", i++), with(after) + Strings{"steps=6"}, three);
      ASSERT_EQ(rest.losses.size(), 3u);
      for (std::size_t s = 0; s < 3; ++s) EXPECT_NEAR(rest.losses[s] / whole.losses[3 + s], 1, 2e-2);
      // Loaded and saved, without a step between.
      Trainer trainer(config("look", with(after) + Strings{"steps=6"}), {.resume = three});
      trainer.start();
      const Checkpoint from(three);
      trainer.rank().engine().save_state([&](const StateTile& tile) {
        std::vector<float> masters(static_cast<std::size_t>(tile.count));
        from.read(tile.param->name, tile.first, tile.count, masters.data());
        EXPECT_EQ(std::memcmp(masters.data(), tile.master.data, masters.size() * sizeof(float)), 0);
        for (int m = 0; m < 2; ++m) {
          const std::string name = tile.param->name + (m == 0 ? ".exp_avg" : ".exp_avg_sq");
          std::vector<float> was(masters.size()), now(masters.size());
          read_values(from, name, m, {tile.first, 1, tile.count, 0}, was.data());
          const OptimizerState state{{}, {tile.moment[0], tile.moment[1]}, {tile.scale[0], tile.scale[1]}};
          const Layout& layout = *trainer.plan().layout;
          read_moments(layout.state().format(), state, m, tile.count, now.data());
          float largest = 0;
          for (const float value : was) largest = std::max(largest, std::abs(value));
          const bool exact = std::string(after) == "split" || std::string(after) == before;
          for (std::size_t e = 0; e < was.size(); ++e) {
            const float error = std::abs(now[e] - was[e]), size = std::abs(was[e]);
            if (exact) {
              ASSERT_EQ(now[e], was[e]) << name;
            } else if (std::string(after) == "bf16") {
              ASSERT_LE(error, size / 256) << name;
            } else {  // half a step of the code
              ASSERT_LE(error, size / 16 + largest / 1e5f) << name;
            }
          }
        }
      });
    }
  }
}

TEST_F(Checkpoints, OfALaterStepThanTheRunHasAreRefused) {
  const std::string from = run("out", {}).newest;
  const Error error = usage_error([&] { return Trainer(config("new", {"steps=2"}), {.resume = from}), 0; });
  EXPECT_HAS(error.message(), "step 3, and steps is 2");
}

TEST_F(Checkpoints, WithoutAnyTheRunBeginsWithItsFirstStep) {
  const Outcome fresh = run("fresh", {}, "");
  EXPECT_EQ(fresh.losses.size(), 3u);
  EXPECT_HAS(usage_error([&] {
               return Trainer(config("new", {}), {.resume = directory_ + "/nothing"}), 0;
             }).message(),
             "is no checkpoint");
}

TEST_F(Checkpoints, OfAFinishedRunLeavesNothingToDo) {
  (void)run("out", {});
  Trainer trainer(config("out", {}), {.resume = ""});
  trainer.start();
  EXPECT_EQ(trainer.run().steps, 0);
  trainer.save_model(directory_ + "/out/model");
  EXPECT_TRUE(fs::exists(directory_ + "/out/model/model.safetensors"));
}

}  // namespace
}  // namespace zg
