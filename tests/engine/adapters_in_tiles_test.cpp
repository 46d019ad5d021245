// Adapters beside layers in tiles: the frozen model comes tile by tile and has no sums of gradients, the
// adapters stay beside it, and where anything lies changes no bit.
#include "engine/ranks_distance.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

// Matrices of several tiles, the last of each with fewer rows, and gaps behind some.
ModelConfig sized(ModelConfig c, std::int64_t layers = 2) {
  const bool gpt2 = c.arch == Arch::kGpt2;
  c.width = gpt2 ? 88 : 92, c.heads = 8, c.head_size = gpt2 ? 11 : 12, c.kv_heads = gpt2 ? 8 : 2;
  c.inner = 172, c.layers = layers, c.vocab_size = 65;
  return c;
}

std::vector<ModelConfig> models() {
  const ModelConfig llama = sized(reference_llama());
  ModelConfig options = with_every_option(llama);
  options.tied = true;
  return {llama, options, with_norms_after(llama), with_fused_matrices(llama), sized(reference_gpt2())};
}

TinySetup setup_of(const ModelConfig& model, DType dtype, BlockTiling blocks = BlockTiling::kInTiles) {
  TinySetup s;
  s.model = model;
  s.dtype = dtype;
  s.layout.micro_batch = {2, 8};
  s.layout.micro_batches = 4;
  s.blocks = blocks;
  return with_adapters(s);
}

TinySetup whole(TinySetup s) {
  s.blocks = BlockTiling::kWhole;
  return s;
}
TinySetup small(TinySetup s, int drives = 1) {
  s.room = Room::kSmallest, s.layout.drives = drives;
  return s;
}

RanksOutcome train(const TinySetup& setup, const RanksWay& way = {}) {
  return train_on_ranks(setup, way, 3);
}

TEST(AdaptersInTiles, AreTheUnitsLastTile) {
  for (const ModelConfig& c : models()) {
    const TinySetup s = setup_of(c, DType::kF32);
    const Model model(s.model, s.dtype, host_ops(), 0, {}, BlockTiling::kInTiles),
        plain(c, s.dtype, host_ops(), 0, {}, BlockTiling::kInTiles);
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      const Unit& unit = model.units()[u];
      EXPECT_EQ(unit.adapted, unit.name.rfind("block", 0) == 0);
      if (!unit.adapted) continue;
      EXPECT_TRUE(unit.in_tiles());
      // The model's own tiles are those of a model without adapters.
      const std::vector<Tile>& own = plain.units()[u].tiles;
      ASSERT_EQ(unit.tiles.size(), own.size() + 1);
      EXPECT_GT(own.size(), 8u);
      for (std::size_t i = 0; i < own.size(); ++i) {
        EXPECT_EQ(unit.tiles[i].first, own[i].first);
        EXPECT_EQ(unit.tiles[i].count, own[i].count);
        EXPECT_EQ(unit.tiles[i].param, own[i].param);
      }
      EXPECT_EQ(unit.tiles.back().first, plain.units()[u].count);
      EXPECT_EQ(unit.tiles.back().first + unit.tiles.back().count, unit.count);
      for (const Param& p : unit.params) EXPECT_EQ(p.offset >= unit.tiles.back().first, p.adapter) << p.name;
    }
  }
}

// A step of SGD with rate 1 is the gradient; AdamW comes with clipping, by the norm of the adapters.
TEST(AdaptersInTiles, InFp64AreThoseBesideWholeLayers) {
  for (const ModelConfig& model : models()) {
    for (const bool sgd : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(model.arch), sgd ? "sgd, dropout" : "adamw"));
      TinySetup s = setup_of(model, DType::kF64);
      if (sgd) s = with_sgd(s), s.model.lora.dropout = 0.3, s.model.dropout = {0.1, 0.2};
      expect_near_in_fp64(train(s), train(whole(s)));
      if (HasFailure()) return;
    }
  }
}

