// Runs whose layers are larger than the device: the plan cuts them into tiles, says so, and foretells every
// byte.
#include <cmath>

#include "train/checkpoint_fixture.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {
namespace {

class TileRuns : public RunTest {
 protected:
  static constexpr std::int64_t kLayer = 12 * 384 * 384 * 4;  // its matrices in fp32

  Strings settings(std::int64_t device, const Strings& more = {}) const {
    Strings all{"data.seq_len=16",
                "model.n_embd=384",
                "model.n_head=4",
                "model.n_positions=16",
                "data.validation=0.2",
                "train_batch_size=2",
                "train_micro_batch_size_per_gpu=1",
                "steps=2",
                "eval.batches=1",
                "gradient_clipping=0.5",
                fmt::format("tiers.device={}", device)};
    return all + more;
  }
  struct Losses final : TrainObserver {
    std::vector<double> all;
    void on_step(const StepRecord& r) override { all.push_back(r.result.loss); }
  };
  struct Outcome {
    std::vector<double> losses;
    std::string model, text;
    std::int64_t peak = 0;
  };
  Outcome train(std::int64_t device, const Strings& more) {
    Trainer trainer(on_book(settings(device, more)));
    trainer.start();
    Losses losses;
    const RunSummary summary = trainer.run({&losses});
    EXPECT_EQ(summary.measured, summary.formula);
    EXPECT_EQ(summary.comm, summary.comm_formula);
    trainer.save_model(directory_ + "/model");
    return {losses.all, test::read_file(directory_ + "/model/model.safetensors"), trainer.describe(),
            trainer.rank().device().arena().peak()};
  }
  Strings on_drive() const {
    std::filesystem::create_directories(directory_ + "/drive");
    return {"tiers.host=6MiB", "tiers.nvme.0.path=" + directory_ + "/drive"};
  }
  // On a machine with room for much more.
  RunPlan plan(std::int64_t device, const Strings& more, int rank = 0) const {
    const RunConfig run = on_book(settings(device, more));
    ModelConfig model = *run.model;
    model.vocab_size = 256;
    Hardware machine;
    machine.memory.available = 8 * kGiB;
    machine.cores.nodes = {{0, {{0, 0}}}};
    return make_run_plan(run, model, 500, machine, rank);
  }
  // What a run that is refused is told of the smallest budgets.
  struct Smallest {
    std::int64_t device = 0, host = 0;
    std::string hint;
  };
  Smallest smallest(std::int64_t device, const Strings& more, int rank = 0) const {
    const Error error = test::error_of([&] { return plan(device, more, rank); });
    EXPECT_EQ(error.code(), Errc::kMemory);
    const auto number_of = [&](const std::string& key) {
      return std::stoll(error.hint().substr(error.hint().find(key) + key.size()));
    };
    return {number_of("tiers.device="), number_of("tiers.host="), error.hint()};
  }
  static void expect_near(const Outcome& a, const Outcome& b) {
    ASSERT_EQ(a.losses.size(), b.losses.size());
    for (std::size_t i = 0; i < a.losses.size(); ++i)
      EXPECT_NEAR(a.losses[i], b.losses[i], 1e-5 * b.losses[i]);
    EXPECT_EQ(a.model.size(), b.model.size());
  }
};

TEST_F(TileRuns, ALayerOfFourTimesTheDeviceTrains) {
  const Outcome whole = train(64 * kMiB, {"tiers.host=64MiB"});
  EXPECT_EQ(whole.text.find("tiles "), std::string::npos);
  const Outcome host = train(kLayer / 4, {"tiers.host=64MiB"});
  EXPECT_HAS(host.text, "tiles      the 6.8 MiB of weights of each layer come in 80 tiles");
  EXPECT_HAS(host.text, "since whole ones do not fit");
  EXPECT_LE(host.peak, kLayer / 4);
  expect_near(host, whole);
  const Outcome nvme = train(kLayer / 4, on_drive());
  EXPECT_LE(nvme.peak, kLayer / 4);
  // Other budgets, and tiles without need: the same bits.
  const Outcome large = train(kLayer / 2, {"tiers.host=64MiB"}),
                asked = train(64 * kMiB, {"tiers.host=64MiB", "tiers.tiles=on"});
  EXPECT_EQ(asked.text.find("do not fit"), std::string::npos);
  for (const Outcome* same : {&nvme, &large, &asked}) {
    EXPECT_EQ(same->losses, host.losses);
    EXPECT_TRUE(same->model == host.model);
  }
}

// A vocabulary whose table is as large as a layer, and tied to the output matrix.
TEST_F(TileRuns, ATableOfFourTimesTheDeviceTrains) {
  constexpr std::int64_t kTable = 5000 * 384 * 4;
  const Strings large{"model.vocab_size=5000"};
  const Outcome whole = train(64 * kMiB, large + Strings{"tiers.host=128MiB"});
  const Outcome host = train(kTable / 4, large + Strings{"tiers.host=128MiB"});
  EXPECT_HAS(host.text, "the 7.3 MiB of the embedding in 32, of at most");
  EXPECT_LE(host.peak, kTable / 4);
  expect_near(host, whole);
  const Outcome nvme = train(kTable / 4, large + on_drive());
  EXPECT_LE(nvme.peak, kTable / 4);
  EXPECT_EQ(nvme.losses, host.losses);
  EXPECT_TRUE(nvme.model == host.model);
  const Strings stages{"devices=host:2", "tiers.host=200MiB", "parallel.pipeline=2"};
  const Outcome staged = train(kTable / 4, large + stages);
  EXPECT_EQ(staged.losses, host.losses);
  EXPECT_TRUE(staged.model == host.model);
}

TEST_F(TileRuns, OfSeveralRanksHaveTheBitsOfAnyStage) {
  const Strings ranks{"devices=host:2", "tiers.host=160MiB", "train_batch_size=4"};
  const Outcome zero = train(kLayer / 4, ranks + Strings{"zero_optimization.stage=0"});
  EXPECT_HAS(zero.text, "tiles ");
  for (const char* stage : {"zero_optimization.stage=1", "zero_optimization.stage=3"}) {
    const Outcome other = train(kLayer / 4, ranks + Strings{stage});
    EXPECT_EQ(other.losses, zero.losses) << stage;
    EXPECT_TRUE(other.model == zero.model) << stage;
  }
}

// What is refused says how small it could get, and that does.
TEST_F(TileRuns, TheSmallestBudgetsAreThoseOfTiles) {
  const Strings host{"tiers.host=64MiB"}, whole{"tiers.host=64MiB", "tiers.tiles=off"};
  const Smallest tiles = smallest(100000, host);
  EXPECT_HAS(tiles.hint, "where each layer of 6.8 MiB is multiplied in tiles");
  EXPECT_LT(tiles.device, kLayer / 4);
  EXPECT_GT(plan(tiles.device, host).tile_bytes(), 0);
  EXPECT_THROW(plan(tiles.device - 4096, host), Error);
  const Smallest of_whole = smallest(100000, whole);
  EXPECT_EQ(of_whole.hint.find("in tiles"), std::string::npos);
  EXPECT_GT(of_whole.device, kLayer);
  EXPECT_EQ(plan(of_whole.device, host).tile_bytes(), 0);
  EXPECT_GT(plan(of_whole.device - 4096, host).tile_bytes(), 0);
}

// One of two stages has room for whole layers; the other, which has three of the four layers, has not. Both
// are in tiles, within the budgets, and with the bits of tiles that everything has room for.
TEST_F(TileRuns, AllStagesAreInTilesWhereOneNeedsThem) {
  const Strings stages{"devices=host:2", "parallel.pipeline=2", "parallel.stage_layers=[1,3]",
                       "model.n_layer=4"};
  const auto on_host = [&](std::int64_t host) {
    return stages + Strings{fmt::format("tiers.host={}", host)};
  };
  const Strings whole{"tiers.tiles=off"};
  const std::int64_t device = smallest(100000, on_host(64 * kMiB) + whole, 1).device;
  const std::int64_t about = smallest(device, on_host(64 * kMiB) + whole, 1).host, host = about / 50 * 49;
  // What is told is the host's budget for both ranks, to within the sizes of segments, which depend on it.
  EXPECT_EQ(plan(device, on_host(about / 50 * 51) + whole, 1).tile_bytes(), 0);
  EXPECT_THROW(plan(device, on_host(host) + whole, 1), Error);
  EXPECT_EQ(plan(device, on_host(host), 0).tile_bytes(), 0);
  EXPECT_GT(plan(device, on_host(host), 1).tile_bytes(), 0);
  const Trainer planned(on_book(settings(device, on_host(host))));
  for (const RunPlan& plan : planned.plans()) {
    EXPECT_GT(plan.tile_bytes(), 0);
    EXPECT_LE(plan.budgets.host, host / 2);
    EXPECT_LE(plan.budgets.device, device);
  }
  const Outcome tight = train(device, on_host(host)),
                ample = train(64 * kMiB, on_host(400 * kMiB) + Strings{"tiers.tiles=on"});
  EXPECT_LE(tight.peak, device);
  EXPECT_EQ(tight.losses, ample.losses);
  EXPECT_TRUE(tight.model == ample.model);
}

// Whole layers to shards of tiles.
TEST_F(TileRuns, OfSeveralRanksGoOnFromACheckpoint) {
  const std::string path = directory_ + "/checkpoints";
  {
    Trainer whole(on_book(settings(
        64 * kMiB, {"tiers.host=64MiB", "checkpoint.every=1", "checkpoint.path=" + path, "steps=1"})));
    whole.start();
    (void)whole.run({});
  }
  const std::string from = list_checkpoints(path).front().path;
  const auto rest = [&](std::int64_t device, const Strings& more) {
    Trainer trainer(on_book(settings(device, Strings{"tiers.host=64MiB"} + more)), {.resume = from});
    trainer.start();
    Losses losses;
    (void)trainer.run({&losses});
    return Outcome{losses.all, "", trainer.describe()};
  };
  const Outcome one = rest(64 * kMiB, {});
  const Outcome two = rest(kLayer / 4, {"devices=host:2", "zero_optimization.stage=3"});
  EXPECT_HAS(two.text, "tiles ");
  ASSERT_EQ(one.losses.size(), 1u);
  expect_near(two, one);
}

// The parts of a layer that do not fit as a whole either, and the stages of a pipeline.
TEST_F(TileRuns, GoWithPartsAndStages) {
  const Outcome whole = train(64 * kMiB, {"tiers.host=64MiB"});
  const Strings ranks{"devices=host:2", "tiers.host=160MiB"};
  const Outcome parts = train(kLayer / 4, ranks + Strings{"parallel.tensor=2"});
  EXPECT_HAS(parts.text, "tiles      the 3.4 MiB of weights of each layer");
  expect_near(parts, whole);
  const Outcome tiles = train(kLayer / 4, {"tiers.host=64MiB"});
  const Outcome stages = train(kLayer / 4, ranks + Strings{"parallel.pipeline=2"});
  EXPECT_HAS(stages.text, "tiles ");
  EXPECT_EQ(stages.losses, tiles.losses);
  EXPECT_TRUE(stages.model == tiles.model);
}

// A rank saves its pieces of all tiles. The tensors are those of ranks that hold whole tiles, bit by bit, and
// both go on from either, copied or pinned on a drive.
TEST_F(TileRuns, ShardsOfTilesAreSavedAndGoOn) {
  std::filesystem::create_directories(directory_ + "/drive");
  const Strings ranks{"devices=host:2", "tiers.host=160MiB",    "checkpoint.every=1",
                      "eval.every=0",   "optimizer.type=AdamW", "steps=1"};
  const Strings pinned{"tiers.host=16MiB", "checkpoint.state=pin",
                       "tiers.nvme.0.path=" + directory_ + "/drive"};
  int number = 0;
  struct Saved {
    std::vector<double> losses;
    std::string path;
    Tensors tensors;
  };
  const auto go = [&](const Strings& more, const std::optional<std::string>& from = {}) {
    const std::string path = fmt::format("{}/{}", directory_, ++number);
    Trainer trainer(on_book(settings(kLayer / 4, ranks + more + Strings{"checkpoint.path=" + path})),
                    {.resume = from});
    EXPECT_HAS(trainer.describe(), "tiles ");
    trainer.start();
    Losses losses;
    const RunSummary summary = trainer.run({&losses});
    EXPECT_EQ(summary.measured, summary.formula);
    const std::string newest = list_checkpoints(path).front().path;
    return Saved{losses.all, newest, tensors_in(newest)};
  };
  const Strings zero{"zero_optimization.stage=0"}, one{"zero_optimization.stage=1"},
      three{"zero_optimization.stage=3"};
  const Strings frozen{R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2}, "param_groups": [
      {"params": ["h.0.mlp.*"], "frozen": true}]})"};
  for (const Strings& more : {Strings{}, Strings{"optimizer.state=int8"}, frozen}) {
    SCOPED_TRACE(testing::PrintToString(more));
    const Saved whole = go(more + zero + Strings{"steps=2"}), first = go(more + zero);
    EXPECT_EQ(Checkpoint(first.path).manifest().format, 1);
    // Of the others one way.
    std::vector<Strings> kinds{three};
    if (more.empty()) kinds = {one, three, three + pinned};
    for (const Strings& kind : kinds) {
      SCOPED_TRACE(testing::PrintToString(kind));
      const Saved saved = go(more + kind);
      EXPECT_EQ(Checkpoint(saved.path).manifest().format, kind.size() == 1 ? 2 : 3);
      EXPECT_TRUE(saved.tensors == first.tensors);
      for (const Saved& next : {go(more + kind + Strings{"steps=2"}, saved.path),
                                go(more + zero + Strings{"steps=2"}, saved.path)}) {
        ASSERT_EQ(next.losses.size(), 1u);
        EXPECT_EQ(next.losses[0], whole.losses[1]);
        EXPECT_TRUE(next.tensors == whole.tensors);
      }
    }
    EXPECT_EQ(go(more + three + Strings{"steps=2"}, first.path).losses[0], whole.losses[1]);
  }
}

}  // namespace
}  // namespace zg
