// Runs whose layers are kept in FP8 (tiers.weights): their bits in every place, what they move, how they go
// on from checkpoints, and what is refused.
#include <filesystem>

#include "train/checkpoint_fixture.hpp"

namespace zg {
namespace {

class Fp8Runs : public CheckpointFixture {
 protected:
  Fp8Runs() {
    for (const char* drive : {"/drive", "/drive2"}) std::filesystem::create_directories(directory_ + drive);
  }
  // A model whose layers are mostly matrices.
  static Strings settings(const Strings& more) {
    return Strings{"model.n_embd=64", "model.n_layer=3", "bf16.enabled=true", "tiers.weights=fp8"} + more;
  }
  Outcome train(const std::string& out, const Strings& more, std::optional<std::string> resume = {}) const {
    if (!resume) std::filesystem::remove_all(directory_ + "/" + out);
    const Outcome o = run(out, settings(more), std::move(resume));
    EXPECT_EQ(o.summary.comm, o.summary.comm_formula);
    return o;
  }
  static void expect_same(const Outcome& a, const Outcome& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    EXPECT_EQ(a.tensors, b.tensors);
  }

  const Strings kHost{"tiers.device=900KiB", "tiers.host=64MiB"};
  const Strings kDrives{"tiers.device=900KiB", "tiers.host=900KiB",
                        "tiers.nvme.0.path=" + directory_ + "/drive",
                        "tiers.nvme.1.path=" + directory_ + "/drive2"};
};

TEST_F(Fp8Runs, HaveTheSameBitsInEveryPlace) {
  for (const Strings& more : {Strings{"gradient_clipping=0"}, Strings{"tiers.tiles=on"}}) {
    const Outcome plain = train("plain", more);
    EXPECT_EQ(plain.losses.size(), 3u);
    expect_same(train("host", more + kHost), plain);
    expect_same(train("drives", more + kDrives), plain);
    expect_same(train("offloaded", more + Strings{"zero_optimization.stage=3",
                                                  "zero_optimization.offload_param.device=cpu",
                                                  "zero_optimization.offload_optimizer.device=cpu",
                                                  "zero_optimization.offload_optimizer.ratio=0.5"}),
                plain);
  }
}

TEST_F(Fp8Runs, HaveTheSameBitsInEveryStage) {
  for (const Strings& more : {Strings{"devices=host:2"}, Strings{"devices=host:2", "tiers.tiles=on"}}) {
    const auto in_stage = [&](int stage, const Strings& also) {
      return more + also + Strings{fmt::format("zero_optimization.stage={}", stage)};
    };
    const Outcome plain = train("plain", in_stage(0, {}));
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE(stage);
      expect_same(train("stage", in_stage(stage, {})), plain);
      expect_same(train("moved", in_stage(stage, Strings{"tiers.device=1MiB", "tiers.host=2MiB"} +
                                                     Strings(kDrives.begin() + 2, kDrives.end()))),
                  plain);
    }
  }
}

// The same run moves and gathers about half of its layers' bytes. The embedding is not among them.
TEST_F(Fp8Runs, MoveHalfOfTheBytes) {
  const Strings large{"model.n_embd=128", "model.n_layer=6", "model.n_head=4", "tiers.tiles=off"};
  const Strings host{"tiers.device=1700KiB", "tiers.host=64MiB"};
  const Strings sharded{"devices=host:2", "zero_optimization.stage=3"};
  const Strings plain{"tiers.weights=computed"};
  const auto bytes_of_layers = [&](const Strings& more) {
    const Trainer trainer(config("planned", settings(large + more)), {});
    std::int64_t all = 0, layers = 0;
    for (std::size_t t = 0; t < trainer.plan().layout->tiles.size(); ++t) {
      const Layout::TileTensors& tile = trainer.plan().layout->tiles[t];
      const TensorSpec& spec = trainer.plan().layout->table.tensor(tile.stored).spec;
      const std::int64_t bytes = spec.count * static_cast<std::int64_t>(size_of(spec.dtype));
      all += bytes;
      if (tile.unit > 0 && tile.unit < trainer.plan().layout->head_unit()) layers += bytes;
    }
    return std::pair{layers, all};
  };
  const auto [in_fp8, all_in_fp8] = bytes_of_layers({});
  const auto [computed, all_computed] = bytes_of_layers(plain);
  EXPECT_LT(in_fp8, 0.54 * static_cast<double>(computed));
  EXPECT_EQ(all_computed - computed, all_in_fp8 - in_fp8);

  const Outcome fp8 = train("fp8", large + sharded), bf16 = train("bf16", large + sharded + plain);
  const auto gathered = [](const Outcome& o) { return o.summary.comm[CommAxis::kShards].received; };
  EXPECT_LT(gathered(fp8), 0.62 * static_cast<double>(gathered(bf16)));
  const Outcome from_host = train("fp8", large + host), all_from_host = train("bf16", large + host + plain);
  const auto to_device = [](const Outcome& o) { return o.summary.measured[kToDevice]; };
  EXPECT_LT(to_device(from_host), 0.75 * static_cast<double>(to_device(all_from_host)))
      << to_device(from_host) << " of " << to_device(all_from_host);
}

// The codes are made of the masters again, from copies and from state that is pinned on drives.
TEST_F(Fp8Runs, GoOnToTheBit) {
  const Strings base{"steps=4", "checkpoint.every=2", "checkpoint.keep=1"};
  for (const Strings& place :
       {Strings{}, kHost + Strings{"tiers.tiles=on"}, kDrives + Strings{"checkpoint.state=pin"},
        kDrives + Strings{"checkpoint.state=copy"}, Strings{"devices=host:2", "zero_optimization.stage=3"}}) {
    SCOPED_TRACE(testing::PrintToString(place));
    const Outcome whole = train("whole", base + place);
    (void)train("half", base + place + Strings{"steps=2"});
    const Outcome rest = train("half", base + place, "");
    EXPECT_EQ(rest.losses.size(), 2u);
    expect_tail(whole, rest);
  }
  // On other ranks with the same batch, where bits depend on sums alone; and from pinned state with more
  // memory.
  const Outcome whole = train("whole", base + kDrives + Strings{"checkpoint.state=pin"});
  (void)train("half", base + kDrives + Strings{"checkpoint.state=pin", "steps=2"});
  expect_tail(whole, train("half", base + Strings{"checkpoint.state=copy"}, ""));
}

TEST_F(Fp8Runs, ChangeTheFormOnlyIfTheyAreAllowedTo) {
  const Strings base{"steps=4", "checkpoint.every=2"};
  const Strings plain{"tiers.weights=computed"};
  (void)train("half", base + Strings{"steps=2"});
  const Error error = usage_error([&] { (void)train("half", base + plain, ""); });
  EXPECT_HAS(error.what(), "tiers.weights is computed, was fp8");
  const Outcome changed = train("half", base + plain + Strings{"checkpoint.allow=[\"tiers.weights\"]"}, "");
  EXPECT_EQ(changed.losses.size(), 2u);
  // A checkpoint without the key is of a run without FP8.
  (void)train("other", base + plain + Strings{"steps=2"});
  EXPECT_HAS(usage_error([&] { (void)train("other", base, ""); }).what(),
             "tiers.weights is fp8, was computed");
}

TEST_F(Fp8Runs, SaySo) {
  const Trainer trainer(config("said", settings({})), {});
  EXPECT_HAS(trainer.describe(), "weights    matrices of layers in FP8, ");
  const Trainer plain(config("said", settings({"tiers.weights=computed"})), {});
  EXPECT_EQ(plain.describe().find("FP8"), std::string::npos);
}

TEST_F(Fp8Runs, AreRefusedWithWhatTheyCannotBeCombinedWith) {
  const Strings fp8{"tiers.weights=fp8", "data.seq_len=16"};
  const auto refused = [&](const Strings& more) {
    SCOPED_TRACE(testing::PrintToString(more));
    const Error error = usage_error([&] { (void)on_book(fp8 + more); });
    EXPECT_HAS(error.what(), "tiers.weights");
    return std::string(error.what());
  };
  const Strings bf16{"bf16.enabled=true", "optimizer.type=AdamW"};
  EXPECT_HAS(refused({"bf16.enabled=false"}), "the weight is the master");
  EXPECT_HAS(refused({"fp64.enabled=true"}), "the weight is the master");
  for (const char* state : {"split", "bf16", "int8"})
    EXPECT_HAS(refused(bf16 + Strings{std::string("optimizer.state=") + state}), "whole masters in fp32");
  EXPECT_HAS(refused(bf16 + Strings{R"(optimizer.param_groups=[{"params": "*.bias", "frozen": true}])"}),
             "have no masters");
  EXPECT_HAS(refused(bf16 + Strings{"lora.rank=4", "model.from=" + directory_}),
             "only trained layers are kept so");
  EXPECT_HAS(refused({"tiers.weights=fp4"}), "expected one of \"computed\", \"fp8\"");
}

// Three heads of keys and values on two ranks, of 36 * 6 elements each.
TEST_F(Fp8Runs, AreRefusedWhereRanksShareHeadsThatAreNoWholeBlocks) {
  const auto start = [&](const Strings& more) {
    RunConfig run = on_book(Strings{"data.seq_len=16", "bf16.enabled=true", "tiers.weights=fp8",
                                    "devices=host:2", "parallel.tensor=2"} +
                            more);
    ModelConfig& m = *run.model;
    m.arch = Arch::kLlama;
    m.layers = 1, m.width = 36, m.heads = 6, m.kv_heads = 3, m.head_size = 6, m.inner = 32, m.context = 32;
    Trainer(run, {}).start();
  };
  EXPECT_HAS(usage_error([&] { start({}); }).what(), "share some of 3 heads");
}

}  // namespace
}  // namespace zg