TEST(AdaptersInTiles, PlacementChangesNoBit) {
  for (const ModelConfig& model : models()) {
    TinySetup base = setup_of(model, model.tied ? DType::kBF16 : DType::kF32);
    base.model.lora.dropout = 0.2, base.clip = 0;
    const RanksOutcome plain = train(base);
    const auto expect_same_with = [&](const char* what, const auto& change) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(model.arch), what));
      TinySetup other = base;
      change(other);
      expect_same(train(other), plain);
    };
    expect_same_with("host", [](TinySetup& s) { s = small(s, 0); });
    expect_same_with("NVMe", [](TinySetup& s) { s = small(s); });
    expect_same_with("NVMe, all is kept", [](TinySetup& s) { s = small(s, 2), s.layout.recompute = false; });
    expect_same_with("early", [](TinySetup& s) { s = small(s), s.timing = UpdateTiming::kEarly; });
    expect_same_with("updates by themselves, on the device", [](TinySetup& s) {
      s.timing = UpdateTiming::kSeparate, s.layout.device_updates = kAllUnits;
    });
    TinySetup by_micro_batch = base;
    by_micro_batch.layout.accumulation = Accumulation::kMicroBatchMajor;
    expect_same(train(small(by_micro_batch)), train(by_micro_batch));
    if (HasFailure()) return;
  }
}

// The model's tiles have weights and nothing else; no operation sums or finishes a gradient of theirs; and
// their bytes are those that they began with.
TEST(AdaptersInTiles, TheModelIsLeftAlone) {
  TinyRun run(small(setup_of(sized(reference_llama()), DType::kBF16)));
  const Layout& layout = run.layout();
  for (std::int32_t u = 1; u < layout.head_unit(); ++u) {
    for (std::int32_t t = layout.first_tile(u); t < layout.first_tile(u + 1); ++t) {
      const bool adapters = t == layout.adapter_tile(u);
      EXPECT_EQ(adapters, t + 1 == layout.first_tile(u + 1));
      for (const TensorId id : {layout.tile(t).accumulator, layout.tile(t).gradient, layout.tile(t).state})
        EXPECT_EQ(id != Layout::kNone, adapters);
    }
  }
  int walks = 0;
  for (const StepOp& op : run.programs().step.ops) {
    EXPECT_FALSE(op.has(Operand::kTileAccumulator));
    EXPECT_TRUE(!op.has(Operand::kAccumulator) || op.tile == layout.adapter_tile(op.unit));
    const bool passes = op.kind == OpKind::kForward || op.kind == OpKind::kBackward;
    EXPECT_EQ(op.in_tiles(), passes || op.kind == OpKind::kEmbedding || op.kind == OpKind::kHead);
    EXPECT_EQ(op.has(Operand::kAdapters), passes);
    walks += op.goes_on ? 1 : 0;
  }
  EXPECT_GT(walks, 0);
  run.initialize();
  const auto weights = [&] {
    run.settle();
    std::vector<std::vector<char>> all;
    for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
      if (t != layout.adapter_tile(layout.tile(t).unit)) all.push_back(run.content(layout.tile(t).weight));
    }
    return all;
  };
  const auto before = weights();
  for (int i = 0; i < 3; ++i) (void)run.step(Then::kPause);
  EXPECT_TRUE(before == weights());
}

