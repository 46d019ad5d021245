// Runs that train adapters: what they leave, what can be made of it, and what is refused.
#include <cstring>
#include <filesystem>

#include "train/lora_fixture.hpp"
#include "ziggurat/train/generate.hpp"
#include "ziggurat/train/merge.hpp"

namespace zg {
namespace {

using test::read_file;

TEST_F(LoraRuns, LeaveAdaptersBesideAModelThatIsNotWritten) {
  const std::string before = read_file(model_ + "/model.safetensors");
  const Outcome o = train("a", kRank4 + Strings{"lora.target=[\"q_proj\", \"*down*\"]"});
  EXPECT_LT(o.losses.back(), o.losses.front());
  EXPECT_TRUE(read_file(model_ + "/model.safetensors") == before);
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/a/model"));
  const ModelConfig model = read_hf_config(model_);
  const Lora lora = AdapterWeights(adapter("a"), model).lora();
  EXPECT_EQ(lora.rank, 4);
  EXPECT_EQ(lora.alpha, 8);
  EXPECT_EQ(lora.modules, match_modules(model, "q_proj") | match_modules(model, "down_proj"));
  EXPECT_HAS(read_file(adapter("a") + "/adapter_config.json"),
             "\"base_model_name_or_path\": \"" + model_ + "\"");
}

// One rank or three, drives or none: the adapters begin alike, and one step later differ by rounding alone.
TEST_F(LoraRuns, BeginAlikeWhateverTheRanks) {
  const Strings once{"steps=1", "optimizer.params.lr=0", "train_batch_size=6"};
  (void)train("one", kRank4 + once);
  for (const Strings& place : {Strings{"devices=host:3", "zero_optimization.stage=3"},
                               Strings{"devices=host:2", "parallel.tensor=2"},
                               Strings{"devices=host:2", "parallel.tensor=2", "parallel.sequence=true"},
                               Strings{"devices=host:2", "parallel.pipeline=2"},
                               Strings{"devices=host:8", "parallel.tensor=2", "parallel.pipeline=2",
                                       "zero_optimization.stage=1", "train_batch_size=8"}}) {
    SCOPED_TRACE(testing::PrintToString(place));
    (void)train("many", kRank4 + once + place);
    EXPECT_TRUE(weights("one") == weights("many"));
    EXPECT_EQ(read_file(adapter("one") + "/adapter_config.json"),
              read_file(adapter("many") + "/adapter_config.json"));
  }
  (void)train("other", kRank4 + once + Strings{"seed=5"});
  EXPECT_FALSE(weights("one") == weights("other"));
  // A is uniform between -1 and 1 / sqrt(in), B is zero.
  const AdapterWeights read(adapter("one"), read_hf_config(model_));
  ModelConfig c = read_hf_config(model_);
  c.lora = read.lora();
  const Model model(c, DType::kF32, host_ops());
  for (const Param& p : model.units()[1].params) {
    if (!p.adapter) continue;
    std::vector<float> values(static_cast<std::size_t>(p.count()));
    read.read(p, 0, p.count(), values.data());
    double square = 0;
    for (const float v : values) square += static_cast<double>(v) * static_cast<double>(v);
    const double expected = p.init == Init::kZero ? 0 : 1.0 / (3.0 * static_cast<double>(p.cols));
    // The mean of n squares of uniform numbers, with a deviation of 0.9 of it / sqrt(n).
    EXPECT_NEAR(square / static_cast<double>(p.count()), expected, 4 * 0.9 * expected / std::sqrt(p.count()))
        << p.name;
  }
}

TEST_F(LoraRuns, GoOnFromACheckpointToTheBit) {
  for (const Strings& place : {Strings{}, Strings{"devices=host:2", "zero_optimization.stage=2"}}) {
    const Strings settings = kRank4 + Strings{"lora.dropout=0.1", "checkpoint.every=2"} + place;
    const std::string name = place.empty() ? "one" : "two";
    const Outcome whole = train(name, settings);
    (void)train(name + "half", settings + Strings{"steps=2"});
    const Outcome rest = train(name + "half", settings, "");
    EXPECT_EQ(rest.losses.size(), 2u);
    expect_tail(whole, rest);
    EXPECT_TRUE(weights(name) == weights(name + "half"));
  }
  const Error error = usage_error([&] {
    (void)train("onehalf", {"lora.rank=5", "checkpoint.every=2"}, "");
    return 0;
  });
  EXPECT_HAS(error.message(), "lora is rank 5");
}

// A run may go on with other shards, parts and stages: to the bit where the ranks that share the data are as
// many, else to rounding.
TEST_F(LoraRuns, GoOnWithOtherShardsPartsAndStages) {
  const Strings settings = kRank4 + Strings{"checkpoint.every=2", "train_batch_size=4"};
  const Outcome whole = train("whole", settings + Strings{"devices=host:2", "zero_optimization.stage=3"});
  for (const auto& [place, exact] :
       {std::pair(Strings{"devices=host:2", "zero_optimization.stage=1"}, true),
        {Strings{"devices=host:4", "zero_optimization.stage=2", "parallel.pipeline=2"}, true},
        {Strings{"devices=host:4", "zero_optimization.stage=1", "parallel.tensor=2"}, false},
        {Strings{}, false}}) {
    SCOPED_TRACE(testing::PrintToString(place));
    std::filesystem::remove_all(directory_ + "/part");
    (void)train("part", settings + Strings{"devices=host:2", "zero_optimization.stage=3", "steps=2"});
    const Outcome rest = train("part", settings + place, "");
    ASSERT_EQ(rest.losses.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_NEAR(rest.losses[i], whole.losses[i + 2], 1e-4 * whole.losses[i + 2]);
    EXPECT_TRUE(!exact || weights("whole") == weights("part"));
  }
}

// A checkpoint gives what its run would have left at its end: the adapters, or the model with them.
TEST_F(LoraRuns, ExportAdaptersAndTheMergedModel) {
  for (const Strings& place :
       {Strings{}, Strings{"devices=host:2", "parallel.tensor=2", "lora.rslora=true"}}) {
    const Outcome o = train("run", kRank4 + Strings{"checkpoint.every=4", "lora.dropout=0.1"} + place);
    const Checkpoint checkpoint(o.newest);
    const std::string out = directory_ + "/exported", merged = directory_ + "/exported-model";
    export_model(checkpoint, out);
    for (const char* file : {"/adapter_config.json", "/adapter_model.safetensors"})
      EXPECT_TRUE(read_file(out + file) == read_file(adapter("run") + file)) << file;
    export_model(checkpoint, merged, {}, ExportedModel::kMerged);
    // As `merge` does it, but for its rounding.
    const ModelConfig c = read_hf_config(merged);
    EXPECT_FALSE(c.lora.on());
    const Model model(c, DType::kF32, host_ops());
    const HfWeights before(model_, model), after(merged, model);
    const AdapterWeights adapters(adapter("run"), c);
    for (const Unit& unit : model.units()) {
      for (const Param& p : unit.params) {
        std::vector<float> expected(static_cast<std::size_t>(p.count())), values = expected;
        before.read(p, 0, p.count(), expected.data()), after.read(p, 0, p.count(), values.data());
        (void)adapters.merge(p, 0, p.count(), expected.data());
        EXPECT_TRUE(expected == values) << p.name;
      }
    }
    std::filesystem::remove_all(directory_ + "/run");
  }
  const Outcome plain = run("plain", {"steps=1", "checkpoint.every=1"});
  EXPECT_HAS(usage_error([&] {
               export_model(Checkpoint(plain.newest), directory_ + "/no", {}, ExportedModel::kMerged);
               return 0;
             }).message(),
             "trains no adapters");
}

// GPT-2, whose files have their matrices transposed.
TEST_F(LoraRuns, TrainGpt2) {
  ModelConfig c;
  c.arch = Arch::kGpt2;
  c.vocab_size = 256, c.context = 32, c.width = 24, c.layers = 2, c.heads = c.kv_heads = 4, c.head_size = 6;
  c.inner = 48;
  const std::string base = directory_ + "/gpt2";
  save_model(c, base, DType::kF32);
  const Strings settings = kRank4 + Strings{"model.from=" + base, "lora.target=[\"c_*\"]"};
  const Outcome o = train("run", settings);
  EXPECT_LT(o.losses.back(), o.losses.front());
  EXPECT_HAS(read_file(adapter("run") + "/adapter_config.json"), "\"fan_in_fan_out\": true");
  EXPECT_HAS(weights("run"), "base_model.model.transformer.h.1.mlp.c_proj.lora_B.weight");
  EXPECT_EQ(merge_adapters(base, adapter("run"), directory_ + "/merged"), 2 * 4);
  const std::vector<std::int32_t> ids{97, 108, 108, 32, 119, 111, 114, 107, 32, 97, 110, 100};
  const auto loss = [&](const std::string& model, const std::string& adapters) {
    return Generator(model, 0, adapters).loss_of(ids, {}, 12).mean();
  };
  EXPECT_NEAR(loss(directory_ + "/merged", ""), loss(base, adapter("run")), 1e-5);
  EXPECT_NE(loss(directory_ + "/merged", ""), loss(base, ""));
}

// State on drives, pinned there.
TEST_F(LoraRuns, GoOnFromPinnedState) {
  std::filesystem::create_directories(directory_ + "/drive");
  const Strings settings =
      kRank4 + Strings{"checkpoint.every=1",   "checkpoint.keep=2",
                       "checkpoint.state=pin", "tiers.host=600KiB",
                       "tiers.device=900KiB",  "tiers.nvme.0.path=" + directory_ + "/drive",
                       "bf16.enabled=true"};
  const Outcome whole = train("whole", settings);
  (void)train("part", settings + Strings{"steps=2"});
  (void)train("part", settings + Strings{"steps=3"}, "");
  const Outcome rest = train("part", settings, "");
  EXPECT_EQ(rest.losses.size(), 1u);
  expect_tail(whole, rest);
  EXPECT_TRUE(weights("whole") == weights("part"));
}

// The model's layers in tiles: the bits of one place are those of any other, of shards, of stages and of a
// run that goes on, and the numbers those of whole layers.
TEST_F(LoraRuns, GoWithTiles) {
  const Strings settings = kRank4 + Strings{"tiers.tiles=on", "lora.dropout=0.1", "checkpoint.every=2"};
  const Outcome whole = train("whole", kRank4 + Strings{"lora.dropout=0.1"}), one = train("one", settings);
  ASSERT_EQ(one.losses.size(), whole.losses.size());
  for (std::size_t i = 0; i < whole.losses.size(); ++i)
    EXPECT_NEAR(one.losses[i], whole.losses[i], 1e-5 * whole.losses[i]);
  EXPECT_HAS(Trainer(adapted("said", settings), {}).describe(), "of weights of each layer come in 7 tiles");
  (void)train("half", settings + Strings{"steps=2"});
  const Outcome rest = train("half", settings, "");
  expect_tail(one, rest);
  EXPECT_TRUE(weights("one") == weights("half"));
  // A run that goes on with whole layers.
  (void)train("changed", settings + Strings{"steps=2"});
  const Outcome changed = train("changed", kRank4 + Strings{"lora.dropout=0.1"}, "");
  EXPECT_NEAR(changed.losses.back(), whole.losses.back(), 1e-5 * whole.losses.back());
  std::filesystem::create_directories(directory_ + "/drive");
  const Strings drive{"tiers.host=600KiB", "tiers.device=900KiB",
                      "tiers.nvme.0.path=" + directory_ + "/drive"};
  EXPECT_EQ(train("drive", settings + drive).losses, one.losses);
  EXPECT_TRUE(weights("one") == weights("drive"));
  const Outcome two = train("two", settings + Strings{"devices=host:2", "zero_optimization.stage=0"});
  for (const Strings& place :
       {Strings{"devices=host:2", "zero_optimization.stage=3"},
        Strings{"devices=host:4", "parallel.pipeline=2", "zero_optimization.stage=1"}}) {
    EXPECT_EQ(train("many", settings + place).losses, two.losses);
    EXPECT_TRUE(weights("two") == weights("many"));
    std::filesystem::remove_all(directory_ + "/many");
  }
}

// State on drives, pinned there, with the tiles of the model that it stands beside.
TEST_F(LoraRuns, GoOnFromPinnedStateWithTiles) {
  std::filesystem::create_directories(directory_ + "/drive");
  const Strings settings =
      kRank4 + Strings{"checkpoint.every=1",   "checkpoint.keep=2",
                       "checkpoint.state=pin", "tiers.host=600KiB",
                       "tiers.device=900KiB",  "tiers.nvme.0.path=" + directory_ + "/drive",
                       "bf16.enabled=true",    "tiers.tiles=on"};
  const Outcome whole = train("whole", settings);
  (void)train("part", settings + Strings{"steps=2"});
  const Outcome rest = train("part", settings, "");
  EXPECT_EQ(rest.losses.size(), 2u);
  expect_tail(whole, rest);
  EXPECT_TRUE(weights("whole") == weights("part"));
}

// A layer that the device has no room for comes in tiles by itself; without them the run is refused.
TEST_F(LoraRuns, LayersLargerThanTheDeviceComeInTiles) {
  ModelConfig c = test::FamilyFile("qwen3").config();
  c.vocab_size = 256, c.width = 256, c.heads = 4, c.kv_heads = 2, c.head_size = 64, c.inner = 1024,
  c.layers = 2;
  const std::string large = directory_ + "/large";
  save_model(c, large, DType::kF32);
  const std::int64_t layer = (256 * 64 * (2 * 4 + 2 * 2) + 3 * 256 * 1024) * std::int64_t{sizeof(float)};
  const Strings settings = kRank4 + Strings{"model.from=" + large, "tiers.host=64MiB", "steps=2"};
  const Strings device{fmt::format("tiers.device={}", layer / 2)};
  const RunConfig run = adapted("said", settings + device);
  EXPECT_HAS(Trainer(run, {}).describe(), "since whole ones do not fit");
  const Outcome tiles = train("tiles", settings + device), whole = train("whole", settings);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(tiles.losses[i], whole.losses[i], 1e-5 * whole.losses[i]);
  const Error error = test::error_of(
      [&] { Trainer trainer(adapted("refused", settings + device + Strings{"tiers.tiles=off"}), {}); });
  EXPECT_EQ(error.code(), Errc::kMemory);
}

TEST_F(LoraRuns, StartFromAdaptersAndLeaveThemAsTheyWere) {
  (void)train("first", kRank4);
  const Outcome still = train("second", {"lora.from=" + adapter("first"), "optimizer.params.lr=0"});
  EXPECT_TRUE(weights("first") == weights("second"));
  EXPECT_EQ(read_file(adapter("first") + "/adapter_config.json"),
            read_file(adapter("second") + "/adapter_config.json"));
  EXPECT_LT(still.losses.front(), train("fresh", kRank4).losses.front());
}

// Evaluated with its adapters, or merged with them: the same loss, to the rounding of bf16 where the merged
// weights are rounded.
TEST_F(LoraRuns, AreEvaluatedAndMerged) {
  (void)train("run", kRank4 + Strings{"lora.rslora=true"});
  EXPECT_EQ(merge_adapters(model_, adapter("run"), directory_ + "/merged"), 3 * 7);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(static_cast<std::int32_t>("all work and no play "[i % 21]));
  const auto loss = [&](const std::string& model, const std::string& adapters) {
    return Generator(model, 0, adapters).loss_of(ids, {}, 16).mean();
  };
  const double base = loss(model_, ""), with = loss(model_, adapter("run")),
               merged = loss(directory_ + "/merged", "");
  EXPECT_LT(with, base);
  EXPECT_NEAR(with, merged, 0.02 * with);
  EXPECT_LT(std::abs(with - merged), 0.2 * (base - with));
  EXPECT_HAS(read_file(directory_ + "/merged/config.json"), "bfloat16");
  // What is not adapted keeps its bytes.
  const ModelConfig c = read_hf_config(model_);
  const Model model(c, DType::kF32, host_ops());
  const HfWeights before(model_, model), after(directory_ + "/merged", model);
  for (const Param& p : model.units()[1].params) {
    std::vector<float> a(static_cast<std::size_t>(p.count())), b = a;
    before.read(p, 0, p.count(), a.data()), after.read(p, 0, p.count(), b.data());
    EXPECT_EQ(a == b, p.vector) << p.name;
  }
  EXPECT_EQ(usage_error([&] { return merge_adapters(model_, adapter("run"), model_); }).where(), model_);
}

TEST_F(LoraRuns, RefuseWhatCannotBe) {
  const auto refused = [&](const Strings& settings, const std::string& where, const std::string& said) {
    SCOPED_TRACE(said);
    const Error error = usage_error([&] {
      const RunConfig run = adapted("refused", settings);
      Trainer trainer(run, {});
      return 0;
    });
    EXPECT_HAS(error.where(), where);
    EXPECT_HAS(error.message(), said);
  };
  refused({"lora.rank=0"}, "lora.rank", "found 0");
  refused({"lora.alpha=3"}, "lora.rank", "is missing");
  refused({"lora.rank=2", "lora.target=[\"c_attn\"]"}, "lora.target", "matches no module of qwen3");
  refused({"lora.rank=2", "lora.target=[]"}, "lora.target", "expected");
  refused({"lora.rank=2", "lora.from=x"}, "lora.rank", "is said by the adapters of lora.from");
  refused({"lora.from=" + directory_ + "/none"}, directory_ + "/none", "");
  refused({"lora.rank=2", "optimizer.param_groups=[{\"params\": \"*norm*\", \"frozen\": true}]"},
          "optimizer.param_groups", "all but the adapters is frozen already");
  refused({"lora.rank=2", "optimizer.param_groups=[{\"params\": \"*norm*\", \"lr_factor\": 2}]"},
          "optimizer.param_groups.0.params", "matches no parameter");
  // A group of adapters has a learning rate of its own.
  EXPECT_NO_THROW(Trainer(adapted("groups", {"lora.rank=2",
                                             "optimizer.param_groups=[{\"params\": \"*lora_B*\", "
                                             "\"lr_factor\": 16}]"}),
                          {}));
  // A model that is new.
  EXPECT_HAS(usage_error([&] {
               Trainer trainer(on_book({"lora.rank=2"}), {});
               return 0;
             }).message(),
             "the model is new");
}

}  // namespace
}  // namespace zg