// A step writes no byte of the model, and reads each of its tiles once in a pass of a micro-batch, at most.
TEST(AdaptersInTiles, StepsWriteTheAdaptersAlone) {
  TinySetup s = small(setup_of(sized(reference_llama()), DType::kBF16));
  s.layout.activations = OffloadTarget::kDevice;
  TinyRun run(s);
  const Layout& layout = run.layout();
  std::int64_t own = 0, passes = 0;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
    const Layout::TileTensors& tile = layout.tile(t);
    const auto bytes = [&](TensorId id) {
      std::int64_t sum = 0;
      if (id == Layout::kNone) return sum;
      const Tensor& tensor = layout.table.tensor(id);
      for (std::int32_t i = 0; i < tensor.segments; ++i)
        sum += round_up(layout.table.segment(tensor.first_segment + i).bytes, 4096);  // a drive's blocks
      return sum;
    };
    if (t == layout.adapter_tile(tile.unit)) {
      own += bytes(tile.weight) + bytes(tile.state) + bytes(tile.gradient);
    } else {
      // Forward, forward again and backward, of each micro-batch; embedding and head once.
      const bool block = tile.unit > 0 && tile.unit < layout.head_unit();
      passes += bytes(tile.weight) * (block ? 3 * s.layout.micro_batches : 1);
    }
  }
  const LinkBytes step = make_plan(layout, run.programs(), run.budgets()).per_step;
  EXPECT_GT(step.nvme_write(), 0);
  EXPECT_LE(step.nvme_write(), own);
  EXPECT_LE(step.nvme_read(), passes + own * s.layout.micro_batches * 3);
  run.initialize();
  for (int i = 0; i < 3; ++i) (void)run.step(i < 2 ? Then::kTrain : Then::kPause);
  run.engine().flush();
  const LinkBytes all = run.engine().settled_traffic();
  EXPECT_EQ(all, forecast(layout, run.programs(), run.budgets(), run.engine().history()));
  EXPECT_LT(all.nvme_write(), 4 * own);
}

// A layer that the device has no room for, beside its adapters.
TEST(AdaptersInTiles, TrainBesideALayerOfFourTimesTheDevice) {
  ModelConfig c = reference_llama();
  c.width = 256, c.inner = 1024, c.heads = 4, c.head_size = 64, c.kv_heads = 2, c.layers = 2, c.context = 16;
  TinySetup s = setup_of(c, DType::kF64);
  s.layout.micro_batch = {1, 8}, s.layout.micro_batches = 2, s.layout.drives = 1;
  s.layout.gradient = DType::kF64, s.eval_micro_batches = 2;
  const Model model(s.model, s.dtype, host_ops(), 0, {}, s.blocks), large(s.model, s.dtype, host_ops());
  const Layout layout(model, s.layout), whole_layout(large, s.layout);
  const std::int64_t layer = model.units()[1].tiles.back().first * std::int64_t{sizeof(double)};
  const std::int64_t device = layer / 4 - layout.workspace_charge();
  const auto least = smallest_budgets(layout, StepPrograms(layout, s.timing), device);
  const auto least_whole = smallest_budgets(whole_layout, StepPrograms(whole_layout, s.timing), 0);
  ASSERT_TRUE(least && least_whole);
  EXPECT_LE(least->device, device);
  EXPECT_GT(least_whole->device, layer);
  s.room = Room::kGiven, s.budgets = {device, least->host};
  const RanksOutcome tiles = train(s);
  s.room = Room::kEverything;
  expect_near_in_fp64(tiles, train(whole(s)));
}

// Ranks gather each tile, and the adapters, by itself.
TEST(AdaptersInTiles, AreSharded) {
  for (const ModelConfig& model : {sized(reference_llama()), sized(reference_gpt2())}) {
    const TinySetup base = setup_of(model, DType::kF32);
    const RanksOutcome plain = train(base, {2, 1, false});
    for (const bool keep : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, weights kept {}", name_of(model.arch), keep));
      expect_same(train(base, {2, 2, keep}), plain);
      expect_same(train(small(base), {2, 2, keep}), plain);
    }
    TinySetup fp64 = with_sgd(setup_of(model, DType::kF64));
    expect_near_in_fp64(train(fp64, {2, 2, false}), train(whole(fp64)));
  }
}

// Parts of layers, with heads of keys and values that several have, and of sequences.
TEST(AdaptersInTiles, GoWithParts) {
  for (const ModelConfig& model : models()) {
    if (model.block.head_norms == HeadNorms::kAll) continue;  // which no part can compute
    TinySetup s = with_sgd(setup_of(model, DType::kF64));
    s.model.lora.dropout = 0.3;
    const RanksOutcome one = train(whole(s));
    for (const int tensor : {2, 4}) {
      for (const bool sequence : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, {} parts, sequence {}", name_of(model.arch), tensor, sequence));
        const RanksWay way{1, 1, false, tensor, sequence};
        const RanksOutcome parts = train(s, way);
        expect_near_in_fp64(parts, one);
        expect_same(train(small(s), way), parts);
        if (HasFailure()) return;
      }
    }
  }
  TinySetup s = with_sgd(setup_of(sized(reference_llama()), DType::kF64));
  RanksWay way{2, 2, false};
  way.context = 2;
  expect_near_in_fp64(train(small(s), way), train(whole(s)));
}

// All schedules have the bits of one stage; the second halves of backwards compute the adapters' gradients,
// and need no tile.
TEST(AdaptersInTiles, GoWithStages) {
  using enum PipelineSchedule;
  for (const ModelConfig& model : {sized(reference_llama(), 3), sized(reference_gpt2(), 3)}) {
    TinySetup base = setup_of(model, model.arch == Arch::kGpt2 ? DType::kF32 : DType::kBF16);
    base.model.lora.dropout = 0.2;
    const RanksOutcome plain = train(base), two = train(base, {2, 1, false});
    TinySetup kept = small(base);
    kept.layout.recompute = false;
    for (const PipelineOptions& pipeline :
         {PipelineOptions{kBreadthFirst}, {kOneForwardOneBackward}, {kGPipe}, {kZeroBubble}}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(model.arch), name_of(pipeline.schedule)));
      expect_same(train(base, in_stages(1, 1, false, 3, pipeline)), plain);
      expect_same(train(kept, in_stages(1, 1, false, 2, pipeline)), plain);
      expect_same(train(small(base), in_stages(2, 2, false, 2, pipeline)), two);
      if (HasFailure()) return;
    }
    TinySetup fp64 = with_sgd(setup_of(model, DType::kF64));
    RanksWay all = in_stages(2, 2, false, 2, {kZeroBubble});
    all.tensor = 2, all.sequence = true;
    expect_near_in_fp64(train(small(fp64), all), train(whole(fp64)));
  }
}

// A state that was saved goes on to the bit, and beside whole layers to rounding.
TEST(AdaptersInTiles, StateIsSavedAndRestored) {
  TinySetup s = small(setup_of(sized(reference_llama()), DType::kF32));
  s.layout.saves = true;
  std::map<std::string, std::vector<float>> saved;
  const auto each_part = [](const StateTile& tile, const auto& f) {
    f(tile.param->name, tile.master);
    for (int i = 0; i < 2 && !tile.frozen; ++i) f(fmt::format("{} {}", tile.param->name, i), tile.moment[i]);
  };
  std::vector<double> losses;
  {
    TinyRun run(s);
    run.initialize();
    (void)run.step(Then::kPause);
    run.engine().save_state([&](const StateTile& tile) {
      EXPECT_EQ(tile.frozen, !tile.param->adapter);
      each_part(tile, [&](const std::string& name, const View& v) {
        std::vector<float>& all = saved[name];
        ASSERT_EQ(static_cast<std::int64_t>(all.size()), tile.first) << name;
        all.insert(all.end(), v.as<float>(), v.as<float>() + v.count());
      });
    });
    losses.push_back(run.step(Then::kTrain).loss);
    losses.push_back(run.step(Then::kPause).loss);
  }
  for (const BlockTiling blocks : {BlockTiling::kInTiles, BlockTiling::kWhole}) {
    s.blocks = blocks;
    TinyRun run(s);
    run.engine().restore_state([&](const StateTile& tile) {
      each_part(tile, [&](const std::string& name, const View& v) {
        std::copy_n(saved.at(name).begin() + tile.first, v.count(), v.as<float>());
      });
    });
    run.go_on_from(1);
    const double far = blocks == BlockTiling::kInTiles ? 0 : 1e-5 * losses[0];
    EXPECT_NEAR(run.step(Then::kTrain).loss, losses[0], far);
    EXPECT_NEAR(run.step(Then::kPause).loss, losses[1], far);
  }
}

}  // namespace
}  // namespace zg::test
